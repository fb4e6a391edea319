"""The index: key digest -> where the page is; pure, a million pages in 20 MB.

Two levels. The base is three numpy arrays sorted by the digest's first word,
unique in it: what an open finds, 20 bytes a page, quick to build and to search.
The overlay is a dict of what came later and of the few digests that collide in
their first word; it wins over the base and is merged into it now and then.

A place is ``ordinal << 20 | record``: which segment, which record of its
journal. Further live copies of a key (two processes set it at once; a moved
page) wait in ``spare``, so that removal can reach all of them.

Threads: one writer at a time (the catalog's lock); readers take no lock, they
work on one snapshot of both levels.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

RECORD_BITS = 20
RECORD_MASK = (1 << RECORD_BITS) - 1
#: No place.
ABSENT = -1

#: The overlay is merged once it has this many entries beyond an eighth of the base: 200 bytes each in a dict.
_MERGE_FROM = 1 << 15

Places = NDArray[np.int64]


#: Places are kept in 32 bits where they fit: 18 of the ordinal, counted from the lowest, 14 of the record.
_SHORT_BITS = 14
_SHORT_MASK = (1 << _SHORT_BITS) - 1
_NEVER = 0xFFFFFFFF


class _Base(NamedTuple):
    first: NDArray[np.uint64]
    second: NDArray[np.uint64]
    packed: NDArray[np.uint32] | Places
    origin: int
    """The lowest ordinal; -1 where ``packed`` holds whole places."""

    def places(self, at: NDArray[np.intp] | slice = slice(None)) -> Places:
        """Give the places at these positions."""
        chosen = self.packed[at] if isinstance(at, slice) else self.packed.take(at, mode="clip")
        if self.origin < 0:
            return chosen
        wide = chosen.astype(np.int64)
        places = (((wide >> _SHORT_BITS) + self.origin) << RECORD_BITS) | (wide & _SHORT_MASK)
        never = chosen == _NEVER
        if never.any():
            places[never] = ABSENT
        return places

    def forget(self, at: int) -> None:
        """Let one entry be absent."""
        self.packed[at] = ABSENT if self.origin < 0 else _NEVER


def _base(first: NDArray[np.uint64], second: NDArray[np.uint64], places: Places) -> _Base:
    """Pack sorted entries, all of which have a place."""
    if not len(places):
        return _EMPTY
    count = len(places)
    packed, records = scratch(count, np.int64), scratch(count, np.int64)
    np.right_shift(places, RECORD_BITS, out=packed)
    np.bitwise_and(places, RECORD_MASK, out=records)
    origin, highest = int(packed.min()), int(packed.max())
    if highest - origin >= _NEVER >> _SHORT_BITS or int(records.max()) > _SHORT_MASK:
        return _Base(first, second, places, -1)
    packed -= origin
    packed <<= _SHORT_BITS
    packed |= records
    short = scratch(count, np.uint32)
    short[:] = packed
    return _Base(first, second, short, origin)


_EMPTY = _Base(np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int64), -1)


def scratch(count: int, dtype: npt.DTypeLike) -> np.ndarray:
    """Make an array whose memory goes back to the system when it is dropped.

    What malloc hands out may stay with the process: after opening a root of a
    million pages that was twice the index itself.
    """
    if not count:
        return np.empty(0, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, count * np.dtype(dtype).itemsize, flags=flags), dtype)


class PageIndex:
    """Digest -> place, with what is known to be damaged."""

    __slots__ = ("_state", "damaged", "mismatched", "spare")

    def __init__(self) -> None:
        self._state: tuple[dict[bytes, int], _Base] = ({}, _EMPTY)
        #: Digests of which some copy is damaged: what a key is when no live copy is found.
        self.damaged: set[bytes] = set()
        #: Digests on which a get has found another size; an OK get or set takes them out.
        self.mismatched: set[bytes] = set()
        #: Digest -> further live places.
        self.spare: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        """Count entries; a key in both levels counts twice until the next merge."""
        overlay, base = self._state
        return len(overlay) + len(base.first)

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Give the place of each digest, ABSENT where there is none."""
        overlay, base = self._state
        found = list(map(overlay.get, digests, repeat(ABSENT)))
        if not len(base.first) or ABSENT not in found:
            return found
        below = _search(base, digests)
        if found.count(ABSENT) == len(found):
            return below.tolist()
        return [b if f == ABSENT else f for f, b in zip(found, below.tolist(), strict=True)]

    def insert(self, digests: Sequence[bytes], places: Sequence[int]) -> None:
        """Add pages; a key that is there already keeps its older place as a spare."""
        if len(set(digests)) != len(digests):
            for digest, place in zip(digests, places, strict=True):
                self.insert((digest,), (place,))
            return
        overlay, base = self._state
        before = self.find(digests)
        if before.count(ABSENT) != len(before):
            for digest, older, place in zip(digests, before, places, strict=True):
                if older not in (ABSENT, place):
                    self.spare.setdefault(digest, []).append(older)
        if self.damaged:
            self.damaged.difference_update(digests)
        if self.mismatched:
            self.mismatched.difference_update(digests)
        overlay.update(zip(digests, places, strict=True))
        if len(overlay) > _MERGE_FROM + (len(base.first) >> 3):
            self.merge()

    def load(self, first: NDArray[np.uint64], second: NDArray[np.uint64], places: Places) -> None:
        """Fill an empty index; the digests' two words, keys may repeat. The arrays are taken over."""
        self._settle({}, first, second, places)

    def remove(self, digest: bytes, place: int, *, damaged: bool | None = None) -> bool:
        """Forget one copy of a key; a spare takes its place. False when it was not known.

        Args:
            damaged: whether it is known to be damaged; None where it is merely gone.
        """
        (current,) = self.find([digest])
        spares = self.spare.get(digest, [])
        if place in spares:
            spares.remove(place)
            known = True
        else:
            known = current == place != ABSENT
            if known:
                self._replace(digest, spares.pop() if spares else ABSENT)
        if not spares:
            self.spare.pop(digest, None)
        if damaged:
            self.damaged.add(digest)
        elif damaged is not None:
            self.damaged.discard(digest)
        return known

    def copies(self, digest: bytes) -> list[int]:
        """Give every live place of a key."""
        (current,) = self.find([digest])
        return [place for place in (current, *self.spare.get(digest, ())) if place != ABSENT]

    def merge(self, gone: Collection[int] = ()) -> None:
        """Fold the overlay into the base and drop entries of segments that are gone (by ordinal)."""
        overlay, base = self._state
        for digest in list(self.spare) if gone else ():
            kept = [p for p in self.spare[digest] if p >> RECORD_BITS not in gone]
            (current,) = self.find([digest])
            if current != ABSENT and current >> RECORD_BITS in gone and kept:
                self._replace(digest, kept.pop())
            self.spare[digest] = kept
            if not kept:
                del self.spare[digest]
        words = np.frombuffer(b"".join(overlay), dtype="<u8").reshape(-1, 2)
        places = np.fromiter(overlay.values(), np.int64, len(overlay))
        shadowed = base.places()
        if len(shadowed) and len(overlay):
            at = base.first.searchsorted(words[:, 0])
            np.minimum(at, len(shadowed) - 1, out=at)
            same = (base.first[at] == words[:, 0]) & (base.second[at] == words[:, 1])
            shadowed[at[same]] = ABSENT
        first = np.concatenate([base.first, words[:, 0]])
        second = np.concatenate([base.second, words[:, 1]])
        place = np.concatenate([shadowed, places])
        keep = place != ABSENT
        if gone:
            keep &= ~np.isin(place >> RECORD_BITS, np.fromiter(gone, np.int64, len(gone)))
        self._settle({}, first[keep], second[keep], place[keep])

    def live_places(self) -> Places:
        """Give the place of every key, one each; for counting."""
        self.merge()
        overlay, base = self._state
        extra = np.fromiter(overlay.values(), np.int64, len(overlay))
        kept = base.places()
        return np.concatenate([kept[kept != ABSENT], extra])

    def _settle(
        self,
        overlay: dict[bytes, int],
        first: NDArray[np.uint64],
        second: NDArray[np.uint64],
        place: Places,
    ) -> None:
        order = _order(first)
        first, second, place = _rearranged(order, first, second, place)
        if (first[1:] < first[:-1]).any():  # two prefixes were alike, their rest in another order: rare
            first, second, place = _rearranged(np.argsort(first), first, second, place)
        del order
        ties = np.flatnonzero(first[1:] == first[:-1]) + 1
        if len(ties):
            keep = np.ones(len(first), bool)
            keep[ties] = False
            for at in ties.tolist():
                start = at
                while first[start - 1] == first[at] and not keep[start]:
                    start -= 1
                self._settle_tie(overlay, first, second, place, start, at)
            first, second, place = first[keep], second[keep], place[keep]
        self._state = (overlay, _base(first, second, place))

    def _settle_tie(
        self,
        overlay: dict[bytes, int],
        first: NDArray[np.uint64],
        second: NDArray[np.uint64],
        place: Places,
        start: int,
        at: int,
    ) -> None:
        """Place one entry whose first word equals that of the kept entry at ``start``."""
        digest = first[at : at + 1].tobytes() + second[at : at + 1].tobytes()
        if second[at] == second[start]:
            newer, older = max(place[at], place[start]), min(place[at], place[start])
            place[start] = newer
            self.spare.setdefault(digest, []).append(int(older))
        elif digest in overlay:
            self.spare.setdefault(digest, []).append(int(place[at]))
        else:
            overlay[digest] = int(place[at])

    def _replace(self, digest: bytes, place: int) -> None:
        overlay, base = self._state
        if place != ABSENT:
            overlay[digest] = place
            return
        overlay.pop(digest, None)
        words = np.frombuffer(digest, dtype="<u8")
        at = int(base.first.searchsorted(words[0]))
        if at < len(base.first) and base.first[at] == words[0] and base.second[at] == words[1]:
            base.forget(at)


def _search(base: _Base, digests: Sequence[bytes]) -> Places:
    words = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)
    at = base.first.searchsorted(words[:, 0])
    same = base.first.take(at, mode="clip") == words[:, 0]
    same &= base.second.take(at, mode="clip") == words[:, 1]
    return np.where(same, base.places(at), ABSENT)


def _order(first: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Give the order that sorts, a third quicker than argsort: sorts prefixes that carry their position.

    The prefix leaves out as many bits as a position needs, so entries that
    differ in those alone may come out in the wrong order.
    """
    count = len(first)
    low = np.uint64((1 << max(1, count.bit_length())) - 1)
    position, carried = scratch(count, np.uint64), scratch(count, np.uint64)
    position[:] = 1
    np.cumsum(position, out=position)
    position -= np.uint64(1)
    np.bitwise_and(first, ~low, out=carried)
    carried |= position
    carried.sort()
    carried &= low
    return carried.view(np.intp)


def _rearranged(
    order: NDArray[np.intp], first: np.ndarray, second: np.ndarray, place: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give columns in another order, each in the memory of the one before it, which is spent by then."""
    spare = scratch(len(order), np.uint64)
    # "clip" lets numpy write to where it is told without a copy of its own
    first, spent = first.take(order, out=spare, mode="clip"), first
    second, spent = second.take(order, out=spent, mode="clip"), second
    return first, second, place.take(order, out=spent.view(np.int64), mode="clip")
