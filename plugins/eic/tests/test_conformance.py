"""The whole suite, on the simulator process."""

from hicache_conformance.conformance import Conformance


class TestEic(Conformance):
    backend = "eic"
