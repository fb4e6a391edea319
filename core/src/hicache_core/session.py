"""A session: one open storage of one namespace behind its guards.

HiCache holds one session at a time and swaps it on rebind. Everything that
belongs to a namespace lives here: the storage, the keys on which a get has
failed, the bouncer, and the calls in flight.

The guards in the order in which a call passes them, and why: the gate first (a
closed session is not asked), then the breaker (a dead store is not asked), then
the watch (who hangs is seen by others), then the bounce (who hangs can be left).
The breaker behind the bounce would let every caller wait for its own timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hicache_core.bounce import Bouncer, pages_a_call
from hicache_core.capabilities import Capabilities
from hicache_core.identity import Namespace
from hicache_core.lifecycle import VerbGate
from hicache_core.memory import HostPool, Pages
from hicache_core.status import OK, Status
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig

T = TypeVar("T")

#: Seconds for which a key on which a get has failed counts as absent.
DEAD_KEY_S = 30.0
MAX_DEAD_KEYS = 65_536

_FAILED_GETS = frozenset({Status.CORRUPT, Status.SIZE_MISMATCH, Status.ERROR})


class Session:
    """One storage with its guards; thread-safe."""

    def __init__(
        self, storage: HiCacheStorage, namespace: Namespace, *, timeout_s: float, on_late: Callable[[], None]
    ) -> None:
        self.storage = storage
        self.namespace = namespace
        self.capabilities: Capabilities = storage.capabilities
        self.gate = VerbGate(storage.spec.name)
        self.gate.open()
        self._timeout_s = timeout_s
        self._on_late = on_late
        self._bouncer = Bouncer(storage)
        self._bounces_all = (
            bool(getattr(storage.options, "bounce", False)) or self.capabilities.deadline == "none"
        )
        self._dead: dict[str, float] = {}
        self._dead_lock = threading.Lock()
        self._running: dict[int, float] = {}

    # Calls.

    def get(self, keys: Sequence[str], pages: Pages, *, bounced: bool) -> Any:
        """Call batch_get, on the slots themselves or on private memory; may raise anything."""
        if bounced:
            return self._bouncer.get_pages(keys, pages, self._timeout_s)
        return self._watched(lambda: self.storage.batch_get(keys, pages))

    def set(self, keys: Sequence[str], pages: Pages, *, bounced: bool) -> Any:
        """Call batch_set, likewise; may raise anything."""
        if bounced:
            return self._bouncer.set_pages(keys, pages, self._timeout_s)
        return self._watched(lambda: self.storage.batch_set(keys, pages))

    def call(self, work: Callable[[], T]) -> T:
        """Call a verb that touches no slot; may raise anything."""
        if self._bounces_all:
            return self._bouncer.call(work, self._timeout_s)
        return self._watched(work)

    def bounces(self, pages: Pages) -> bool:
        """True where the backend must not, or cannot, work on these slots themselves."""
        if self._bounces_all:
            return True
        most = self.capabilities.max_segments
        if most is not None and pages.segments_per_page > most:
            return True
        return pages.pool is None and self.capabilities.needs_registered

    def chunk(self, count: int, bounced_pages: Pages | None = None) -> int:
        """Give how many of ``count`` keys one call to the backend may carry."""
        limit = self.capabilities.max_batch or count
        if bounced_pages is not None:
            limit = min(limit, pages_a_call(bounced_pages.component))
        return max(1, limit)

    def serves(self, pool: HostPool) -> bool:
        """True where the backend can work on this pool's memory itself."""
        most = self.capabilities.max_segments
        return most is None or len(pool.segments) <= most

    # What others see of a call that does not return.

    def overdue(self) -> bool:
        """True once for each call that has not returned by its deadline; from then on calls bounce."""
        if not self._running:
            return False
        now = time.monotonic()
        late = [token for token, deadline in self._running.copy().items() if deadline < now]
        noticed = [token for token in late if self._running.pop(token, None) is not None]
        if noticed:
            self._bounce_from_now_on()
        return bool(noticed)

    def _watched(self, work: Callable[[], T]) -> T:
        token = threading.get_ident()
        deadline = time.monotonic() + self._timeout_s
        self._running[token] = deadline
        try:
            return work()
        finally:
            unnoticed = self._running.pop(token, None) is not None
            if unnoticed and time.monotonic() > deadline:
                self._bounce_from_now_on()
                self._on_late()

    def _bounce_from_now_on(self) -> None:
        """After a first overrun ``hold`` is no longer trusted to hold only as long as a caller can bear."""
        if self.capabilities.deadline == "hold":
            self._bounces_all = True

    # Dead keys: contains would still say OK for some of them, and an engine would ask again and again.

    @property
    def dead_keys(self) -> int:
        """How many keys count as absent because a get failed on them."""
        self._forget_expired()
        return len(self._dead)

    def note_get(self, keys: Sequence[str], statuses: Sequence[Status]) -> None:
        """Remember the keys on which a get has failed."""
        if statuses.count(OK) == len(statuses):
            return
        failed = [key for key, status in zip(keys, statuses, strict=True) if status in _FAILED_GETS]
        if not failed:
            return
        until = time.monotonic() + DEAD_KEY_S
        with self._dead_lock:
            for key in failed:
                self._dead.pop(key, None)
                self._dead[key] = until
            while len(self._dead) > MAX_DEAD_KEYS:
                del self._dead[next(iter(self._dead))]

    def note_set(self, keys: Sequence[str], statuses: Sequence[Status]) -> None:
        """Forget the dead keys that were set anew."""
        if not self._dead:
            return
        with self._dead_lock:
            for key, status in zip(keys, statuses, strict=True):
                if status is OK:
                    self._dead.pop(key, None)

    def forget_dead(self) -> None:
        """Forget all dead keys: after a clear."""
        with self._dead_lock:
            self._dead.clear()

    def dead_flags(self, keys: Sequence[str]) -> list[bool]:
        """Tell for each key whether it is dead; empty when none is."""
        if not self._dead:
            return []
        self._forget_expired()
        flags = [key in self._dead for key in keys]
        return flags if any(flags) else []

    def _forget_expired(self) -> None:
        now = time.monotonic()
        with self._dead_lock:  # the first to be noted is the first to expire
            while self._dead and self._dead[first := next(iter(self._dead))] <= now:
                del self._dead[first]

    # The end.

    def close(self, timeout_s: float) -> bool:
        """Refuse new calls and wait for running ones; False when some still run."""
        return self.gate.close(timeout_s)

    def rebound(self, config: HiCacheStorageConfig, pools: Sequence[HostPool]) -> HiCacheStorage:
        """Let the storage change its namespace; it may live on, this session's private memory does not."""
        self._bouncer.forget_memory()
        return self.storage.rebind(config, pools)

    def end(self) -> None:
        """Let the workers go; the storage is closed by now."""
        self._bouncer.close()

    @property
    def abandoned(self) -> int:
        """Native calls that were left behind and still run."""
        return self._bouncer.abandoned
