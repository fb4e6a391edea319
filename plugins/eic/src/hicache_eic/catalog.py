"""The catalogue: which keys were set, kept in EIC itself, since EIC lists and counts nothing.

A writer (one a worker thread, so that its writes are in order) has a *slot* under its own random name, and
*chunks* of up to 64 keys each, numbered; a set stores its chunk with its pages, in one call. Everybody finds
a slot digit by digit: a mark is stored under each beginning of its name. All writers store the same marks,
so none overwrites anything of another, however many begin at once.
Readers (``usage``, ``clear``) follow the marks, read all slots and chunks, and then ask which of the keys
are there: the catalogue says what may be there, never what is. So what EIC evicts costs nothing here, and
an entry too many does no harm.

Records have fixed sizes, since EIC does not tell a value's size:
mark   ``{namespace}/~w/{begin}``     nothing
slot   ``{namespace}/~w/{name}``      writer id, first chunk, next chunk, checksum
chunk  ``{namespace}/~c/{id}/{n}``    count, then (length, page nbytes, key) each
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from hicache_core.identity import Namespace
from hicache_core.status import OK, Status

CHUNK_KEYS = 64
#: A key is 128 characters of hash, a dot, and 64 of component at most.
_MAX_KEY_NBYTES = 199
_SPAN = struct.Struct("<16sQQ")
_CHECK = struct.Struct("<Q")
_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct(f"<BQ{_MAX_KEY_NBYTES}s")
SLOT_NBYTES = _SPAN.size + _CHECK.size
CHUNK_NBYTES = _COUNT.size + CHUNK_KEYS * _ENTRY.size

_DIGITS = "0123456789abcdef"
#: Digits of a slot's name: two of ten thousand writers meet once in some twenty thousand times.
PATH_LENGTH = 10
_MARK = bytes(8)
#: From here on a writer looks, at every new chunk, whether an old one has lost most of its keys.
_CLEAN_FROM_CHUNKS = 8

#: (names) -> statuses; (names, nbytes) -> values or None.
Exist = Callable[[Sequence[str]], list[Status]]
Fetch = Callable[[Sequence[str], int], "list[bytes | None]"]
Delete = Callable[[Sequence[str]], list[Status]]


class Record(NamedTuple):
    """Something of the catalogue to store."""

    name: str
    value: bytes


class Entry(NamedTuple):
    """A key that was set, and its page's size."""

    key: str
    nbytes: int


class Names:
    """How the catalogue's records of one namespace are called."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace

    def slot(self, slot: str) -> str:
        """Name a slot, or the mark for the beginning of one."""
        return self._namespace.qualify(f"~w/{slot}")

    def chunk(self, writer: bytes, number: int) -> str:
        """Name a chunk."""
        return self._namespace.qualify(f"~c/{writer.hex()}/{number}")


class Writer:
    """One writer's part of the catalogue; used by one thread at a time.

    Args:
        expires: what is stored expires. Slot and marks are stored with every set then, else they would
            expire before the pages of later sets.
    """

    def __init__(self, namespace: Namespace, *, expires: bool = False) -> None:
        self._names = Names(namespace)
        self._expires = expires
        self._id = secrets.token_bytes(16)
        self._first = 0
        self._number = 0
        #: First and next chunk as the slot tells them since the last set that was stored.
        self._told = (0, 0)
        self._look_at = 0
        self._entries: list[Entry] = []
        self._doomed: list[str] = []
        self._qualify = namespace.qualify
        slot = self._id.hex()[:PATH_LENGTH]
        #: The names of the slot's marks and of the slot, to be asked for with a set's own keys.
        self.path = [self._names.slot(slot[:length]) for length in range(1, PATH_LENGTH + 1)]

    def add(
        self, keys: Sequence[str], nbytes: int, *, slot_is_there: bool, exist: Exist, fetch: Fetch
    ) -> list[Record]:
        """Enter keys; give the records to store together with their pages."""
        # Until the slot tells of a new place, the old chunks are the ones that are found.
        self._first, self._doomed = self._told[0], []
        records = []
        for key in keys:
            if len(self._entries) == CHUNK_KEYS:
                records.append(self._chunk())
                self._number += 1
                self._entries = self._clean(exist, fetch)
            self._entries.append(Entry(key, nbytes))
        records.append(self._chunk())
        if self._expires or not slot_is_there:
            records += [Record(name, _MARK) for name in self.path[:-1]]
        if self._expires or not slot_is_there or self._told != self._span:
            span = _SPAN.pack(self._id, *self._span)
            records.append(Record(self.path[-1], span + _CHECK.pack(xxh3_64_intdigest(span))))
        return records

    def stored(self, delete: Delete) -> None:
        """Drop the chunks whose keys have another place, now that this is stored."""
        self._told = self._span
        doomed, self._doomed = self._doomed, []
        if doomed:
            delete(doomed)

    @property
    def _span(self) -> tuple[int, int]:
        return self._first, self._number + 1

    def _chunk(self) -> Record:
        packed = [_ENTRY.pack(len(e.key.encode()), e.nbytes, e.key.encode()) for e in self._entries]
        value = _COUNT.pack(len(packed)) + b"".join(packed)
        return Record(self._names.chunk(self._id, self._number), value.ljust(CHUNK_NBYTES, b"\0"))

    def _clean(self, exist: Exist, fetch: Fetch) -> list[Entry]:
        """Look at one old chunk; where most of its keys are gone, give the others a place in a new one."""
        if self._number - self._first < _CLEAN_FROM_CHUNKS:
            return []
        number = self._look_at = max(self._look_at, self._first)
        self._look_at = self._first if number + 2 >= self._number else number + 1
        name = self._names.chunk(self._id, number)
        value = fetch([name], CHUNK_NBYTES)[0]
        entries = list(entries_of(value)) if value is not None else []
        there = exist([self._qualify(entry.key) for entry in entries]) if entries else []
        kept = [entry for entry, status in zip(entries, there, strict=True) if status is not Status.MISS]
        if len(kept) > CHUNK_KEYS // 2:
            return []
        self._doomed.append(name)
        if number == self._first:
            self._first += 1
        return kept


def entries_of(value: bytes) -> Iterator[Entry]:
    """Read a chunk."""
    (count,) = _COUNT.unpack_from(value)
    for position in range(min(count, CHUNK_KEYS)):
        length, nbytes, key = _ENTRY.unpack_from(value, _COUNT.size + position * _ENTRY.size)
        yield Entry(key[:length].decode("ascii", "replace"), nbytes)


def everything(namespace: Namespace, exist: Exist, fetch: Fetch) -> tuple[dict[str, int], list[str]]:
    """Read the whole catalogue: key -> page size, and the chunks that nobody writes to any more.

    A chunk that is absent may have had its keys moved to a new one since its slot was read: the slots are
    read again then, until no chunk is missed, or no slot has changed.
    """
    names = Names(namespace)
    found: dict[str, int] = {}
    closed: dict[str, None] = {}
    spans: dict[str, tuple[bytes, int, int]] = {}
    missed = True
    while missed:
        missed = False
        slots = _present_slots(names, exist)
        for slot, value in zip(slots, fetch(list(map(names.slot, slots)), SLOT_NBYTES), strict=True):
            span = _span_of(slot, value)
            if span is None or spans.get(slot) == span:
                continue
            spans[slot] = span
            writer, first, after = span
            chunks = [names.chunk(writer, number) for number in range(first, after)]
            chunks = [chunk for chunk in chunks if chunk not in closed]
            for chunk in fetch(chunks, CHUNK_NBYTES):
                missed |= chunk is None
                found |= dict(entries_of(chunk)) if chunk is not None else {}
            closed |= dict.fromkeys(chunks[:-1])
    return found, list(closed)


def _span_of(slot: str, value: bytes | None) -> tuple[bytes, int, int] | None:
    """Read a slot: its writer, first and next chunk; None for one that is absent or damaged."""
    if value is None or _CHECK.unpack_from(value, _SPAN.size) != (xxh3_64_intdigest(value[: _SPAN.size]),):
        return None
    writer, first, after = _SPAN.unpack_from(value)
    return (writer, first, after) if writer.hex().startswith(slot) else None


def _present_slots(names: Names, exist: Exist) -> list[str]:
    begun = [""]
    for _ in range(PATH_LENGTH):
        tried = [begin + digit for begin in begun for digit in _DIGITS]
        statuses = exist(list(map(names.slot, tried)))
        begun = [begin for begin, status in zip(tried, statuses, strict=True) if status is OK]
    return begun
