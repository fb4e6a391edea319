"""The whole conformance suite on the file backend."""

from hicache_conformance import Conformance


class TestConformance(Conformance):
    backend = "file"
