"""Pages in EIC (Elastic Instant Cache), through its `eic` module."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-eic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
