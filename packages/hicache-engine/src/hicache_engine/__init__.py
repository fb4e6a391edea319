"""hicache-engine: the engine side of a hierarchical KV cache, as a library without torch.

``RadixCache`` knows which prefixes are in memory; ``HiCacheController`` moves
pages between that memory and a HiCache on threads of its own; ``Engine`` puts
them together the way a serving engine does, for tests, replays and to learn from.
"""

from __future__ import annotations

from hicache_engine.allocator import PageAllocator
from hicache_engine.controller import HiCacheController, PrefetchPolicy, WritePolicy
from hicache_engine.engine import Engine, Request, Served
from hicache_engine.hashing import page_hashes
from hicache_engine.radix import Match, RadixCache

__all__ = [
    "Engine",
    "HiCacheController",
    "Match",
    "PageAllocator",
    "PrefetchPolicy",
    "RadixCache",
    "Request",
    "Served",
    "WritePolicy",
    "page_hashes",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-engine")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
