"""Mutants that give wrong bytes, or an OK that is none (C2 to C6)."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hicache_conformance.calls import pause_for
from hicache_conformance.memory.storage import MemoryStorage, _scatter
from hicache_conformance.memory.store import Entry, Store
from hicache_conformance.mutants.registry import breaks
from hicache_core import HiCacheStorageConfig, Pages, Status

OK, MISS = Status.OK, Status.MISS


@breaks("C5", "core", "batch")
class ShortValueIsAHit(MemoryStorage):
    """A stored value shorter than the slot is OK.

    Seen: SGLang's Mooncake, where any positive count is a hit.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_get(keys, locs)
        for position, status in enumerate(statuses):
            value = self._peeked(keys[position]) if status is Status.SIZE_MISMATCH else None
            if value and len(value) < locs.nbytes:
                _scatter(value + bytes(locs.nbytes - len(value)), locs.views(position))
                statuses[position] = OK
        return statuses

    def _peeked(self, key: str) -> bytes | None:
        return self._opened().peek(self._namespace, key)


@breaks("C5", "core", "batch")
class LongValueIsCut(ShortValueIsAHit):
    """A stored value longer than the slot is cut to it.

    Seen: SGLang's file backend, readinto of a larger file.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = MemoryStorage.batch_get(self, keys, locs)
        for position, status in enumerate(statuses):
            value = self._peeked(keys[position]) if status is Status.SIZE_MISMATCH else None
            if value and len(value) > locs.nbytes:
                _scatter(value[: locs.nbytes], locs.views(position))
                statuses[position] = OK
        return statuses


@breaks("C4", "core", "batch")
class PresentIsOverwritten(Store):
    """Setting a present key changes it.

    Seen: upsert verbs; Mooncake's put keeps the old one for good reason.
    """

    def _set(self, namespace: str, key: str, value: bytes) -> Status:
        self._drop((namespace, key))
        return super()._set(namespace, key, value)


@breaks("C3", "core")
class SetStoresNothing(MemoryStorage):
    """OK, and nothing is stored.

    Seen: SGLang's hicache_shm.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            return [OK] * len(keys)


@breaks("C3", "identity")
class OtherRanksWriteNothing(MemoryStorage):
    """Ranks above 0 answer OK unwritten.

    Seen: SGLang's NIXL with MLA, although CP and DCP ranks differ.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        if self.config.placement.tp_rank > 0:
            return [OK] * len(keys)
        return super().batch_set(keys, locs)


@breaks("C3", "core", "batch")
class SetFinishesLater(MemoryStorage):
    """OK before it is stored.

    Seen: LMCache's L2 stores are asynchronous, those in flight are dropped at close.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            values = [b"".join(locs.views(position)) for position in range(len(keys))]
            store = self._opened()

            def later() -> None:
                pause_for(0.05)
                store.set(self._namespace, keys, values)

            threading.Thread(target=later, daemon=True).start()
            return [OK] * len(keys)


@breaks("C6", "core")
class EmptyValueIsContained(Store):
    """contains is OK on an empty value.

    Seen: SGLang's NIXL on files, phantom hits.
    """

    def contains(self, namespace: str, keys: Sequence[str]) -> list[Status]:
        with self._lock:
            return [OK if (namespace, key) in self._entries else MISS for key in keys]


@breaks("C6", "core", "fault")
class ContainsForgetsABadGet(Store):
    """contains stays OK for a value that no get can give.

    Seen: LMCache's LocalDisk, True for deleted files.
    """

    def _get(self, namespace: str, key: str, nbytes: int) -> tuple[Status, bytes]:
        answer = super()._get(namespace, key, nbytes)
        if (entry := self._entries.get((namespace, key))) is not None:
            entry.verdict = OK
        return answer


@breaks("C4", "core", "fault")
class BadValueStaysForEver(Store):
    """A corrupt value can never be replaced.

    Seen: stores that keep the first value of a key whatever it is.
    """

    def _set(self, namespace: str, key: str, value: bytes) -> Status:
        return OK if (namespace, key) in self._entries else super()._set(namespace, key, value)


@breaks("C5", "batch", "fault")
class DamageIsNotNoticed(Store):
    """A declared checksum is not compared.

    Seen: vLLM and LMCache check no bytes.
    """

    def _get(self, namespace: str, key: str, nbytes: int) -> tuple[Status, bytes]:
        entry = self._entries.get((namespace, key))
        if entry is not None:
            entry.checksum = Entry(entry.value).checksum
        return super()._get(namespace, key, nbytes)


@breaks("C6", "fault")
class RemembersWhatItSet(MemoryStorage):
    """contains asks an index in the client, not the store.

    Seen: LMCache's LocalDisk keeps its index in RAM only.
    """

    def __init__(self, config: HiCacheStorageConfig, options: object) -> None:
        super().__init__(config, options)  # type: ignore[arg-type]
        self._known: set[str] = set()

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_set(keys, locs)
        self._known.update(key for key, status in zip(keys, statuses, strict=True) if status is OK)
        return statuses

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        return [OK if key in self._known else status for key, status in self._asked(keys)]

    def _asked(self, keys: Sequence[str]) -> list[tuple[str, Status]]:
        return list(zip(keys, super().batch_contains(keys), strict=True))


@breaks("C6", "core", "batch")
class MissIsAHit(MemoryStorage):
    """A missing page is OK, with whatever the slot held.

    Seen: NIXL's POSIX before 1.5 says DONE with stale bytes.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return [OK if status is MISS else status for status in super().batch_get(keys, locs)]


@breaks("C4", "shared", "durable", match="killed or kill_in")
class StoresInTwoSteps(MemoryStorage):
    """A process killed in a set leaves half a page.

    Seen: files written in place, without temporary name and rename.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            store = self._opened()
            for position, key in enumerate(keys):
                value = b"".join(locs.views(position))
                if store.contains(self._namespace, [key]) == [MISS]:
                    store.set(self._namespace, [key], [value[: len(value) // 2]])
                    pause_for(0.01)
                store.set(self._namespace, [key], [value])
            return [OK] * len(keys)


@breaks("C2", "evict", match="while_it_is_read")
class GetHandsOutTheStoresBuffer(Store):
    """An evicted page's memory goes to a writer while a reader holds it.

    Seen: SGLang's hf3fs metadata server.
    """

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self._buffers: dict[int, list[bytearray]] = {}

    def get(self, namespace: str, keys: Sequence[str], nbytes: int) -> list[tuple[Status, bytes]]:
        answers = super().get(namespace, keys, nbytes)
        pause_for(0.01)
        return answers

    def _keep(self, name: tuple[str, str], entry: Entry) -> None:
        spare = self._buffers.get(len(entry.value))
        buffer = spare.pop(0) if spare else bytearray(len(entry.value))
        buffer[:] = entry.value
        entry.value = buffer  # type: ignore[assignment]
        super()._keep(name, entry)

    def _drop(self, name: tuple[str, str]) -> bool:
        if (entry := self._entries.get(name)) is not None and isinstance(entry.value, bytearray):
            self._buffers.setdefault(len(entry.value), []).append(entry.value)
        return super()._drop(name)
