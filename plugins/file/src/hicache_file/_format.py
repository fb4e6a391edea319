"""The format on disk: sizes, headers, and how each is packed; pure.

docs/decisions holds the page that says why. In short, all numbers little-endian::

    root/hicache.root            128 bytes, then 48 a slot of the open-segment table
    root/<namespace>/manifest.json
    root/<namespace>/epoch       128 bytes, then a ring of 32-byte events
    root/<namespace>/<id>.seg    page bytes from its first byte on
    root/<namespace>/<id>.idx    128 bytes, dead[room], use[room], then 64-byte records

Every header begins with eight bytes of magic, then the version and its
complement, 16 bits each, so that any future version can be told from damage.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

FORMAT_VERSION = 1
#: As it stands in a header: the version, and its complement above it.
VERSION_WORD = FORMAT_VERSION | (FORMAT_VERSION ^ 0xFFFF) << 16

ROOT_FILE = "hicache.root"
EPOCH_FILE = "epoch"
MANIFEST_FILE = "manifest.json"
ID_NBYTES = 16

ROOT_MAGIC = b"HICAROOT"
EPOCH_MAGIC = b"HICAEPOC"
JOURNAL_MAGIC = b"HICAJRNL"

#: Live words of the root and epoch files begin here, their tables after them.
LIVE_OFFSET = 64
TABLE_OFFSET = 128

_ROOT_HEAD = struct.Struct("<8sII16s24xQ")
_ROOT_LIVE = struct.Struct("<QQQQQ16sQ")
_SLOT = struct.Struct("<16s16sQQ")
_EPOCH_HEAD = struct.Struct("<8sII16s24xQ")
_EPOCH_LIVE = struct.Struct("<QQQ")
_EVENT = struct.Struct("<16sQII")
_JOURNAL_HEAD = struct.Struct("<8sII16s16s16sQQI4xQQQ8xQ")

SLOT_NBYTES = _SLOT.size
EVENT_NBYTES = _EVENT.size
EPOCH_LIVE_NBYTES = _EPOCH_LIVE.size
JOURNAL_HEAD_NBYTES = _JOURNAL_HEAD.size
RECORD_NBYTES = 64

#: No journal is longer: 64 MiB of pages of 4 KiB take 1.1 MB. A segment whose journal is full is full.
LARGEST_JOURNAL_NBYTES = 1 << 22
_MOST_ROOM = (LARGEST_JOURNAL_NBYTES - JOURNAL_HEAD_NBYTES) // (2 + RECORD_NBYTES) // 64 * 64

#: Flag of a journal header: each record was written after its data had reached the disk.
SYNCED = 1

#: Dead bytes, one a record: zero is alive.
REMOVED, DAMAGED = 1, 2
#: Kinds of events in a namespace's ring.
CREATED, DELETED, BURIED = 1, 2, 3


_HEX = frozenset("0123456789abcdef")


def is_id(name: str) -> bool:
    """Tell whether a name is 32 hex digits, as a namespace's folder and a segment's files have."""
    return len(name) == 32 and _HEX.issuperset(name)


class UnknownVersion(ValueError):
    """A header with the right magic and a version that this code does not know."""

    def __init__(self, version: int) -> None:
        self.version = version
        super().__init__(f"format version {version}, this code knows {FORMAT_VERSION}")


class BadHeader(ValueError):
    """Bytes that are not the header they should be: damaged, cut short, or somebody else's."""


@dataclass(frozen=True, slots=True)
class RootState:
    """The live words of the root file, read and written under its lock."""

    capacity: int = 0
    """Bytes that all files may take; 0 is no limit."""
    sequence: int = 0
    """The last sequence drawn."""
    used: int = 0
    """Bytes that all files take."""
    dirty: int = 0
    """Not zero while files change: the one that held the lock died, count again."""
    slots: int = 0
    """Entries of the open-segment table."""
    boot: bytes = bytes(16)
    """The boot in which ``used`` was counted."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One open segment in the root's table; ``nbytes`` 0 is a free slot."""

    namespace: bytes
    id: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class Event:
    """One change of a namespace, for processes that follow it."""

    kind: int
    id: bytes
    value: int
    """CREATED: the segment's sequence. BURIED: the record's number."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What is known of a segment from its journal's header; it never changes after creation."""

    id: bytes
    namespace: bytes
    boot: bytes
    sequence: int
    epoch: int
    room: int
    """Records that the journal has room for, a multiple of 64."""
    nbytes: int
    """Size of the .seg file as created."""
    created_ns: int
    inode: int
    """Of the .seg file: pages without checksums are read from no other."""
    synced: bool

    @property
    def records_start(self) -> int:
        """Where the records begin in the .idx file."""
        return JOURNAL_HEAD_NBYTES + 2 * self.room

    @property
    def dead_start(self) -> int:
        """Where the dead bytes begin."""
        return JOURNAL_HEAD_NBYTES

    @property
    def use_start(self) -> int:
        """Where the use bytes begin."""
        return JOURNAL_HEAD_NBYTES + self.room


def journal_room(segment_nbytes: int) -> int:
    """Tell how many records the journal of a segment of this size has room for."""
    return min(_MOST_ROOM, -(-max(64, segment_nbytes // 4096) // 64) * 64)


def total_nbytes(segment_nbytes: int) -> int:
    """Tell what both files of a segment of this size take while it is open."""
    return segment_nbytes + journal_nbytes(journal_room(segment_nbytes))


def journal_nbytes(room: int) -> int:
    """Tell the size of a preallocated .idx file."""
    return JOURNAL_HEAD_NBYTES + room * (2 + RECORD_NBYTES)


def pack_root_head(root_id: bytes) -> bytes:
    return _sealed(_ROOT_HEAD, ROOT_MAGIC, VERSION_WORD, 0, root_id)


def unpack_root_head(raw: bytes) -> bytes:
    """Check the root file's head; return the root's id."""
    return bytes(_opened(_ROOT_HEAD, raw, ROOT_MAGIC)[3])


def pack_root_state(state: RootState) -> bytes:
    return _sealed(
        _ROOT_LIVE, state.capacity, state.sequence, state.used, state.dirty, state.slots, state.boot
    )


def unpack_root_state(raw: bytes) -> RootState:
    return RootState(*_unsealed(_ROOT_LIVE, raw))


def pack_slot(slot: Slot) -> bytes:
    return _sealed(_SLOT, slot.namespace, slot.id, slot.nbytes)


def unpack_slots(raw: bytes) -> list[Slot | None]:
    """Read the open-segment table; None where a slot is damaged."""
    slots: list[Slot | None] = []
    for start in range(0, len(raw) - SLOT_NBYTES + 1, SLOT_NBYTES):
        try:
            slots.append(Slot(*_unsealed(_SLOT, raw[start : start + SLOT_NBYTES])))
        except BadHeader:
            slots.append(None)
    return slots


def pack_epoch_head(namespace: bytes, slots: int) -> bytes:
    return _sealed(_EPOCH_HEAD, EPOCH_MAGIC, VERSION_WORD, slots, namespace)


def unpack_epoch_head(raw: bytes) -> tuple[int, bytes]:
    """Check an epoch file's head; return the ring's slots and the namespace."""
    fields = _opened(_EPOCH_HEAD, raw, EPOCH_MAGIC)
    return fields[2], fields[3]


def pack_epoch_live(epoch: int, head: int) -> bytes:
    return _sealed(_EPOCH_LIVE, epoch, head)


def unpack_epoch_live(raw: bytes) -> tuple[int, int]:
    """Return the epoch and how many events there have been."""
    epoch, head = _unsealed(_EPOCH_LIVE, raw)
    return epoch, head


def pack_event(event: Event, number: int) -> bytes:
    """Pack an event; its number seeds the check word, so that none is taken for another in its place."""
    body = _EVENT.pack(event.id, event.value, event.kind, 0)[:-4]
    return body + xxhash.xxh32_intdigest(body, number & 0xFFFFFFFF).to_bytes(4, "little")


def unpack_event(raw: bytes, number: int) -> Event:
    """Read the event of this number.

    Raises:
        BadHeader: damaged, or an event of another number.
    """
    check = xxhash.xxh32_intdigest(raw[:-4], number & 0xFFFFFFFF).to_bytes(4, "little")
    if len(raw) != EVENT_NBYTES or check != raw[-4:]:
        raise BadHeader("an event that does not match its check word")
    event_id, value, kind, _ = _EVENT.unpack(raw)
    return Event(kind, event_id, value)


def pack_journal_head(header: SegmentHeader) -> bytes:
    return _sealed(
        _JOURNAL_HEAD,
        JOURNAL_MAGIC,
        VERSION_WORD,
        SYNCED if header.synced else 0,
        header.id,
        header.namespace,
        header.boot,
        header.sequence,
        header.epoch,
        header.room,
        header.nbytes,
        header.created_ns,
        header.inode,
    )


def unpack_journal_head(raw: bytes) -> SegmentHeader:
    fields = _opened(_JOURNAL_HEAD, raw, JOURNAL_MAGIC)
    _, _, flags, seg_id, namespace, boot, sequence, epoch, room, nbytes, created, inode = fields
    if not room or room % 64:
        raise BadHeader("a journal header with impossible sizes")
    return SegmentHeader(
        seg_id, namespace, boot, sequence, epoch, room, nbytes, created, inode, bool(flags & SYNCED)
    )


def _sealed(layout: struct.Struct, *fields: object) -> bytes:
    body = layout.pack(*fields, 0)[:-8]
    return body + xxhash.xxh3_64_digest(body)


def _unsealed(layout: struct.Struct, raw: bytes) -> tuple:  # type: ignore[type-arg]
    raw = raw[: layout.size]
    if len(raw) != layout.size or xxhash.xxh3_64_digest(raw[:-8]) != raw[-8:]:
        raise BadHeader("bytes that do not match their check word")
    return layout.unpack(raw)[:-1]


def _opened(layout: struct.Struct, raw: bytes, magic: bytes) -> tuple:  # type: ignore[type-arg]
    if raw[:8] != magic or len(raw) < 12:
        raise BadHeader(f"no {magic.decode()} header")
    word = int.from_bytes(raw[8:12], "little")
    if word != VERSION_WORD and word & 0xFFFF == (word >> 16) ^ 0xFFFF:
        raise UnknownVersion(word & 0xFFFF)
    return _unsealed(layout, raw)
