"""The suite that proves a backend against the contract, and the toy backend it is proven with."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-conformance")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
