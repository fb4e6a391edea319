"""Pages through AIBrix's KV cache: RocksDB on a local disk, or files on a shared file system."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-aibrix")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
