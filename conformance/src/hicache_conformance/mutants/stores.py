"""Mutants of the store: what it forgets, what it keeps, whom it evicts (C3, C14, C15)."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_conformance.calls import pause_for
from hicache_conformance.memory.storage import MemoryStorage
from hicache_conformance.memory.store import Store
from hicache_conformance.mutants.registry import breaks
from hicache_core import HiCacheStorageConfig, Pages, Status

OK, MISS, NO_SPACE = Status.OK, Status.MISS, Status.NO_SPACE


@breaks("C3", "shared")
class MissesAreRemembered(MemoryStorage):
    """A key once missed stays missed, whoever sets it.

    Seen: negative caches without an end.
    """

    def __init__(self, config: HiCacheStorageConfig, options: object) -> None:
        super().__init__(config, options)  # type: ignore[arg-type]
        self._missed: set[str] = set()

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        statuses = super().batch_contains(keys)
        statuses = [MISS if key in self._missed else s for key, s in zip(keys, statuses, strict=True)]
        self._missed.update(key for key, status in zip(keys, statuses, strict=True) if status is MISS)
        return statuses

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        self._missed.difference_update(keys)
        return super().batch_set(keys, locs)


@breaks("C3", "shared")
class PagesAreGivenOutAtClose(MemoryStorage):
    """Others see a page only once its writer has closed.

    Seen: write-back caches behind an OK.
    """

    def __init__(self, config: HiCacheStorageConfig, options: object) -> None:
        super().__init__(config, options)  # type: ignore[arg-type]
        self._own: dict[str, bytes] = {}

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            for position, key in enumerate(keys):
                self._own.setdefault(key, b"".join(locs.views(position)))
        return [OK] * len(keys)

    def close(self) -> None:
        if self.is_open and self._own:
            self._opened().set(self._namespace, list(self._own), list(self._own.values()))
        super().close()


@breaks("C14", "durable", match="removed_pages or killed")
class JournalIsNotFlushed(Store):
    """OK before the record has left the process.

    Seen: buffered writes and background flushes.
    """

    def _log(self, verb: str, namespace: str, key: str, value: bytes) -> None:
        journal = self._journal
        if journal is not None and len(value) < 1 << 16:
            flush, journal.flush = journal.flush, lambda: None  # type: ignore[method-assign]
            super()._log(verb, namespace, key, value)
            journal.flush = flush  # type: ignore[method-assign]


@breaks("C14", "durable", match="removed_pages or cleared_pages")
class RemovalsComeBack(Store):
    """Removed and cleared pages are there again after a restart.

    Seen: removals held in memory only.
    """

    def _log(self, verb: str, namespace: str, key: str, value: bytes) -> None:
        if verb == "set":
            super()._log(verb, namespace, key, value)


@breaks("C14", "durable")
class PersistentInNameOnly(Store):
    """Everything is gone after a restart.

    Seen: Mooncake's master keeps no keys; declared as persistent here.
    """

    def _log(self, verb: str, namespace: str, key: str, value: bytes) -> None:
        return None


@breaks("C14", "durable")
class LastRecordIsLost(Store):
    """A restart loses the newest page.

    Seen: a reader that stops one record early.
    """

    def _log(self, verb: str, namespace: str, key: str, value: bytes) -> None:
        pending, self._pending = getattr(self, "_pending", None), (verb, namespace, key, value)
        if pending is not None:
            super()._log(*pending)


@breaks("C15", "evict")
class CapacityIsIgnored(Store):
    """The limit is not kept.

    Seen: SGLang's lru_file_evictor, where an unreadable size turns the cap off.
    """

    def _make_room(self, nbytes: int) -> bool:
        return True


@breaks("C15", "evict", match="outlives")
class EvictsFirstInFirstOut(Store):
    """Declared lru, evicts by age.

    Seen: SGLang's NIXL on files, FIFO by mtime.
    """

    def touch(self, namespace: str, keys: Sequence[str]) -> None:
        return None

    def _get(self, namespace: str, key: str, nbytes: int) -> tuple[Status, bytes]:
        order = list(self._entries)
        answer = super()._get(namespace, key, nbytes)
        for name in order:
            self._entries.move_to_end(name)
        return answer

    def _set(self, namespace: str, key: str, value: bytes) -> Status:
        return OK if (namespace, key) in self._entries else super()._set(namespace, key, value)


@breaks("C15", "evict", match="outlives and touch")
class TouchIsIgnored(Store):
    """touch is no use.

    Seen: base-class stubs.
    """

    def touch(self, namespace: str, keys: Sequence[str]) -> None:
        return None


@breaks("C15", "evict", match="outlives and get")
class LookingIsUsing(Store):
    """contains keeps pages alive that nobody reads.

    Seen: Mooncake's exist grants a lease.
    """

    def contains(self, namespace: str, keys: Sequence[str]) -> list[Status]:
        self.touch(namespace, keys)
        return super().contains(namespace, keys)


@breaks("C15", "evict", match="never_fit")
class FullForEver(Store):
    """After one NO_SPACE every set fails.

    Seen: NIXL's POSIX backends, dead for ever after one error.
    """

    _full = False

    def _make_room(self, nbytes: int) -> bool:
        self._full = self._full or not super()._make_room(nbytes)
        return not self._full


@breaks("C15", "evict", match="never_fit")
class NoRoomIsOk(Store):
    """What does not fit is dropped, and the set is OK.

    Seen: LMCache's reserve_write leaves keys out silently.
    """

    def _set(self, namespace: str, key: str, value: bytes) -> Status:
        status = super()._set(namespace, key, value)
        return OK if status is NO_SPACE else status


@breaks("C15", "evict")
class EvictsTheNewest(Store):
    """A full store drops what has just been set.

    Seen: index and order updated the wrong way round.
    """

    def _make_room(self, nbytes: int) -> bool:
        if self.capacity is None or nbytes > self.capacity:
            return self.capacity is None
        while self._nbytes + nbytes > self.capacity:
            self._drop(next(reversed(self._entries)))
        return True


@breaks("C4", "threads")
class SetsTearEachOther(Store):
    """Two sets of one key mix their bytes.

    Seen: writers of one file without a lock or a rename.
    """

    def set(self, namespace: str, keys: Sequence[str], values: Sequence[bytes]) -> list[Status]:
        fresh = [key for key in keys if (namespace, key) not in self._entries]
        pause_for(0.002 if fresh else 0.0)  # the moment in which another writer finds the key absent too
        statuses = super().set(namespace, keys, values)
        with self._lock:
            for key, value in zip(keys, values, strict=True):
                entry = self._entries.get((namespace, key))
                if key in fresh and entry is not None and entry.value != value:
                    half = len(value) // 2
                    self._drop((namespace, key))
                    super()._set(namespace, key, entry.value[:half] + value[half:])
        return statuses
