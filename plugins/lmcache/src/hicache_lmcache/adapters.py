"""Adapters: sound ones to work with, and a bounded number of broken ones that are being ended.

A RESP adapter whose load waits for a value that has gone takes its connections
with it, so loads and stores have one each, and one that failed is replaced. To
end it may take as long as its native calls do: a thread of its own does that,
and holds the records that these may still write to (C11).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from hicache_core.errors import BackendUnavailable
from hicache_lmcache.native import Adapter

Use = Literal["load", "store"]

#: Adapters that may be left behind before the store is not asked any more.
MAX_LEFT_BEHIND = 4
_POLL_S = 0.05


class Adapters:
    """One adapter a use, made when it is needed; thread-safe."""

    def __init__(self, make: Callable[[], Adapter], *, one_for_all: bool) -> None:
        self._make: Callable[[], Adapter] | None = make
        self._one_for_all = one_for_all
        self._lock = threading.Lock()
        self._sound: dict[Use, Adapter] = {}
        self._ending: list[threading.Thread] = []

    def sound(self, use: Use, deadline: float) -> Adapter:
        """Give an adapter that has not failed.

        Raises: BackendUnavailable: too many are being ended, or none can be made.
        """
        use = "load" if self._one_for_all else use
        with self._lock:
            adapter = self._sound.get(use)
            if adapter is not None and not adapter.broken:
                return adapter
            if adapter is not None:
                del self._sound[use]
                self._retire(adapter)
            while self._left_behind() >= MAX_LEFT_BEHIND and time.monotonic() < deadline:
                self._ending[0].join(_POLL_S)
            if self._make is None or self._left_behind() >= MAX_LEFT_BEHIND:
                raise BackendUnavailable(
                    "'lmcache' does not answer",
                    value=f"{len(self._ending)} adapters are being ended",
                    remedy="Look at the store; calls work again once it answers.",
                )
            try:
                made = self._sound[use] = self._make()
            except (RuntimeError, ValueError, OSError) as error:
                raise BackendUnavailable(
                    "opening 'lmcache'", value=" ".join(f"{type(error).__name__}: {error}".split())
                ) from error
            return made

    def close(self, timeout_s: float) -> None:
        """End all of them; what takes longer ends by itself."""
        with self._lock:
            self._make = None
            for adapter in self._sound.values():
                self._retire(adapter)
            self._sound.clear()
        deadline = time.monotonic() + timeout_s
        for thread in self._ending:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _left_behind(self) -> int:
        self._ending = [thread for thread in self._ending if thread.is_alive()]
        return len(self._ending)

    def _retire(self, adapter: Adapter) -> None:
        thread = threading.Thread(target=adapter.close, name="hicache-lmcache-end", daemon=True)
        thread.start()
        self._ending.append(thread)
