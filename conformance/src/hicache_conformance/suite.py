"""The module that ``pytest --hicache-backend NAME`` and ``hicache check`` collect."""

from __future__ import annotations

from hicache_conformance.conformance import Conformance


class TestConformance(Conformance):
    """Every case, for the backend named on the command line."""
