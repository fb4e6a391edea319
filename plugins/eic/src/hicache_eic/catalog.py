"""The catalogue: which keys were set, kept in EIC itself, since EIC lists and counts nothing.

A writer (one a worker thread, so that its writes are in order) has a *slot* under a name that everybody can
try, and *chunks* of up to 64 keys each, numbered; a set stores its chunk with its pages, in one call.
Readers (``usage``, ``clear``) try all slots, read all chunks, and then ask which of the keys are there: the
catalogue says what may be there, never what is. So what EIC evicts costs nothing here, and an entry too
many does no harm.

Records have fixed sizes, since EIC does not tell a value's size:
slot   ``{namespace}/~w/{slot}``      writer id, first chunk, next chunk
chunk  ``{namespace}/~c/{id}/{n}``    count, then (length, page nbytes, key) each
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hicache_core.identity import Namespace
from hicache_core.status import OK, Status

CHUNK_KEYS = 64
#: A key is 128 characters of hash, a dot, and 64 of component at most.
_MAX_KEY_NBYTES = 199
_SLOT = struct.Struct("<16sQQ")
_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct(f"<BQ{_MAX_KEY_NBYTES}s")
SLOT_NBYTES = _SLOT.size
CHUNK_NBYTES = _COUNT.size + CHUNK_KEYS * _ENTRY.size

#: Slots are looked for in blocks; a block that is empty is the end. A new writer takes one at random from
#: the first block that is at most half full, so that two who come at once hardly ever take the same.
BLOCK_SLOTS = 1024
_MAX_BLOCKS = 64
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

    def slot(self, slot: int) -> str:
        """Name a slot."""
        return self._namespace.qualify(f"~w/{slot}")

    def chunk(self, writer: bytes, number: int) -> str:
        """Name a chunk."""
        return self._namespace.qualify(f"~c/{writer.hex()}/{number}")


class Writer:
    """One writer's part of the catalogue; used by one thread at a time."""

    def __init__(self, namespace: Namespace) -> None:
        self._names = Names(namespace)
        self._id = secrets.token_bytes(16)
        self._slot: int | None = None
        self._first = 0
        self._number = 0
        #: First and next chunk as the slot tells them since the last set that was stored.
        self._told = (0, 0)
        self._look_at = 0
        self._entries: list[Entry] = []
        self._doomed: list[str] = []
        self._qualify = namespace.qualify

    @property
    def slot_name(self) -> str | None:
        """The slot's name, to be asked for with a set's own keys; None before the first set."""
        return None if self._slot is None else self._names.slot(self._slot)

    def add(
        self, keys: Sequence[str], nbytes: int, *, slot_is_there: bool, exist: Exist, fetch: Fetch
    ) -> list[Record]:
        """Enter keys; give the records to store together with their pages."""
        if self._slot is None or (len(self._entries) + len(keys) > CHUNK_KEYS and not self._owns_slot(fetch)):
            self._slot = self._free_slot(exist)
            slot_is_there = False
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
        if self._slot is not None and (not slot_is_there or self._told != self._span):
            value = _SLOT.pack(self._id, *self._span)
            records.insert(0, Record(self._names.slot(self._slot), value))
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

    def _owns_slot(self, fetch: Fetch) -> bool:
        """False where another writer took the same slot; one that is absent is ours to write again."""
        name = self.slot_name
        value = fetch([name], SLOT_NBYTES)[0] if name is not None else None
        return value is None or value[:16] == self._id

    def _free_slot(self, exist: Exist) -> int | None:
        for block in range(_MAX_BLOCKS):
            slots = range(block * BLOCK_SLOTS, (block + 1) * BLOCK_SLOTS)
            statuses = exist([self._names.slot(slot) for slot in slots])
            free = [slot for slot, status in zip(slots, statuses, strict=True) if status is Status.MISS]
            if len(free) >= BLOCK_SLOTS // 2:
                return secrets.choice(free)
        return None  # 30,000 writers and never a clear: this one's keys are found by gets alone

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
    """Read the whole catalogue: key -> page size, and the chunks that nobody writes to any more."""
    names = Names(namespace)
    found: dict[str, int] = {}
    closed: list[str] = []
    for slots in _present_slots(names, exist):
        for value in fetch(slots, SLOT_NBYTES):
            if value is None:
                continue
            writer, first, after = _SLOT.unpack(value)
            chunks = [names.chunk(writer, number) for number in range(first, after)]
            closed += chunks[:-1]
            for chunk in fetch(chunks, CHUNK_NBYTES):
                found |= dict(entries_of(chunk)) if chunk is not None else {}
    return found, closed


def _present_slots(names: Names, exist: Exist) -> Iterable[list[str]]:
    for block in range(_MAX_BLOCKS):
        slots = [names.slot(slot) for slot in range(block * BLOCK_SLOTS, (block + 1) * BLOCK_SLOTS)]
        present = [name for name, status in zip(slots, exist(slots), strict=True) if status is OK]
        if not present:
            return
        yield present
