"""LMCRadixCache: a radix cache whose prefixes go on in LMCache, loaded layer by layer.

The life of a request over it:

1. ``match_prefix``: what is in memory, and after it what LMCache holds. Pages
   are taken for that and layer 0 is on its way; the match carries a ``Load``.
2. Before the engine computes layer ``n`` it asks ``load.wait_until(n)``. True:
   the layer is there. False: LMCache failed or was too slow; ``drop_load`` gives
   the match without these pages, and the engine computes them as if nothing had
   been found. A request that is aborted drops its load too.
3. ``cache_finished_req`` puts the request's pages into the tree, loaded and
   computed ones alike, and stores them: the node stays locked until the store
   stream is done with its pages.
4. ``poll``, often: unlock what was stored or loaded, free what was dropped, once
   LMCache has let go of it.

Pages that are being loaded belong to the request and not to the tree. So
eviction cannot free them, no other request matches what is not whole, and a
load that fails leaves nothing to take back. (The layer-wise integration that
SGLang 0.5 had before 0.5.23 put them into the tree at once.)

The tree belongs to the engine's scheduling thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_core.errors import InvalidArgument
from hicache_core.notices import Notices
from hicache_engine.allocator import PageAllocator
from hicache_engine.radix import FinishedRequest, Match, Node, RadixCache
from hicache_lmcache.layers import LayerPools, Loading
from hicache_lmcache.opening import open_layers
from hicache_lmcache.streams import Stream, Ticket, stream_for

#: LMCache's own default of ``max_local_cpu_size`` is 5 GiB.
DEFAULT_CPU_NBYTES = 5 << 30
DEFAULT_CHUNK_TOKENS = 256


class Load:
    """A prefix on its way from LMCache into a request's pages; made by ``match_prefix``.

    Threads: ``wait_until`` and ``drop`` from the scheduling thread.
    """

    def __init__(
        self, stream: Stream, begin: Callable[[], Loading | None], num_layers: int, timeout_s: float
    ) -> None:
        self.pages: list[int] = []
        #: LMCache failed or was too slow, or the load was dropped.
        self.failed = False
        self._stream = stream
        self._num_layers = num_layers
        self._timeout_s = timeout_s
        self._loading: Loading | None = None
        self._begun = stream.submit(lambda: self._begin(begin))
        self._layers: list[Ticket] = []
        self._end: Ticket | None = None

    def found(self) -> int:
        """Wait for LMCache's answer and give the tokens that it holds; 0 where it failed or has none."""
        if not self._begun.wait(self._timeout_s):
            self.failed = True
            return 0
        return self._loading.num_tokens if self._loading is not None else 0

    def wait_until(self, layer: int) -> bool:
        """True once the layer is in memory; False when LMCache failed or took longer than the timeout.

        The layer after it is begun too, beside whatever the engine computes.
        """
        while len(self._layers) < min(layer + 2, self._num_layers) and not self.failed:
            self._layers.append(self._stream.submit(self._step))
        deadline = time.monotonic() + self._timeout_s
        for ticket in self._layers[: layer + 1]:
            if self.failed or not ticket.wait(max(0.0, deadline - time.monotonic())):
                self.failed = True
                return False
        return not self.failed

    def drop(self) -> None:
        """Load nothing more; idle once the stream has come to it."""
        self.failed = True
        if self._end is None:
            self._end = self._stream.submit(self._abandon)

    @property
    def idle(self) -> bool:
        """True when LMCache touches none of the pages any more and holds nothing for them."""
        if self._end is not None:
            return self._end.done.is_set()
        return len(self._layers) == self._num_layers and self._layers[-1].done.is_set() and not self.failed

    @property
    def last(self) -> Ticket | None:
        """The ticket after which the load is idle; None while the engine has layers to ask for."""
        if self._end is not None:
            return self._end
        return self._layers[-1] if len(self._layers) == self._num_layers else None

    @property
    def error(self) -> BaseException | None:
        """What LMCache raised."""
        return next((t.error for t in (self._begun, *self._layers) if t.error is not None), None)

    def _begin(self, begin: Callable[[], Loading | None]) -> None:
        if not self.failed:
            self._loading = begin()

    def _step(self) -> None:
        if self._loading is not None and not self._loading.ended and not self.failed:
            self._loading.step()

    def _abandon(self) -> None:
        if self._loading is not None:
            self._loading.abandon()


@dataclass(frozen=True, slots=True)
class LoadingMatch(Match):
    """What of a token sequence is in memory, or comes from LMCache."""

    load: Load | None = None
    """What is still on its way: the last pages of ``pages``; None where all are there."""


@dataclass(slots=True)
class LayerCounters:
    """What an LMCRadixCache did; one that stores and loads nothing shows here (lmcache#2400)."""

    loaded_tokens: int = 0
    stored_tokens: int = 0
    """Tokens of finished requests that LMCache held afterwards, which it was asked."""
    unstored_tokens: int = 0
    """Tokens that it did not, though nothing failed: its memory is small, or it is ill."""
    failed_loads: int = 0
    failed_stores: int = 0


class LMCRadixCache(RadixCache):
    """See the module's text, and RadixCache.

    Args:
        allocator: pages of ``pools``; page ``p`` has the slots ``p * page_tokens`` and on.
        pools: the engine's KV memory, a tensor a layer.
        namespace: whose KV this is (``Namespace.of(identity).id``).
        chunk_tokens: LMCache's chunk, a multiple of page_tokens.
        timeout_s: the longest wait for a layer, or for a store that eviction needs.
        lowest_common: what tensor-parallel ranks all have, from what this one has; identity for one rank.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_tokens: int,
        pools: LayerPools,
        namespace: str,
        *,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        cpu_nbytes: int = DEFAULT_CPU_NBYTES,
        remote_url: str = "",
        timeout_s: float = 5.0,
        lowest_common: Callable[[int], int] = lambda tokens: tokens,
        on_evict: Callable[[tuple[int, ...], str | None, list[int]], None] | None = None,
    ) -> None:
        super().__init__(allocator, page_tokens, on_evict=on_evict)
        if chunk_tokens < page_tokens or chunk_tokens % page_tokens:
            raise InvalidArgument(
                "LMCache's chunk is not a whole number of pages",
                value=f"{chunk_tokens} tokens a chunk, {page_tokens} a page",
                remedy=f"Choose a multiple of {page_tokens}.",
            )
        self.counters = LayerCounters()
        self._store = open_layers(
            pools, namespace, chunk_tokens=chunk_tokens, cpu_nbytes=cpu_nbytes, remote_url=remote_url
        )
        device = str(pools.keys[0].device)
        self._loads: Stream = stream_for(device, "hicache-lmcache-load")
        self._stores: Stream = stream_for(device, "hicache-lmcache-store")
        self._timeout_s = timeout_s
        self._lowest_common = lowest_common
        self._notices = Notices()
        self._storing: deque[tuple[Ticket, Node, int, list[int]]] = deque()
        self._in_flight: list[tuple[Load, Node]] = []

    # Verbs.

    def match_prefix(self, tokens: Sequence[int], extra_key: str | None = None) -> LoadingMatch:
        """Find what is in memory, and begin to load what LMCache holds after it.

        The match's node stays locked until the load has ended, whatever else locks it.
        """
        self.poll()
        match = self._match(tokens, extra_key)
        chunk, known = self._store.chunk_tokens, len(match.pages) * self.page_tokens
        wanted = len(tokens) // chunk * chunk - known // chunk * chunk
        if wanted <= 0:
            return LoadingMatch(match.pages, match.node)
        self.lock(match.node)  # or the room for the rest could be made of it
        pages = self._take((known // chunk * chunk + wanted - known) // self.page_tokens)
        load = self._begin(tokens, extra_key, match.pages, pages)
        self._in_flight.append((load, match.node))
        found = load.found() if pages else 0
        kept = max(0, found - known) // self.page_tokens
        if load.failed:
            load.pages = pages  # LMCache may yet begin with them
            self._give_up(load)
            return LoadingMatch(match.pages, match.node)
        load.pages = pages[:kept]
        self.allocator.give_back(pages[kept:])
        if not kept:
            self._give_up(load, failed=False)
            return LoadingMatch(match.pages, match.node)
        load.wait_until(-1)  # layer 0 is on its way
        self.counters.loaded_tokens += kept * self.page_tokens
        return LoadingMatch(match.pages + load.pages, match.node, load)

    def drop_load(self, match: LoadingMatch) -> Match:
        """Give a match up to where its load began; its pages are freed once LMCache is done with them."""
        load = match.load
        if load is None:
            return match
        if load.idle:
            self.allocator.give_back(load.pages)
            load.pages, given = [], load.pages
        else:
            given = list(load.pages)
            self._give_up(load, failed=load.failed)
        self.poll()
        return Match(match.pages[: len(match.pages) - len(given)], match.node)

    def cache_finished_req(self, request: FinishedRequest) -> int:
        """Keep a finished request's pages, unlock its node, and store what LMCache lacks.

        Raises:
            InvalidArgument: some of its pages come from a load that failed or was not waited for.
        """
        mine = set(request.pages)
        for load, _ in self._in_flight:
            if not mine.isdisjoint(load.pages) and not load.idle:
                raise InvalidArgument(
                    "a request was finished whose pages are not loaded",
                    value=f"{len(load.pages)} pages",
                    remedy="Wait for the last layer; where that fails, use drop_load and compute them.",
                )
        had = super().cache_finished_req(request)
        self._store_later(request.tokens, request.extra_key)
        self.poll()
        return had

    def evict(self, num_pages: int) -> int:
        """Free pages; where stores in flight hold what is needed, wait for these first."""
        self.poll()
        deadline = time.monotonic() + self._timeout_s
        while self._storing and self.evictable_pages < num_pages and time.monotonic() < deadline:
            self._storing[0][0].done.wait(max(0.0, deadline - time.monotonic()))
            self.poll()
        return super().evict(num_pages)

    def poll(self) -> None:
        """Unlock what was stored and loaded, and free what was dropped, as far as LMCache is done with it."""
        while self._storing and self._storing[0][0].done.is_set():
            ticket, node, tokens, held = self._storing.popleft()
            self.unlock(node)
            if ticket.error is None:
                self.counters.stored_tokens += sum(held)
                self.counters.unstored_tokens += tokens - sum(held)
            else:
                self.counters.failed_stores += 1
                self._notices.warn("lmcache store", type(ticket.error).__name__, repr(ticket.error))
        flying = []
        for load, node in self._in_flight:
            if not load.idle:
                flying.append((load, node))
                continue
            self.unlock(node)
            if load.failed:
                self.allocator.give_back(load.pages)
        self._in_flight = flying

    @property
    def pending(self) -> int:
        """Loads and stores whose pages LMCache may still touch."""
        return len(self._in_flight) + len(self._storing)

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing that was dropped or finished is pending; False when something still is."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.poll()
            waiting = [ticket for ticket, *_ in self._storing]
            waiting += [load.last for load, _ in self._in_flight if load.last is not None]
            if not waiting or time.monotonic() >= deadline:
                return not self.pending
            waiting[0].done.wait(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float = 5.0) -> bool:
        """Drop what is loading, let stores end, end the streams; True when all of that was done in time."""
        for load, _ in self._in_flight:
            if not load.idle:
                self._give_up(load, failed=False)
        settled = self.settle(timeout_s)
        ended = self._loads.close(timeout_s)
        ended = self._stores.close(timeout_s) and ended
        if ended:
            self._store.close()
        return settled and ended

    # Inside.

    def _take(self, count: int) -> list[int]:
        """Take pages for whole chunks, evicting; fewer where there is no room."""
        available = self.allocator.available
        if available < count:
            self.evict(count - available)
        return self.allocator.take(min(count, self.allocator.available)) or []

    def _begin(
        self, tokens: Sequence[int], extra_key: str | None, known: list[int], pages: list[int]
    ) -> Load:
        chunk, start = self._store.chunk_tokens, len(known) * self.page_tokens
        end = (start + len(pages) * self.page_tokens) // chunk * chunk
        slots = [-1] * start + self._slots(pages)
        wanted = list(tokens[:end])

        def begin() -> Loading | None:
            offset = start // chunk * chunk
            return self._store.begin_load(wanted, slots[:end], offset, extra_key, self._lowest_common)

        return Load(self._loads, begin, self._store.pools.num_layers, self._timeout_s)

    def _give_up(self, load: Load, *, failed: bool = True) -> None:
        if failed and load.error is not None:
            self._notices.warn("lmcache load", type(load.error).__name__, repr(load.error))
        self.counters.failed_loads += failed
        load.drop()

    def _store_later(self, tokens: Sequence[int], extra_key: str | None) -> None:
        match = self._match(tokens, extra_key)
        chunk = self._store.chunk_tokens
        count = len(match.pages) * self.page_tokens // chunk * chunk
        if not count:
            return
        self.lock(match.node)
        chosen, slots = list(tokens[:count]), self._slots(match.pages)[:count]
        held: list[int] = []
        ticket = self._stores.submit(lambda: held.append(self._store.store(chosen, slots, extra_key)))
        self._storing.append((ticket, match.node, count, held))

    def _slots(self, pages: Sequence[int]) -> list[int]:
        size = self.page_tokens
        return [page * size + at for page in pages for at in range(size)]
