"""The `hicache` command: what is installed, does it work, what would it give."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
