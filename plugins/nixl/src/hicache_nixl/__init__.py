"""KV-cache pages through NIXL's storage plugins: files and S3 objects."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-nixl")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
