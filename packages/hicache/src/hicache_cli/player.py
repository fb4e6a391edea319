"""The player: sends requests through a HiCache as an engine would, times each batch, verifies each byte.

A request asks how much of its chain exists, gets the leading run, and sets the
rest; batches have at most 128 pages. Only the calls themselves are timed:
making pages, wiping slots and verifying are not.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from hicache_cli.pagebytes import PageBytes
from hicache_cli.tally import MAX_NAMED, Tally
from hicache_cli.trace import BLOCK_TOKENS, Request
from hicache_core.identity import Component, Identity
from hicache_core.memory import HostPool
from hicache_core.status import OK, Status

if TYPE_CHECKING:
    from hicache_core.cache import HiCache

#: Pages a batch, as SGLang's controller uses.
BATCH_PAGES = 128


def replay_identity(tenant: str) -> Identity:
    """Give the identity of replayed pages; a tenant of its own keeps a run apart from all others."""
    return Identity(
        engine="hicache-replay",
        hash_scheme="sha256-of-block-id",
        hash_seed=None,
        model="none",
        revision=None,
        weights=None,
        quantization=None,
        config_overrides=None,
        kv_dtype="bytes",
        kv_scales=None,
        page_tokens=BLOCK_TOKENS,
        lora=None,
        tenant=tenant,
    )


def private_memory(nbytes: int) -> memoryview:
    """Map zeroed memory, page-aligned, taken from the machine only where it is touched."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Slots:
    """A pool of ``num_pages`` pages with the views that a player fills and verifies."""

    def __init__(self, page_nbytes: int, num_pages: int = BATCH_PAGES) -> None:
        component = Component(
            "kv", shard="whole", byte_order="opaque", format="bytes", page_nbytes=page_nbytes
        )
        memory = private_memory(page_nbytes * num_pages)
        self.pool = HostPool.from_buffer(memory, component)
        self.all = self.pool.pages(range(num_pages))
        self.views = [memory[i * page_nbytes : (i + 1) * page_nbytes] for i in range(num_pages)]
        self.memory = memory
        self._zeros = bytes(page_nbytes)

    def wipe(self, count: int) -> None:
        """Zero the first slots, so that a get that writes nothing cannot pass."""
        for view in self.views[:count]:
            view[:] = self._zeros


class Player:
    """Plays requests on one cache; one player, one thread."""

    def __init__(self, cache: HiCache, slots: Slots, contents: PageBytes) -> None:
        self.tally = Tally()
        self._cache = cache
        self._slots = slots
        self._contents = contents
        self._batch = len(slots.views)

    def play(self, requests: Iterable[tuple[int, Request]], progress: Callable[[int], None]) -> Tally:
        """Play (place in the log, request) pairs in order; ``progress`` hears of each request."""
        tally = self.tally
        tally.started_s = time.monotonic()
        for place, request in requests:
            hashes = [self._contents.hash_of(block) for block in request.blocks]
            present = self._exists(hashes)
            hits = self._get(place, hashes[:present])
            self._set(hashes[hits:])
            tally.requests += 1
            tally.blocks += len(hashes)
            tally.hit_blocks += hits
            tally.tokens += request.tokens
            tally.hit_tokens += request.tokens_of(hits)
            tally.places.append(place)
            tally.request_blocks.append(len(hashes))
            tally.request_hits.append(hits)
            progress(1)
        tally.ended_s = time.monotonic()
        return tally

    def _exists(self, hashes: Sequence[str]) -> int:
        """Count the leading run of pages that the cache says it has."""
        verb = self.tally.verbs["contains"]
        present = 0
        for start in range(0, len(hashes), self._batch):
            chunk = hashes[start : start + self._batch]
            began = time.perf_counter()
            run = self._cache.exists(chunk)
            verb.seconds.append(time.perf_counter() - began)
            verb.statuses["OK"] += run
            present += run
            if run < len(chunk):
                verb.statuses["MISS"] += 1
                break
        return present

    def _get(self, place: int, hashes: Sequence[str]) -> int:
        """Get and verify pages; count the leading run that came back right."""
        verb = self.tally.verbs["get"]
        for start in range(0, len(hashes), self._batch):
            chunk = hashes[start : start + self._batch]
            self._slots.wipe(len(chunk))
            locs = self._slots.all[: len(chunk)]
            began = time.perf_counter()
            statuses = self._cache.get(chunk, locs)
            verb.seconds.append(time.perf_counter() - began)
            self._count("get", statuses)
            good = self._verified(place, chunk, statuses)
            run = good.index(False) if False in good else len(good)
            if run < len(chunk):
                return start + run
        return len(hashes)

    def _verified(self, place: int, hashes: Sequence[str], statuses: Sequence[Status]) -> list[bool]:
        tally, contents = self.tally, self._contents
        good = []
        for page_hash, status, slot in zip(hashes, statuses, self._slots.views, strict=False):
            right = status is OK and contents.matches(slot, page_hash)
            good.append(right)
            if right:
                tally.verified += 1
            elif status is OK:
                tally.wrong += 1
                if len(tally.named) < MAX_NAMED:
                    tally.named.append(f"request {place + 1}: page {page_hash[:16]}... has other bytes")
        return good

    def _set(self, hashes: Sequence[str]) -> None:
        verb = self.tally.verbs["set"]
        for start in range(0, len(hashes), self._batch):
            chunk = hashes[start : start + self._batch]
            for page_hash, slot in zip(chunk, self._slots.views, strict=False):
                self._contents.fill(slot, page_hash)
            locs = self._slots.all[: len(chunk)]
            began = time.perf_counter()
            statuses = self._cache.set(chunk, locs)
            verb.seconds.append(time.perf_counter() - began)
            self._count("set", statuses)

    def _count(self, name: str, statuses: Sequence[Status]) -> None:
        verb = self.tally.verbs[name]
        good = statuses.count(OK)
        verb.statuses["OK"] += good
        verb.nbytes += good * self._contents.page_nbytes
        if good != len(statuses):
            verb.statuses.update(status.name for status in statuses if status is not OK)
