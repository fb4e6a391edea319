"""Which pages are stored, asked in batches on vLLM's lookup thread.

vLLM asks key by key in every step until it knows; its AsyncLookupManager gathers what
is new in a step and asks for a request's keys at once. Two things it lacks are added.
A lookup that is not answered in time is a miss, and so is every other, at once and
unasked, until the thread that hangs has come back. And ``mark_miss`` where the release
has none (0.24), without which a page that cannot be read is promoted for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager


class Lookups(AsyncLookupManager):  # type: ignore[misc]
    """The scheduler's calls are on its own thread; ``batch_lookup`` is on vLLM's."""

    def __init__(
        self,
        tier_type: str,
        contains: Callable[[Sequence[bytes]], list[bool]],
        *,
        patience_s: float,
        on_late: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._contains = contains
        self._patience_s = patience_s
        self._on_late = on_late
        self._clock = clock
        #: Batches that the thread has answered, and how many there were when it was last found to hang.
        self._answered = 0
        self._hung_at = -1
        #: When each key that has no answer yet was first asked for, by request.
        self._asked: dict[str, dict[bytes, float]] = {}
        self._unsure = False
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[Any], req_context: Any) -> Iterable[bool]:
        """Answer one request's keys; never raises."""
        try:
            return self._contains(keys)
        finally:
            self._answered += 1

    def verdict(self, key: bytes, req_context: Any) -> bool | None:
        """Tell whether a page is stored; None while that is being asked, for a bounded time."""
        if self._hung_at == self._answered:
            return False
        found: bool | None = self.lookup(key, req_context)
        asked = self._asked.get(req_context.req_id)
        if found is not None:
            if asked:
                asked.pop(key, None)
            return found
        now = self._clock()
        if asked is None:
            asked = self._asked[req_context.req_id] = {}
        if now - asked.setdefault(key, now) < self._patience_s:
            self._unsure = True
            return None
        self._hung_at = self._answered
        self._on_late()
        return False

    def take_unsure(self) -> bool:
        """Tell whether some verdict was None since the last call."""
        unsure, self._unsure = self._unsure, False
        return unsure

    def mark_miss(self, keys: Collection[Any]) -> None:
        """Answer no for keys that could not be loaded, as long as a request that asked for them lives."""
        inherited = getattr(super(), "mark_miss", None)
        if inherited is not None:
            inherited(keys)
            return
        for key in keys:
            state = self._lookup_state.get(key)
            if state is not None:
                state.result = False

    def forget(self, req_id: str) -> None:
        """Let go of a finished request."""
        self._asked.pop(req_id, None)
        self.cleanup(req_id)

    def stop(self, timeout_s: float) -> bool:
        """End the lookup thread; False when it hangs, and is left behind."""
        # vLLM's own shutdown waits for ever.
        waiter = threading.Thread(target=self.shutdown, name="hicache-lookups-end", daemon=True)
        waiter.start()
        waiter.join(timeout_s)
        return not waiter.is_alive()
