"""The whole suite on the memory backend: behind its server, and inside the process."""

from __future__ import annotations

from hicache_conformance import Conformance


class TestServed(Conformance):
    backend = "memory"


class TestInThisProcess(Conformance):
    backend = "memory"
    options = {"store": "the-suite"}  # noqa: RUF012 - declared as a ClassVar by the base
