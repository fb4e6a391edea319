"""Mutants that take a stopped server badly (C3, C10, C11)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hicache_conformance.calls import pause_for
from hicache_conformance.memory import wire
from hicache_conformance.memory.client import RemoteStore
from hicache_conformance.memory.storage import MemoryStorage
from hicache_conformance.memory.store import Store
from hicache_conformance.mutants.registry import breaks
from hicache_core import BackendTimeout, BackendUnavailable, HostPool, Pages, Status

OK, MISS, TIMEOUT, UNAVAILABLE = Status.OK, Status.MISS, Status.TIMEOUT, Status.UNAVAILABLE


class _WithClient(MemoryStorage):
    """A storage whose connection is of another class."""

    client: type[RemoteStore]

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        super().open(pools)
        if self.options.server is not None:
            self._release()
            self._store = self.client(self.options.server, self.config.timeout_s)


class _Reusing(RemoteStore):
    def _call(self, verb: str, payload: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        deadline = time.monotonic() + self._timeout_s
        connection = self._idle.pop() if self._idle else None
        try:
            connection = connection or self._connect(deadline)
            wire.send(connection, {"verb": verb} | arguments, payload, deadline=deadline)
            return wire.receive(connection, deadline=deadline)
        except TimeoutError as error:
            raise BackendTimeout("no answer") from error
        except (OSError, EOFError) as error:
            if connection is not None:
                connection.close()
            raise BackendUnavailable("gone") from error
        finally:
            if connection is not None and connection.fileno() >= 0:
                self._idle.append(connection)


@breaks("C11", "fault", match="too_late")
class StaleCompletion(_WithClient):
    """The next call is given the answer of the one that timed out.

    Seen: SGLang's hf3fs, A's data for page B.
    """

    client = _Reusing


class _Patient(RemoteStore):
    def __init__(self, path: Any, timeout_s: float) -> None:
        super().__init__(path, 600.0)


@breaks("C11", "fault", match="costs_no_more")
class NoDeadline(_WithClient):
    """Declared cancel, and waits for ever.

    Seen: SGLang's NIXL polls until DONE or ERR, without a clock.
    """

    client = _Patient


class _Helped(MemoryStorage):
    """Verbs run in a helper thread that is left behind at the deadline and works on the caller's slots."""

    def _left_behind(self, count: int, verb: Callable[[], list[Status]]) -> list[Status]:
        results: list[list[Status]] = []

        def work() -> None:
            deadline = time.monotonic() + 60
            statuses = verb()
            while TIMEOUT in statuses and time.monotonic() < deadline:
                pause_for(0.1)  # the caller has its answer by now, and goes on to use its slots
                statuses = verb()
            results.append(statuses)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(self.config.timeout_s)
        return results[0] if results else [TIMEOUT] * count


@breaks("C11", "fault", match="no_slot_is_written")
class LateWrite(_Helped):
    """A get that timed out writes its slots later.

    Seen: usrbio's shared memory, native readers with raw pointers.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        if len(keys) != len(locs) or not keys:
            return super().batch_get(keys, locs)
        get = super().batch_get
        return self._left_behind(len(keys), lambda: get(keys, locs))


@breaks("C11", "fault", match="no_slot_is_read")
class LateRead(_Helped):
    """A set that timed out reads its slots later, and stores another page.

    Seen: zero-copy puts abandoned in flight.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        if len(keys) != len(locs) or not keys:
            return super().batch_set(keys, locs)
        put = super().batch_set
        return self._left_behind(len(keys), lambda: put(keys, locs))


@breaks("C3", "fault")
class TimeoutCountsAsStored(MemoryStorage):
    """A set without an answer is OK.

    Seen: SGLang's Mooncake, where a failed put's probe of -1 counts as stored.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return [
            OK if status in (TIMEOUT, UNAVAILABLE) else status for status in super().batch_set(keys, locs)
        ]


@breaks("C10", "fault")
class RaisesWhenDead(MemoryStorage):
    """A dead server is an exception.

    Seen: hf3fs's RuntimeError after 1.8 s, in SGLang's prefetch thread.
    """

    def _statuses(self, count: int, call: Callable[[Store | RemoteStore], list[Status]]) -> list[Status]:
        return call(self._opened())


@breaks("C10", "fault")
class DeadIsAMiss(MemoryStorage):
    """A dead server looks like an empty one.

    Seen: backends that log and return False.
    """

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        return [MISS if status is UNAVAILABLE else status for status in super().batch_contains(keys)]


@breaks("C10", "fault", match="dead_server")
class DeadForEver(MemoryStorage):
    """After one failure it never connects again.

    Seen: NIXL's POSIX plugins with uring and posix_aio.
    """

    _dead = False

    def _statuses(self, count: int, call: Callable[[Store | RemoteStore], list[Status]]) -> list[Status]:
        if self._dead:
            return [UNAVAILABLE] * count
        statuses = super()._statuses(count, call)
        self._dead = UNAVAILABLE in statuses
        return statuses


@breaks("C10", "fault")
class OneStatusForTheBatch(MemoryStorage):
    """One status for all keys when the server is gone.

    Seen: a scalar error code for the call.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_get(keys, locs)
        return statuses[:1] if UNAVAILABLE in statuses else statuses
