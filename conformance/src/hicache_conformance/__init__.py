"""The suite that proves a backend against the contract, and the toy backend it is proven with.

A plugin's whole test module::

    from hicache_conformance import Conformance
    class TestConformance(Conformance): backend = "acme"
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["BaseHarness", "Conformance", "Harness", "HarnessError", "Subject"]

_HOMES = {
    "BaseHarness": "harness",
    "Conformance": "conformance",
    "Harness": "harness",
    "HarnessError": "harness",
    "Subject": "subject",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-conformance")
    if name in _HOMES:
        return getattr(import_module(f"hicache_conformance.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
