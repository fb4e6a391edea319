"""Instances of a class written for SGLang: one a pool, and which of them to ask.

SGLang makes one instance a process and registers its pool before it asks for
anything; what is asked for may depend on that pool (HiCacheNixl's keys do). Here
pools come and go, so there is an instance a pool, and a query goes to the one
that was made last, also after its pool is gone. An instance is closed once it is
neither a pool's, nor to be asked, nor in a call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hicache_core import HostPool, StorageClosed


class Held:
    """One instance with the number of its holders; leaving its context gives one hold back.

    Threads: any, at once.
    """

    def __init__(self, instance: Any) -> None:
        """Hold it once."""
        self._instance = instance
        self._holders = 1
        self._lock = threading.Lock()

    def hold(self) -> Held:
        """Hold it once more."""
        with self._lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """Give one hold back; the last one closes it."""
        with self._lock:
            self._holders -= 1
            last = not self._holders
        if last and hasattr(self._instance, "close"):
            self._instance.close()

    def __enter__(self) -> Any:
        return self._instance

    def __exit__(self, *_: object) -> None:
        self.release()


class Instances:
    """All of one storage's; threads: any, at once."""

    def __init__(self, name: str, construct: Callable[[HostPool], Any]) -> None:
        """Keep how one is made for a pool; make none yet."""
        self._name = name
        self._construct = construct
        self._lock = threading.Lock()
        self._of: dict[int, Held] = {}
        self._last: Held | None = None

    def make(self, pool: HostPool) -> None:
        """Make one for a pool, unless it has one, and ask it from here on; raises what theirs does."""
        if id(pool) in self._of:
            return
        made = Held(self._construct(pool))
        with self._lock:
            before, self._last = self._last, made.hold()
            known = self._of.setdefault(id(pool), made)
        for surplus in (before, made if known is not made else None):
            if surplus is not None:
                surplus.release()

    def drop(self, pool: HostPool) -> None:
        """Forget a pool."""
        with self._lock:
            dropped = self._of.pop(id(pool), None)
        if dropped is not None:
            dropped.release()

    def of(self, pool: HostPool) -> Held:
        """Hold the pool's own for a call."""
        with self._lock:
            return self._of[id(pool)].hold()

    def asked(self) -> Held:
        """Hold the one to ask for a call.

        Raises:
            StorageClosed: there is none any more.
        """
        with self._lock:
            if self._last is None:
                raise StorageClosed(self._name)
            return self._last.hold()

    def close(self) -> None:
        """Give all of them back; idempotent."""
        with self._lock:
            held = [*self._of.values(), *([self._last] if self._last is not None else [])]
            self._of, self._last = {}, None
        for each in held:
            each.release()
