"""Mutants that touch bytes which are not theirs, or not all that are (C2, C4, C8)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from hicache_conformance.calls import pause_for
from hicache_conformance.memory.storage import MemoryStorage, _scatter
from hicache_conformance.mutants.registry import breaks
from hicache_core import Pages, Status

OK = Status.OK


@breaks("C2", "core", "memory")
class WritesPastTheSlot(MemoryStorage):
    """One byte behind the slot changes.

    Seen: reads rounded up to a block.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_get(keys, locs)
        if statuses and statuses[-1] is OK and locs.pool is not None:
            addresses, sizes = locs.addresses()
            ctypes.c_ubyte.from_address(addresses[-1] + sizes[-1]).value ^= 0xFF
        return statuses


@breaks("C2", "core", "batch")
class MissClearsTheNextSlot(MemoryStorage):
    """A miss spoils a slot that is not its own.

    Seen: EIC's zero-copy get after one failed key.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_get(keys, locs)
        for position, status in enumerate(statuses[:-1]):
            if status is Status.MISS:
                _scatter(bytes(locs.nbytes), locs.views(position + 1))
        return statuses


@breaks("C2", "memory")
class FirstSegmentOnly(MemoryStorage):
    """Only the first segment arrives.

    Seen: zero-copy paths written for MLA and used for MHA.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        held = [[bytes(view) for view in locs.views(position)[1:]] for position in range(len(keys))]
        statuses = super().batch_get(keys, locs)
        for position, rest in enumerate(held):
            for view, old in zip(locs.views(position)[1:], rest, strict=True):
                view[:] = old
        return statuses


@breaks("C2", "memory")
class SegmentsJoinedBackwards(MemoryStorage):
    """Segments are stored last first: right through one layout, wrong through another.

    Seen: V before K.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            values = [b"".join(reversed(locs.views(position))) for position in range(len(keys))]
            return self._statuses(len(keys), lambda store: store.set(self._namespace, keys, values))

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_get(keys, locs)
        for position, status in enumerate(statuses):
            if status is OK:
                _scatter(b"".join(locs.views(position)), locs.views(position)[::-1])
        return statuses


@breaks("C2", "memory")
class AtMost1024Segments(MemoryStorage):
    """What exceeds one system call's vector is dropped.

    Seen: preadv with IOV_MAX ignored, its count unread.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        fitting = max(1, 1024 // max(1, locs.segments_per_page))
        return super().batch_get(keys[:fitting], locs[:fitting]) + [OK] * max(0, len(keys) - fitting)


@breaks("C2", "memory")
class WholeBlocksOnly(MemoryStorage):
    """The odd bytes at a page's end are lost.

    Seen: O_DIRECT paths that round down to 4 KiB.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        held = [b"".join(locs.views(position)) for position in range(len(keys))]
        statuses = super().batch_get(keys, locs)
        whole = locs.nbytes // 4096 * 4096
        if whole:
            for position, old in enumerate(held):
                value = b"".join(locs.views(position))
                _scatter(value[:whole] + old[whole:], locs.views(position))
        return statuses


@breaks("C4", "core")
class SetChangesItsSlot(MemoryStorage):
    """A set leaves its slot changed.

    Seen: in-place compression and quantisation before sending.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_set(keys, locs)
        for position in range(len(keys)):
            if not locs.readonly:
                _scatter(bytes(locs.nbytes), locs.views(position))
        return statuses


@breaks("C8", "threads")
class OneScratchBuffer(MemoryStorage):
    """All threads gather into one buffer of the instance.

    Seen: a bounce buffer made in the constructor.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            self._scratch = [b"".join(locs.views(position)) for position in range(len(keys))]
            pause_for(0.0005)
            values = (self._scratch + [b""] * len(keys))[: len(keys)]
            return self._statuses(len(keys), lambda store: store.set(self._namespace, keys, values))


@breaks("C8", "threads")
class CountsItsCallsUnguarded(MemoryStorage):
    """Two threads at once are an error.

    Seen: usrbio's prepare, which is not thread-safe, called from both.
    """

    _busy = False

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        if self._busy:
            return [Status.ERROR] * len(keys)
        self._busy = True
        try:
            pause_for(0.0005)
            return super().batch_get(keys, locs)
        finally:
            self._busy = False


@breaks("C11", "memory", match="no_more")
class ReadsItsSlotsLate(MemoryStorage):
    """A set is OK while a helper thread still reads the slots.

    Seen: zero-copy writes whose completion is not awaited.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            store, namespace, last = self._opened(), self._namespace, len(keys) - 1

            def late() -> None:
                pause_for(0.01)
                store.set(namespace, keys[last:], [b"".join(locs.views(last))])

            values = [b"".join(locs.views(position)) for position in range(last)]
            statuses = self._statuses(last, lambda store: store.set(namespace, keys[:last], values))
            if len(keys):
                threading.Thread(target=late, daemon=True).start()
            return [*statuses, OK][: len(keys)]


@breaks("C11", "memory", match="no_more")
class WritesItsSlotsLate(MemoryStorage):
    """A get is OK, and a helper thread writes a slot once more.

    Seen: retries that nobody cancels when another replica has answered.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_get(keys, locs)
        if statuses and statuses[-1] is OK:
            views = locs.views(len(keys) - 1)
            value = b"".join(views)

            def late() -> None:
                pause_for(0.01)
                _scatter(value, views)

            threading.Thread(target=late, daemon=True).start()
        return statuses
