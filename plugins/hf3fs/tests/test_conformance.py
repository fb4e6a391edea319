"""The whole suite, on a real metadata server process."""

from hicache_conformance.conformance import Conformance


class TestHf3fs(Conformance):
    backend = "hf3fs"
