"""`hicache replay --l2-pages N`: the log through an engine whose memory holds N pages, before the store.

A block of the log is a page of one token, since its id stands for the whole
prefix up to it. So the tree, the prefetches and the backups are those of a
serving engine, and the report tells hits in memory from hits in the store.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from hicache_cli.extensions import Extension, PlayThrough
from hicache_cli.pagebytes import PageBytes
from hicache_cli.player import private_memory
from hicache_cli.tally import MAX_NAMED, Tally
from hicache_cli.trace import Request
from hicache_cli.workers import Job, open_cache
from hicache_core.cache import HiCache
from hicache_core.errors import HiCacheError
from hicache_core.identity import Component
from hicache_core.memory import HostPool, Pages
from hicache_core.status import OK, Status
from hicache_engine.engine import Engine

#: Backups that are under way when the log ends get so many times the timeout of a call.
_SETTLE_TIMEOUTS = 4


class TimedCache:
    """A HiCache that counts and times what an engine's two threads ask of it."""

    def __init__(self, cache: HiCache, tally: Tally, page_nbytes: int) -> None:
        self._cache = cache
        self._tally = tally
        self._page_nbytes = page_nbytes
        self._lock = threading.Lock()

    def exists(self, hashes: Sequence[str]) -> int:
        began = time.perf_counter()
        run = self._cache.exists(hashes)
        self._count("contains", began, [OK] * run + [Status.MISS] * (run < len(hashes)), moved=0)
        return run

    def get(self, hashes: Sequence[str], pages: Pages) -> list[Status]:
        began = time.perf_counter()
        statuses = self._cache.get(hashes, pages)
        self._count("get", began, statuses, moved=self._page_nbytes)
        return statuses

    def set(self, hashes: Sequence[str], pages: Pages) -> list[Status]:
        began = time.perf_counter()
        statuses = self._cache.set(hashes, pages)
        self._count("set", began, statuses, moved=self._page_nbytes)
        return statuses

    def _count(self, name: str, began: float, statuses: Sequence[Status], *, moved: int) -> None:
        seconds = time.perf_counter() - began
        with self._lock:
            verb = self._tally.verbs[name]
            verb.seconds.append(seconds)
            verb.statuses.update(status.name for status in statuses)
            verb.nbytes += statuses.count(OK) * moved


class _Contents:
    """Fills the pages that the engine computes, and verifies those that it had or loaded."""

    def __init__(self, tally: Tally, page_nbytes: int) -> None:
        self._tally = tally
        self._bytes = PageBytes(page_nbytes)
        self.place = 0

    def compute(self, hashes: Sequence[str], pages: Pages) -> None:
        for position, page_hash in enumerate(hashes):
            self._bytes.fill(pages.views(position)[0], page_hash)

    def loaded(self, hashes: Sequence[str], pages: Pages) -> None:
        tally = self._tally
        for position, page_hash in enumerate(hashes):
            if self._bytes.matches(pages.views(position)[0], page_hash):
                tally.verified += 1
                continue
            tally.wrong += 1
            if len(tally.named) < MAX_NAMED:
                tally.named.append(f"request {self.place + 1}: page {page_hash[:16]}... has other bytes")


def _play_through(l2_pages: int) -> PlayThrough:
    def play(job: Job, requests: Sequence[tuple[int, Request]], progress: Callable[[int], None]) -> Tally:
        component = Component(
            "kv", shard="whole", byte_order="opaque", format="bytes", page_nbytes=job.page_nbytes
        )
        pool = HostPool.from_buffer(private_memory(job.page_nbytes * l2_pages), component)
        with open_cache(job, [pool]) as cache:
            tally = _serve(pool, cache, job, requests, progress)
            try:
                tally.store_nbytes = cache.usage().store_bytes
            except HiCacheError:
                pass  # a store that cannot tell
        return tally

    return play


def _serve(
    pool: HostPool,
    cache: HiCache,
    job: Job,
    requests: Sequence[tuple[int, Request]],
    progress: Callable[[int], None],
) -> Tally:
    tally = Tally()
    contents = _Contents(tally, job.page_nbytes)
    timed: Any = TimedCache(cache, tally, job.page_nbytes)
    engine = Engine(pool, 1, timed, contents.compute, loaded=contents.loaded)
    tally.started_s = time.monotonic()
    try:
        for place, request in requests:
            contents.place = place
            served = engine.serve([_token(block) for block in request.blocks])
            hits = served.memory + served.store
            tally.tiers.update(memory=served.memory, store=served.store)
            tally.requests += 1
            tally.blocks += len(request.blocks)
            tally.hit_blocks += hits
            tally.tokens += request.tokens
            tally.hit_tokens += request.tokens_of(hits)
            tally.places.append(place)
            tally.request_blocks.append(len(request.blocks))
            tally.request_hits.append(hits)
            progress(1)
    finally:
        engine.close(_SETTLE_TIMEOUTS * job.timeout_s)
    tally.ended_s = time.monotonic()
    return tally


def _token(block: int | str) -> int:
    """Give a block's id as one token."""
    return int.from_bytes(hashlib.sha256(repr(block).encode()).digest()[:8], "little")


EXTENSION = Extension(
    click.Option(
        ["--l2-pages"],
        type=click.IntRange(min=1),
        metavar="N",
        help="Play through an engine whose memory holds N pages, before the store; hits by tier.",
    ),
    _play_through,
)
