"""The whole suite against a real master: pages without and with a checksum."""

from __future__ import annotations

from hicache_conformance import Conformance


class TestPlain(Conformance):
    backend = "mooncake"


class TestChecksum(Conformance):
    backend = "mooncake"
    options = {"checksum": True}  # noqa: RUF012 - the suite reads a class attribute
