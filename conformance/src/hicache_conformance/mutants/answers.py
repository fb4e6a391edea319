"""Mutants whose answers are of the wrong shape, order or number (C1, C6, C7, C10, C13)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hicache_conformance.memory.spec import SPEC
from hicache_conformance.memory.storage import MemoryStorage
from hicache_conformance.mutants.registry import breaks
from hicache_core import HostPool, Pages, Status, UnsupportedOperation

OK, MISS = Status.OK, Status.MISS


@breaks("C1", "batch")
class ShiftedHole(MemoryStorage):
    """A missing key shifts the later pages.

    Seen: SGLang's hf3fs, _batch_get drops offsets but not buffers.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        there = [key for key, status in zip(keys, self.batch_contains(keys), strict=True) if status is OK]
        found = super().batch_get(there, locs[: len(there)])
        return found + [MISS] * (len(keys) - len(there))


@breaks("C1", "batch")
class OneBoolForTheBatch(MemoryStorage):
    """One missing page makes the whole batch a miss.

    Seen: SGLang's NIXL.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_get(keys, locs)
        return statuses if all(statuses) else [MISS] * len(statuses)


@breaks("C1", "core", "batch")
class TwoResultsAKey(MemoryStorage):
    """2N results for N keys.

    Seen: SGLang's EIC and hf3fs, whose batch_set_v1 counts K and V apart.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return [status for status in super().batch_set(keys, locs) for _ in range(2)]


@breaks("C1", "batch")
class StopsAtTheFirstMiss(MemoryStorage):
    """A short list: what follows the first miss has no answer.

    Seen: backends that return the prefix's results.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_get(keys, locs)
        return statuses[: statuses.index(MISS) + 1] if MISS in statuses else statuses


@breaks("C1", "core", "batch")
class BoolsForStatuses(MemoryStorage):
    """True and False, which cannot tell a miss from a refusal.

    Seen: the interface of SGLang.
    """

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        answers: list[Any] = [status is OK for status in super().batch_contains(keys)]
        return answers


@breaks("C1", "batch")
class FirstStatusDecides(MemoryStorage):
    """The first status speaks for all.

    Seen: SGLang's EIC, whose generic set looks at the first code only.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_get(keys, locs)
        return statuses[:1] * len(statuses)


@breaks("C1", "batch")
class BatchOfAtMost128(MemoryStorage):
    """What goes beyond 128 keys is left out.

    Seen: rings of fixed depth that are filled once.
    """

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        return super().batch_contains(keys[:128]) + [MISS] * max(0, len(keys) - 128)


@breaks("C1", "batch")
class SortedKeys(MemoryStorage):
    """Results in the store's order instead of the caller's.

    Seen: scans over sorted tables.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return super().batch_get(sorted(keys), locs)


@breaks("C7", "batch", "core")
class NoneForAnEmptyBatch(MemoryStorage):
    """None instead of an empty list.

    Seen: SGLang's EIC gives None, 0 or True.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        nothing: Any = None
        return super().batch_set(keys, locs) or nothing


@breaks("C7", "fault")
class EmptyBatchReachesTheServer(MemoryStorage):
    """An empty batch costs a round trip, and fails with the server.

    Seen: AIBrix gives INVALID for one.
    """

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        self.usage()
        return super().batch_contains(keys)


@breaks("C7", "batch")
class RepeatedKeysCollapse(MemoryStorage):
    """A key asked for twice fills one slot only.

    Seen: results collected in a dictionary by key.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        last = {key: position for position, key in enumerate(keys)}
        found = super().batch_get(list(last), locs.take(list(last.values())))
        by_key = dict(zip(last, found, strict=True))
        return [by_key[key] for key in keys]


@breaks("C7", "batch")
class RepeatedHitsAreRefused(MemoryStorage):
    """Where all is present a key asked for twice is an error, since its value can be opened once only.

    Seen: NIXL, where a path described twice is a BackendError for the batch.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_get(keys, locs)
        if all(statuses) and len(set(keys)) < len(keys):
            return [Status.ERROR] * len(keys)
        return statuses


@breaks("C6", "core")
class ExistsCountsEveryHit(MemoryStorage):
    """Hits behind a hole are counted.

    Seen: AIBrix on SHFS answers tokens beyond a missing block.
    """

    def batch_exists(self, keys: Sequence[str]) -> int:
        return self.batch_contains(keys).count(OK)


@breaks("C6", "core")
class ExistsIsABool(MemoryStorage):
    """True for a count.

    Seen: SGLang's Mooncake, where exists, batch_exists and get disagree on types.
    """

    def batch_exists(self, keys: Sequence[str]) -> int:
        return super().batch_exists(keys) == len(keys)


@breaks("C10", "core")
class LengthsUnchecked(MemoryStorage):
    """Keys and pages of unequal number are cut to the shorter.

    Seen: zip in several backends.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        count = min(len(keys), len(locs))
        return super().batch_set(keys[:count], locs[:count])


@breaks("C10", "core", "lifecycle")
class AnyPoolWillDo(MemoryStorage):
    """Pages of a pool that was never registered are taken.

    Seen: SGLang's Mooncake over TCP; RDMA then fails.
    """

    def _check(self, keys: Sequence[str], locs: Pages, *, writes_slots: bool = False) -> None:
        if locs.pool is not None:
            self._pools[id(locs.pool)] = locs.pool
        super()._check(keys, locs, writes_slots=writes_slots)


@breaks("C10", "lifecycle")
class DroppedPoolsStay(MemoryStorage):
    """A dropped pool is still served.

    Seen: SGLang's backends, which have no way to unregister.
    """

    def drop_pool(self, pool: HostPool) -> None:
        self._gate.check()


@breaks("C13", "core")
class RemoveDeclaredButMissing(MemoryStorage):
    """A declared capability is refused.

    Seen: base-class stubs behind a flag that says yes.
    """

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        self._gate.check()
        raise UnsupportedOperation(self.spec.name, "remove pages", capability="remove")


@breaks("C13", "core", "batch")
class QuietFalse(MemoryStorage):
    """An undeclared remove answers quietly.

    Seen: SGLang's base class, whose defaults are empty.
    """

    spec = dataclasses.replace(SPEC, capabilities=dataclasses.replace(SPEC.capabilities, remove=False))

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        self._gate.check()
        return [MISS] * len(keys)


@breaks("C13", "core")
class RemoveSaysOkToEverything(MemoryStorage):
    """OK for keys that were never there.

    Seen: stores whose delete tells nothing, and an adapter that guesses.
    """

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        return [OK] * len(super().batch_remove(keys))
