"""Pages on a local or shared file system, log-structured; the embedded default backend."""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-file")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
