"""HiCacheController: moves pages between an engine's memory and a HiCache, on threads of its own.

The engine's scheduling thread asks (``prefetch``, ``backup``), polls, and alone
touches the radix tree. The prefetch thread fills pages that were taken for it;
the backup thread reads pages whose node is locked. A page goes back to the
allocator only when no thread can touch it any more: what a prefetch did not
use is drained, not freed, until its thread has let go (C11).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from hicache_core.memory import HostPool
from hicache_core.notices import Notices
from hicache_core.probe import leading_run
from hicache_core.status import OK
from hicache_engine.hashing import page_hashes
from hicache_engine.radix import Match, Node, RadixCache

if TYPE_CHECKING:
    from hicache_core.cache import HiCache

#: Pages a call to the store, as SGLang's controller uses.
BATCH_PAGES = 128
#: Defaults of SGLang's extra config: prefetch_timeout_base and prefetch_timeout_per_ki_token.
TIMEOUT_BASE_S = 1.0
TIMEOUT_PER_KI_TOKEN_S = 0.25


class PrefetchPolicy(Enum):
    """How long a request waits for pages from the store."""

    BEST_EFFORT = "best_effort"
    """Not at all: it starts with what is there when it is scheduled."""
    WAIT_COMPLETE = "wait_complete"
    """Until everything that the store has is there."""
    TIMEOUT = "timeout"
    """Until then, or a time that grows with the prefix."""


class WritePolicy(Enum):
    """When pages go to the store."""

    WRITE_THROUGH = "write_through"
    """When their request is done."""
    WRITE_BACK = "write_back"
    """When they are evicted from memory; the eviction waits for it."""


class Prefetch:
    """One request's pages on their way from the store; made by ``HiCacheController.prefetch``."""

    __slots__ = (
        "deadline",
        "done",
        "extra_key",
        "hashes",
        "idle",
        "kept",
        "match",
        "pages",
        "stop",
        "tokens",
    )

    def __init__(
        self, tokens: Sequence[int], extra_key: str | None, match: Match, hashes: list[str], pages: list[int]
    ) -> None:
        self.tokens = tokens
        self.extra_key = extra_key
        self.match = match
        self.hashes = hashes
        self.pages = pages
        #: Leading pages that are whole; only the prefetch thread raises it.
        self.done = 0
        #: Set by the engine's thread: begin no further batch.
        self.stop = False
        #: Set by the prefetch thread: it touches no page of this any more.
        self.idle = threading.Event()
        self.deadline = 0.0
        #: Leading pages that went into the tree; the others are given back once the thread has let go.
        self.kept = 0


class HiCacheController:
    """Prefetch and backup for one pool and tree.

    Threads: all methods belong to the engine's scheduling thread, except that
    ``shutdown`` may come from any.

    Args:
        pool: the memory that the tree's page indices mean.
        tree: made with this controller's ``write_back`` as on_evict where the policy is WRITE_BACK.
        cache: the store; None until ``attach``.
        batch_pages: pages a call to the store.
    """

    def __init__(
        self,
        pool: HostPool,
        tree: RadixCache,
        cache: HiCache | None = None,
        *,
        prefetch_policy: PrefetchPolicy = PrefetchPolicy.WAIT_COMPLETE,
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        batch_pages: int = BATCH_PAGES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.tree = tree
        self.prefetch_policy = prefetch_policy
        self.write_policy = write_policy
        self._batch_pages = batch_pages
        self._clock = clock
        self._cache = cache
        self._notices = Notices()
        self._use = threading.Condition()
        self._users = 0
        self._closed = False
        self._prefetches: SimpleQueue[Prefetch | None] = SimpleQueue()
        self._backups: SimpleQueue[tuple[list[str], list[int], Node] | None] = SimpleQueue()
        self._backed_up: deque[Node] = deque()
        self._pending_backups = 0
        self._draining: list[Prefetch] = []
        self._threads = [
            threading.Thread(target=self._run_prefetches, name="hicache-prefetch", daemon=True),
            threading.Thread(target=self._run_backups, name="hicache-backup", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # Prefetch.

    def prefetch(self, tokens: Sequence[int], extra_key: str | None, match: Match) -> Prefetch | None:
        """Ask for the whole pages after a match; None where there is nothing to ask or no room.

        The match's node stays locked until ``finish``.
        """
        size = self.tree.page_tokens
        hashes = page_hashes(tokens, size, extra_key=extra_key)[len(match.pages) :]
        if not hashes or self._cache is None or self._closed:
            return None
        self.tree.lock(match.node)
        pages = self._take(len(hashes))
        if not pages:
            self.tree.unlock(match.node)
            return None
        prefetch = Prefetch(tokens, extra_key, match, hashes[: len(pages)], pages)
        wait_s = TIMEOUT_BASE_S + TIMEOUT_PER_KI_TOKEN_S * len(pages) * size / 1024
        prefetch.deadline = self._clock() + wait_s
        if not self._submit(self._prefetches, prefetch):
            self.tree.allocator.give_back(pages)
            self.tree.unlock(match.node)
            return None
        return prefetch

    def ready(self, prefetch: Prefetch) -> bool:
        """True when the policy lets the request start."""
        if self.prefetch_policy is PrefetchPolicy.BEST_EFFORT or prefetch.idle.is_set():
            return True
        return self.prefetch_policy is PrefetchPolicy.TIMEOUT and self._clock() >= prefetch.deadline

    def wait(self, prefetch: Prefetch) -> None:
        """Block until ``ready``: for callers that have nothing else to do."""
        if self.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE:
            prefetch.idle.wait()
        elif self.prefetch_policy is PrefetchPolicy.TIMEOUT:
            prefetch.idle.wait(max(0.0, prefetch.deadline - self._clock()))

    def finish(self, prefetch: Prefetch) -> int:
        """End a prefetch and put what arrived into the tree; return how many pages that was."""
        prefetch.stop = True
        done = prefetch.done
        known = len(prefetch.match.pages)
        end = (known + done) * self.tree.page_tokens
        arrived = prefetch.pages[:done]
        if done:
            pages = prefetch.match.pages + arrived
            had = self.tree.insert(prefetch.tokens[:end], pages, prefetch.extra_key)
            self.tree.allocator.give_back(arrived[: max(0, had - known)])
        self.tree.unlock(prefetch.match.node)
        prefetch.kept = done
        self._draining.append(prefetch)
        self.poll()
        return done

    # Backup.

    def backup(self, tokens: Sequence[int], extra_key: str | None, *, skip_pages: int = 0) -> None:
        """Write a prefix in the tree, except its first ``skip_pages``, to the store; returns at once."""
        if self.write_policy is not WritePolicy.WRITE_THROUGH or self._cache is None or self._closed:
            return
        match = self.tree.match_prefix(tokens, extra_key)
        hashes = page_hashes(tokens, self.tree.page_tokens, extra_key=extra_key)
        chosen = hashes[skip_pages : len(match.pages)]
        if not chosen:
            return
        self.tree.lock(match.node)
        if self._submit(self._backups, (chosen, match.pages[skip_pages:], match.node)):
            self._pending_backups += 1
        else:
            self.tree.unlock(match.node)

    def write_back(self, tokens: tuple[int, ...], extra_key: str | None, pages: list[int]) -> None:
        """Write a node that is about to be evicted; for the tree's on_evict, which waits."""
        hashes = page_hashes(tokens, self.tree.page_tokens, extra_key=extra_key)[-len(pages) :]
        try:
            self._store(hashes, pages)
        except Exception as error:  # noqa: BLE001 - the eviction goes on: a lost page is a later miss
            self._notices.warn("hicache write-back", type(error).__name__, repr(error))

    def poll(self) -> None:
        """Unlock what was backed up and free what prefetches have let go; call it often."""
        while self._backed_up:
            self.tree.unlock(self._backed_up.popleft())
            self._pending_backups -= 1
        still = []
        for prefetch in self._draining:
            if prefetch.idle.is_set():
                self.tree.allocator.give_back(prefetch.pages[prefetch.kept :])
            else:
                still.append(prefetch)
        self._draining = still

    @property
    def pending(self) -> int:
        """Backups and prefetches whose pages are not free to go yet."""
        return self._pending_backups + len(self._draining)

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is pending; False when something still is after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.poll()
            if not self.pending:
                return True
            with self._use:
                if self._use.wait(max(0.0, min(0.1, deadline - time.monotonic()))):
                    continue
            if time.monotonic() >= deadline:
                self.poll()
                return not self.pending

    # The store comes and goes.

    @property
    def attached(self) -> bool:
        """True while there is a store."""
        return self._cache is not None

    def attach(self, cache: HiCache) -> None:
        """Use a store from here on."""
        with self._use:
            self._cache = cache

    def detach(self, timeout_s: float) -> bool:
        """Stop using the store; True when no thread uses it any more, so that it may be closed."""
        deadline = time.monotonic() + timeout_s
        with self._use:
            self._cache = None
            while self._users:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._use.wait(left)
        return True

    def shutdown(self, timeout_s: float) -> bool:
        """End both threads: running batches end, queued work is dropped; False when a thread still runs."""
        with self._use:
            if not self._closed:
                self._prefetches.put(None)
                self._backups.put(None)
            self._closed, self._cache = True, None
        detached = self.detach(timeout_s)
        deadline = time.monotonic() + (timeout_s if detached else 0.0)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.poll()
        return not any(thread.is_alive() for thread in self._threads)

    # On the threads.

    def _run_prefetches(self) -> None:
        while (prefetch := self._prefetches.get()) is not None:
            try:
                if not prefetch.stop:
                    self._load(prefetch)
            except Exception as error:  # noqa: BLE001 - the thread serves later requests too
                self._notices.warn("hicache prefetch", type(error).__name__, repr(error))
            finally:
                prefetch.idle.set()
                self._signal()

    def _load(self, prefetch: Prefetch) -> None:
        cache = self._borrow()
        if cache is None:
            return
        try:
            found = cache.exists(prefetch.hashes)
            for start in range(0, found, self._batch_pages):
                if prefetch.stop:
                    return
                stop = min(start + self._batch_pages, found)
                statuses = cache.get(prefetch.hashes[start:stop], self.pool.pages(prefetch.pages[start:stop]))
                run = leading_run([status is OK for status in statuses])
                prefetch.done += run
                if run < stop - start:
                    return
        finally:
            self._return_cache()

    def _run_backups(self) -> None:
        while (backup := self._backups.get()) is not None:
            hashes, pages, node = backup
            try:
                self._store(hashes, pages)
            except Exception as error:  # noqa: BLE001 - a lost backup is a later miss
                self._notices.warn("hicache backup", type(error).__name__, repr(error))
            finally:
                self._backed_up.append(node)
                self._signal()

    def _store(self, hashes: list[str], pages: list[int]) -> None:
        cache = self._borrow()
        if cache is None:
            return
        try:
            for start in range(0, len(hashes), self._batch_pages):
                stop = start + self._batch_pages
                cache.set(hashes[start:stop], self.pool.pages(pages[start:stop]))
        finally:
            self._return_cache()

    def _borrow(self) -> HiCache | None:
        with self._use:
            if self._cache is not None:
                self._users += 1
            return self._cache

    def _return_cache(self) -> None:
        with self._use:
            self._users -= 1
            self._use.notify_all()

    def _signal(self) -> None:
        with self._use:
            self._use.notify_all()

    def _submit(self, queue: SimpleQueue[Any], work: object) -> bool:
        """Give a thread work; False once it ends. What came behind its end would never be let go."""
        with self._use:
            if not self._closed:
                queue.put(work)
            return not self._closed

    def _take(self, count: int) -> list[int]:
        """Take as many pages as there are, evicting for the rest."""
        allocator = self.tree.allocator
        if allocator.available < count:
            self.tree.evict(count - allocator.available)
        return allocator.take(min(count, allocator.available)) or []
