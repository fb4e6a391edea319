"""Calls on a server that has stopped: made at some moment, waited for by the declared means."""

from __future__ import annotations

import random
import time
from typing import Any, TypeVar

from hicache_conformance.bench import Bench, aligned
from hicache_conformance.builders import Arena
from hicache_conformance.calls import PATIENCE_S, Call, pause_for, until
from hicache_core import HiCacheStorage, Status

OK, MISS = Status.OK, Status.MISS
_T = TypeVar("_T")

#: A batch larger than socket buffers, so that a pause finds it on its way.
COUNT, NBYTES = 24, 1 << 17
#: The deadline under which stopped servers are met.
TIMEOUT_S = 1.0


def call_verb(verb: str, storage: HiCacheStorage, keys: list[str], arena: Arena) -> list[Status]:
    """Make one call."""
    if verb == "get":
        return storage.batch_get(keys, arena.pages())
    if verb == "set":
        return storage.batch_set(keys, arena.pages())
    return storage.batch_contains(keys)


def until_trouble(
    verb: str, storage: HiCacheStorage, keys: list[str], arena: Arena
) -> tuple[int, list[Status]]:
    """Repeat a verb until one call meets the stop; give how many had not, and that call's statuses.

    It has met it when not all is OK, or, with ``hold``, when it took that long.
    """
    deadline = time.monotonic() + PATIENCE_S
    for count in range(1 << 30):
        started = time.monotonic()
        statuses = aligned(call_verb(verb, storage, keys, arena), COUNT)
        if set(statuses) != {OK} or met_a_stop(started):
            return count, statuses
        if started > deadline:
            break
    raise AssertionError(f"'{verb}' answers OK although its server has stopped")


def met_a_stop(started: float) -> bool:
    """Whether a call that began then took so long that its server must have stopped."""
    return time.monotonic() - started > TIMEOUT_S * 0.9


def ready(bench: Bench, storage: HiCacheStorage, arena: Arena, verb: str, label: str) -> list[str]:
    """Make keys, fill the slots with their pages, and store them unless the verb is a set."""
    keys = bench.keys(COUNT, arena.component, label)
    for index, key in enumerate(keys):
        arena.fill(index, bench.page(key, NBYTES))
    if verb != "set":
        assert aligned(storage.batch_set(keys, arena.pages()), COUNT) == [OK] * COUNT
    return keys


def pause_at_some_moment(bench: Bench, label: str) -> None:
    """Pause within the next 50 ms, at a moment that the seed decides."""
    pause_for(random.Random(f"{bench.seed}/{label}").uniform(0.0, 0.05))
    bench.pause()


def returned(bench: Bench, call: Call[_T]) -> _T:
    """Wait for a call on a stopped server by the declared means (C11b), and give its result."""
    _await(bench, call)
    return call.result()


def _await(bench: Bench, call: Call[Any]) -> None:
    """``cancel`` and ``bounce`` return in time; ``hold`` may wait until the server goes on."""
    if call.wait(limit_s(bench)):
        return
    means = bench.capabilities.deadline
    assert means in ("hold", "none"), (
        f"C11: '{means}' is declared, timeout_s is {TIMEOUT_S}, it still runs after {limit_s(bench):.1f} s"
    )
    bench.resume()


def limit_s(bench: Bench) -> float:
    """Give the seconds in which a call on a stopped server must have returned."""
    return TIMEOUT_S + 1.0 + bench.site.slack_s


def recovers(bench: Bench, storage: HiCacheStorage) -> bool:
    """Wait until the storage answers again as a healthy one does; give whether it did."""
    key = bench.component().keys(["does-it-serve"])
    return until(
        lambda: set(storage.batch_contains(key)) <= {OK, MISS} and bench.set(storage, key) == [OK],
        bench.site.recovery_s,
    )
