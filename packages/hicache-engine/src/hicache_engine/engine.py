"""Engine: the smallest thing that uses the tree and the controller the way a serving engine does.

A request is matched in memory, then prefetched from the store, then computed
for what is left; its pages are kept for others and backed up. "Computing" is a
callback that fills pages, so a test or a replay knows what each must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_core.memory import HostPool, Pages
from hicache_engine.allocator import PageAllocator
from hicache_engine.controller import HiCacheController, PrefetchPolicy, WritePolicy
from hicache_engine.hashing import page_hashes
from hicache_engine.radix import Node, RadixCache

if TYPE_CHECKING:
    from hicache_core.cache import HiCache

#: Fills or examines the pages of these hashes.
PageWork = Callable[[Sequence[str], Pages], None]


@dataclass(slots=True)
class Request:
    """One request on its way through the engine."""

    tokens: Sequence[int]
    extra_key: str | None = None
    pages: list[int] = field(default_factory=list)
    node: Node = field(default_factory=lambda: Node(None, (), [], 0))


@dataclass(frozen=True, slots=True)
class Served:
    """Where the whole pages of a request came from."""

    memory: int
    store: int
    computed: int
    """Computed pages that did not fit into memory (``dropped``) are among these."""
    dropped: int = 0


class Engine:
    """Serves one request at a time.

    Args:
        pool: memory of the pages (L2).
        page_tokens: tokens a page.
        cache: the store (L3); None for none.
        compute: fills the pages of these hashes.
        loaded: sees the pages that came from memory or the store, for verification.
    """

    def __init__(
        self,
        pool: HostPool,
        page_tokens: int,
        cache: HiCache | None,
        compute: PageWork,
        *,
        loaded: PageWork | None = None,
        prefetch_policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    ) -> None:
        self._compute = compute
        self._loaded = loaded
        self._pool = pool
        on_evict = self._write_back if write_policy is WritePolicy.WRITE_BACK else None
        self.tree = RadixCache(PageAllocator(pool.num_pages), page_tokens, on_evict=on_evict)
        self.controller = HiCacheController(
            pool, self.tree, cache, prefetch_policy=prefetch_policy, write_policy=write_policy
        )

    def serve(self, tokens: Sequence[int], extra_key: str | None = None) -> Served:
        """Serve a request; on return its pages are in the tree, as far as memory allows."""
        self.controller.poll()
        hashes = page_hashes(tokens, self.tree.page_tokens, extra_key=extra_key)
        memory = len(self.tree.match_prefix(tokens, extra_key).pages)
        store = self._load(tokens, extra_key)
        request = Request(tokens, extra_key)
        match = self.tree.match_prefix(tokens, extra_key)
        self.tree.lock(match.node)
        request.node = match.node
        known = len(match.pages)
        if self._loaded is not None and known:
            self._loaded(hashes[:known], self._pool.pages(match.pages))
        fresh = self._take(len(hashes) - known)
        if fresh:
            self._compute(hashes[known : known + len(fresh)], self._pool.pages(fresh))
        request.pages = match.pages + fresh
        request.tokens = tokens[: len(request.pages) * self.tree.page_tokens]
        self.tree.cache_finished_req(request)
        self.controller.backup(request.tokens, extra_key, skip_pages=memory + store)
        computed = len(hashes) - known
        return Served(memory, known - memory, computed, dropped=computed - len(fresh))

    def close(self, timeout_s: float = 5.0) -> bool:
        """Let backups finish, then end the threads; True when both was done in time. The cache stays open."""
        settled = self.controller.settle(timeout_s)
        return self.controller.shutdown(timeout_s) and settled

    def _load(self, tokens: Sequence[int], extra_key: str | None) -> int:
        match = self.tree.match_prefix(tokens, extra_key)
        prefetch = self.controller.prefetch(tokens, extra_key, match)
        if prefetch is None:
            return 0
        self.controller.wait(prefetch)
        return self.controller.finish(prefetch)

    def _take(self, count: int) -> list[int]:
        """Take pages, evicting; backups in flight are waited for before a page is dropped."""
        allocator = self.tree.allocator
        if allocator.available < count:
            self.tree.evict(count - allocator.available)
        if allocator.available < count and self.controller.pending:
            self.controller.settle(1.0)
            self.tree.evict(count - allocator.available)
        return allocator.take(min(count, allocator.available)) or []

    def _write_back(self, tokens: tuple[int, ...], extra_key: str | None, pages: list[int]) -> None:
        self.controller.write_back(tokens, extra_key, pages)
