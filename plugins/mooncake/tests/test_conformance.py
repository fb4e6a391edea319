"""The whole suite against a real master: pages without and with a checksum."""

from __future__ import annotations

from hicache_conformance.conformance import Conformance


class TestConformance(Conformance):
    backend = "mooncake"


class TestConformanceWithChecksum(Conformance):
    backend = "mooncake"
    options = {"checksum": True}  # noqa: RUF012 - the suite reads a class attribute
