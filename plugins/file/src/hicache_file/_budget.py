"""The root file: the budget, the sequence, and who has segments open (R5).

The use of the root is the sum of its files. It changes only at create, seal and
delete, all under the root's lock, so it is kept as one number beside a ``dirty``
word: whoever takes the lock and finds ``dirty`` set knows that the last holder
died in the middle, and counts the files again. The table names every open
segment; an entry whose segment nobody has flocked belongs to a dead writer.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hicache_file._files import FileLock, Folder, read_exactly, try_lock, write_exactly
from hicache_file._format import (
    EPOCH_FILE,
    LIVE_OFFSET,
    MANIFEST_FILE,
    RECORD_NBYTES,
    ROOT_FILE,
    SLOT_NBYTES,
    TABLE_OFFSET,
    BadHeader,
    RootState,
    Slot,
    UnknownVersion,
    is_id,
    pack_root_head,
    pack_root_state,
    pack_slot,
    unpack_root_head,
    unpack_root_state,
    unpack_slots,
)
from hicache_file._journal import LENGTH, OFFSET
from hicache_file._segment import read_header, read_journal

_FREE = Slot(bytes(16), bytes(16), 0)
#: Open segments of all processes; far beyond what a quarter of any budget allows.
_MAX_SLOTS = 4096
#: A file, or its folder, is not there; anything else says nothing about it.
_GONE = (errno.ENOENT, errno.ENOTDIR)
#: This process, or the machine, is out of descriptors.
_FULL = (errno.EMFILE, errno.ENFILE)


class RootFile:
    """The root file, open for writing."""

    __slots__ = ("_lock", "boot", "capacity", "fd", "folder")

    def __init__(self, folder: Folder, fd: int, boot: bytes) -> None:
        self.folder = folder
        self.fd = fd
        self.boot = boot
        #: The budget as last read or written here, for when the file is damaged.
        self.capacity = 0
        self._lock = FileLock(fd, "the root")

    @classmethod
    def make(cls, folder: Folder, boot: bytes, timeout_s: float) -> RootFile:
        """Open the root file, made first where it is missing.

        Raises:
            OSError; UnknownVersion.
        """
        fd = folder.open(ROOT_FILE, os.O_RDWR | os.O_CREAT)
        try:
            root = cls(folder, fd, boot)
            with root._lock.held(timeout_s):
                try:
                    unpack_root_head(read_exactly(fd, TABLE_OFFSET, 0))
                except BadHeader:  # new, cut short, or damaged: the files themselves hold all that matters
                    state = replace(root.peek(), dirty=1)
                    fresh = pack_root_head(os.urandom(16)) + pack_root_state(state)
                    write_exactly(fd, fresh, 0)
            return root
        except BaseException:
            os.close(fd)
            raise

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[Ledger]:
        """Hold the root's lock and its books; what changed is written when the block ends well.

        Raises:
            LockTimeout.
        """
        with self._lock.held(timeout_s):
            ledger = Ledger(self, self.peek())
            if ledger.dirty or ledger.boot != self.boot:
                ledger.recount()
            yield ledger
            ledger.write(dirty=False)
            self.capacity = ledger.capacity

    def peek(self) -> RootState:
        """Read the books without the lock; a damaged or torn state says that the files must be counted."""
        try:
            return unpack_root_state(os.pread(self.fd, TABLE_OFFSET - LIVE_OFFSET, LIVE_OFFSET))
        except BadHeader:
            return RootState(self.capacity, dirty=1)

    def close(self) -> None:
        """Give the descriptor back; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def peek_books(folder: Folder) -> RootState:
    """Read a root's books as one who only reads; empty where there is no root, or one that cannot be read."""
    try:
        fd = folder.open(ROOT_FILE)
    except OSError:
        return RootState()
    try:
        return unpack_root_state(os.pread(fd, TABLE_OFFSET - LIVE_OFFSET, LIVE_OFFSET))
    except (OSError, BadHeader):
        return RootState()
    finally:
        os.close(fd)


class Ledger:
    """The root's books while its lock is held."""

    __slots__ = ("_root", "_written", "boot", "capacity", "dirty", "sequence", "slots", "used", "wrong")

    def __init__(self, root: RootFile, state: RootState) -> None:
        self._root = root
        self.capacity = state.capacity
        self.sequence = state.sequence
        self.used = state.used
        self.dirty = bool(state.dirty)
        #: True once the books turn out to be wrong, as when a file was made longer by hand: count again.
        self.wrong = False
        self.boot = state.boot
        raw = read_exactly(root.fd, max(0, os.fstat(root.fd).st_size - TABLE_OFFSET), TABLE_OFFSET)
        self.slots: list[Slot] = [slot or _FREE for slot in unpack_slots(raw)]

    def begin(self) -> None:
        """Say on disk that files are about to change; before the first change."""
        if not self.dirty:
            self.write(dirty=True)

    def write(self, *, dirty: bool) -> None:
        """Put the books on disk."""
        self.dirty = dirty = dirty or self.wrong
        state = RootState(
            self.capacity, self.sequence, self.used, int(dirty), len(self.slots), self._root.boot
        )
        write_exactly(self._root.fd, pack_root_state(state), LIVE_OFFSET)

    def draw_sequence(self) -> int:
        """Give the next sequence."""
        self.sequence += 1
        return self.sequence

    def register(self, slot: Slot) -> None:
        """Enter an open segment into the table, before its files are made."""
        number = next((n for n, taken in enumerate(self.slots) if not taken.nbytes), len(self.slots))
        if number == len(self.slots):
            if number >= _MAX_SLOTS:
                raise OSError(28, "too many open segments in this root")
            self.slots.append(slot)
            self.used += SLOT_NBYTES
        self.slots[number] = slot
        write_exactly(self._root.fd, pack_slot(slot), TABLE_OFFSET + number * SLOT_NBYTES)

    def unregister(self, segment_id: bytes) -> None:
        """Take a segment out of the table."""
        for number, slot in enumerate(self.slots):
            if slot.nbytes and slot.id == segment_id:
                self.slots[number] = _FREE
                write_exactly(self._root.fd, pack_slot(_FREE), TABLE_OFFSET + number * SLOT_NBYTES)

    def remove(self, folder: Folder, name: str, *, unlink: bool = True) -> None:
        """Unlink a segment; or only take it off the books, for a caller that uses its files at once."""
        self.begin()
        self._take_off(self._counted(folder, name))
        if unlink:
            remove_pair(folder, name)
        self.unregister(bytes.fromhex(name))

    def settle(self, folder: Folder, name: str) -> None:
        """Count a segment that has been cut with what it takes now."""
        self.begin()
        self._take_off(self._counted(folder, name) - pair_nbytes(folder, name))
        self.unregister(bytes.fromhex(name))

    def _take_off(self, nbytes: int) -> None:
        if nbytes > self.used:
            self.wrong = True
        self.used = max(0, self.used - nbytes)

    def _counted(self, folder: Folder, name: str) -> int:
        """Tell the bytes that a segment is counted with: while in the table, those preallocated for it."""
        segment_id = bytes.fromhex(name)
        for slot in self.slots:
            if slot.nbytes and slot.id == segment_id:
                return slot.nbytes
        return pair_nbytes(folder, name)

    def is_registered(self, segment_id: bytes) -> bool:
        """Tell whether a segment is in the table."""
        return any(slot.nbytes and slot.id == segment_id for slot in self.slots)

    @property
    def open_nbytes(self) -> int:
        """Bytes that open segments of all processes take."""
        return sum(slot.nbytes for slot in self.slots)

    def reap(self) -> int:
        """Seal what dead writers left open; return how many."""
        reaped = 0
        for slot in [slot for slot in self.slots if slot.nbytes]:
            try:
                folder = self._root.folder.folder(slot.namespace.hex())
            except OSError as error:
                if error.errno not in _GONE:
                    continue  # somebody may have it open
                self.begin()  # its folder is gone, and its bytes with it
                self._take_off(slot.nbytes)
                self.unregister(slot.id)
                continue
            try:
                if is_open(folder, slot.id.hex()):
                    continue
                self.begin()
                cut_tail(folder, slot.id.hex())
                self.settle(folder, slot.id.hex())
                reaped += 1
            finally:
                folder.close()
        return reaped

    def recount(self) -> None:
        """Sum up the files, after removing what a crash left half made or half removed."""
        deep = self.boot != self._root.boot
        self.begin()
        used = self._root.folder.size(ROOT_FILE) + self.open_nbytes
        sequences = [self.sequence]
        for name in namespaces(self._root.folder):
            try:
                folder = self._root.folder.folder(name)
            except OSError as error:
                if error.errno in _FULL:
                    raise  # what is not counted would be room that is not there
                continue
            try:
                scan = scan_folder(folder)
                if scan.half or scan.scratch or deep or not self.sequence:
                    sequences += self._mended(folder, scan, deep=deep)
                    scan = scan_folder(folder)
                used += scan.nbytes
                for slot in self.slots:
                    if slot.nbytes and slot.namespace.hex() == name:
                        used -= pair_nbytes(folder, slot.id.hex())
            finally:
                folder.close()
        self.used, self.wrong = used, False
        self.sequence = max(sequences)
        self.boot = self._root.boot
        self.reap()

    def _mended(self, folder: Folder, scan: FolderScan, *, deep: bool) -> list[int]:
        """Drop half segments; after a reboot cut every tail. Gives the sequences met."""
        for name in (*scan.half, *scan.scratch):
            folder.remove(name)
        sequences = []
        for name in scan.segments:
            if deep and not is_open(folder, name):
                cut_tail(folder, name)
            try:
                sequences.append(read_header(folder, name).sequence)
            except (OSError, ValueError):
                continue
        return sequences


@dataclass(slots=True)
class FolderScan:
    """What a namespace's folder holds."""

    segments: list[str] = field(default_factory=list)
    """Ids, in hex, whose two files are there."""
    half: list[str] = field(default_factory=list)
    """File names whose partner is missing."""
    scratch: list[str] = field(default_factory=list)
    """Files that a crash kept from being renamed."""
    nbytes: int = 0
    """The sum of our files."""


def namespaces(root: Folder) -> list[str]:
    """List the names that are namespaces'."""
    return sorted(name for name in root.names() if is_id(name))


def scan_folder(folder: Folder) -> FolderScan:
    """Look at every file of a namespace; foreign names are left out and left alone."""
    scan = FolderScan()
    halves: dict[str, str] = {}
    with os.scandir(folder.fd) as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    for name in names:
        stem, _, ending = name.rpartition(".")
        if name in (EPOCH_FILE, MANIFEST_FILE):
            scan.nbytes += folder.size(name)
        elif name in (f"{EPOCH_FILE}.new", f"{MANIFEST_FILE}.new") or (is_id(stem) and ending == "new"):
            scan.scratch.append(name)
        elif is_id(stem) and ending in ("seg", "idx"):
            scan.nbytes += folder.size(name)
            if halves.pop(stem, None):
                scan.segments.append(stem)
            else:
                halves[stem] = name
    scan.half.extend(halves.values())
    return scan


def pair_nbytes(folder: Folder, name: str) -> int:
    """Tell the bytes of a segment's two files."""
    return folder.size(f"{name}.seg") + folder.size(f"{name}.idx")


def is_open(folder: Folder, name: str) -> bool:
    """Tell whether some process has a segment flocked, or may have; the root's lock is held."""
    try:
        fd = folder.open(f"{name}.seg", os.O_RDWR)
    except OSError as error:
        return error.errno not in _GONE
    try:
        return not try_lock(fd)
    except OSError:
        return True
    finally:
        os.close(fd)


def cut_tail(folder: Folder, name: str) -> None:
    """Seal a segment that nobody has open: give back what lies behind its last good record."""
    try:
        header, _, records, _ = read_journal(folder, name)
    except (FileNotFoundError, BadHeader):
        remove_pair(folder, name)
        return
    except (OSError, UnknownVersion):
        return
    if not len(records):
        remove_pair(folder, name)
        return
    data_end = int((records[:, OFFSET] + records[:, LENGTH]).max())
    for ending, end in (("seg", data_end), ("idx", header.records_start + len(records) * RECORD_NBYTES)):
        try:
            fd = folder.open(f"{name}.{ending}", os.O_RDWR)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_size > end:
                os.ftruncate(fd, end)
        finally:
            os.close(fd)


def remove_pair(folder: Folder, name: str) -> None:
    """Unlink a segment: the journal first, so that a half removed one is never read."""
    folder.remove(f"{name}.idx")
    folder.remove(f"{name}.seg")
