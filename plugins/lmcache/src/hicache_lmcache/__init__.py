"""Pages through LMCache's L2 adapters: as files, or in Redis or Valkey."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-lmcache")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
