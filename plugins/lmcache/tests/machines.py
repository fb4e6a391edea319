"""An engine's memory and a request's life over LMCRadixCache, for the tests that need the real lmcache."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from .conftest import needed

needed("hicache_engine")
needed("lmcache")
torch: Any = needed("torch")

from hicache_engine import Request  # noqa: E402
from hicache_lmcache.layers import LayerPools  # noqa: E402
from hicache_lmcache.radix import LMCRadixCache  # noqa: E402

LAYERS, HEADS, DIM, LATENT = 3, 2, 16, 48
NAMES = itertools.count()


@dataclass
class Machine:
    """An engine's memory and a cache over it."""

    kind: str
    page: int
    pages: int
    layers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        slots = self.page * self.pages
        shape = (slots, HEADS, DIM) if self.kind == "mha" else (slots, 1, LATENT)
        count = 2 * LAYERS if self.kind == "mha" else LAYERS
        self.layers = [torch.randn(shape, dtype=torch.float32).to(torch.bfloat16) for _ in range(count)]

    def pools(self) -> LayerPools:
        if self.kind == "mha":
            return LayerPools.of_mha(self.layers[:LAYERS], self.layers[LAYERS:])
        return LayerPools.of_mla(self.layers)

    def bytes_of(self, pages: list[int]) -> list[Any]:
        """Every layer's rows of these pages."""
        slots = [page * self.page + at for page in pages for at in range(self.page)]
        return [layer[slots].clone() for layer in self.layers]


Made = tuple[Machine, LMCRadixCache]


def serve(cache: LMCRadixCache, tokens: list[int], key: str | None = None) -> tuple[int, list[int]]:
    """Serve a request the way an engine does; return how many pages were there, and all of them."""
    match = cache.match_prefix(tokens, key)
    whole = match.load is None or all(match.load.wait_until(layer) for layer in range(LAYERS))
    found = match if whole else cache.drop_load(match)
    cache.lock(found.node)
    need = len(tokens) // cache.page_tokens - len(found.pages)
    if cache.allocator.available < need:
        cache.evict(need - cache.allocator.available)
    fresh = cache.allocator.take(need)
    assert fresh is not None
    request = Request(tokens, key, found.pages + fresh, found.node)
    cache.cache_finished_req(request)
    return len(found.pages), cache._match(tokens, key).pages


def clean(cache: LMCRadixCache) -> tuple[int, int, int, int]:
    """Pending work, locked pages, LMCache's pins, pages that are neither free nor in the tree."""
    assert cache.settle(10.0)
    lost = cache.allocator.num_pages - cache.allocator.available - cache.total_pages
    return cache.pending, cache.locked_pages, cache._store.pinned, lost


def references(cache: LMCRadixCache) -> set[tuple[int, bool]]:
    """(references, pinned) of everything in LMCache's memory: one each, held by it, when nothing leaks."""
    backend = cache._store._shared.engine.storage_manager.storage_backends["LocalCPUBackend"]
    return {(memory.get_ref_count(), bool(memory.is_pinned)) for memory in backend.hot_cache.values()}
