"""Pages in page files on 3FS (usrbio), or on any mounted parallel file system, with metadata beside them."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-hf3fs")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
