"""The adapter between SGLang's hierarchical cache and `HiCache`."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-sglang")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
