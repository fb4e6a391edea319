"""The page file: pages of one size by index, preallocated, and behind them a label that says what it is.

The label comes last so that a page lies at a multiple of its size: ext4 keeps aligned writes in larger
folios, and takes a sixth less time for them than behind a header.

The label's random id binds the file to its metadata: a host that mounts something else at the same path makes
a file with another id, and is told so instead of reading other bytes. The database that gives out the pages
is named behind the label, its *owner*: of two that do so, one would hand out what the other has stored.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import struct
import time
import zlib
from dataclasses import dataclass

from hicache_core.errors import BackendIncompatible, BackendUnavailable, InvalidArgument, InvalidOptions
from hicache_hf3fs.metadata import PageFileLabel

#: The label's room.
LABEL_NBYTES = 4096
FORMAT_VERSION = 2

_MAGIC = b"HICACHE3"
_LABEL = struct.Struct("<8sI16sQQ")
_CRC = struct.Struct("<I")
#: Where the owner's id lies within the label's room; zeros where nobody owns the file.
_OWNER_AT = 2048
_OWNER_NBYTES = 16
#: What is locked of a file by who has metadata of its own, and by the clients of a server.
_ALONE, _SERVED = 0, 1
#: How long an owner that changes is waited for.
_TAKEOVER_S = 0.25
#: A file that is being made is not older.
_MAKING_S = 3600
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class PageFile:
    """An open page file."""

    rank: str
    path: str
    fd: int
    label: PageFileLabel

    def offset(self, index: int) -> int:
        """Give where a page begins; BackendUnavailable where the file has no such page."""
        if not 0 <= index < self.label.num_pages:
            raise BackendUnavailable(
                f"the metadata names a page that {self.path!r} has not",
                value=f"page {index} of {self.label.num_pages}",
                remedy="It is damaged: restore it, or start with a new database.",
            )
        return index * self.label.page_nbytes

    def owner(self) -> str:
        """Read the id of the database that gives out the pages; "" where none does. Raises OSError."""
        owner = os.pread(self.fd, _OWNER_NBYTES, self._owner_at)
        return owner.hex() if any(owner) else ""

    def own(self, database: str, *, alone: bool) -> None:
        """Write down the database that gives out the pages from now on.

        A server takes over from another server, whose clients look who the owner is. Nobody takes over from a
        process with metadata of its own, and such a process (``alone``) from nobody who has the file open.

        Raises: BackendUnavailable, where somebody works with another one's; OSError.
        """
        until = time.monotonic() + _TAKEOVER_S
        while (owner := self.owner()) not in ("", database):  # another client may be about to write ours
            if self._lock(_ALONE, fcntl.F_WRLCK) and (not alone or self._lock(_SERVED, fcntl.F_WRLCK)):
                break
            if time.monotonic() > until:
                self._lock(_ALONE, fcntl.F_UNLCK)
                raise BackendUnavailable(
                    f"the page file {self.path!r} is in use with other metadata",
                    remedy="Stop the other process, or name another root.",
                )
            time.sleep(_TAKEOVER_S / 50)
        if owner != database:
            os.pwrite(self.fd, bytes.fromhex(database), self._owner_at)
            os.fsync(self.fd)

    def hold(self, *, alone: bool) -> None:
        """Tell others, for as long as the file is open, that it is in use."""
        self._lock(_ALONE, fcntl.F_RDLCK if alone else fcntl.F_UNLCK)
        self._lock(_SERVED, fcntl.F_UNLCK if alone else fcntl.F_RDLCK)

    @property
    def _owner_at(self) -> int:
        return self.label.num_pages * self.label.page_nbytes + _OWNER_AT

    def _lock(self, byte: int, how: int) -> bool:
        """Lock one byte for this descriptor, its copies included; False where another's lock forbids it."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", how, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.EACCES)  # else a file system without locks
        return True

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


def open_page_file(root: str, rank: str, page_nbytes: int, file_size: int) -> PageFile:
    """Open a rank's page file, or make it; two processes that make it at once end with the same one.

    Raises: InvalidArgument (no bytes a page), InvalidOptions (file_size holds no page), BackendIncompatible
        (another page size, size or format), BackendUnavailable.
    """
    if page_nbytes < 1:
        raise InvalidArgument(
            f"pages of '{rank}' have no bytes",
            value=f"{page_nbytes} bytes a page",
            remedy="Do not store them.",
        )
    if file_size < page_nbytes:
        complaint = f"file_size={file_size} bytes holds no page of '{rank}'; the least is {page_nbytes} bytes"
        raise InvalidOptions("hf3fs", [("file_size", complaint, "")])
    path = os.path.join(root, f"{rank}.pages")
    wanted = PageFileLabel(secrets.token_hex(16), page_nbytes, file_size // page_nbytes)
    try:
        if not os.path.lexists(path):
            _tidy(path)
            _make(root, path, wanted)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise _cannot(path, error) from error
    try:
        found = _read_label(path, descriptor)
        _check_same(path, found, wanted)
    except BaseException:
        os.close(descriptor)
        raise
    return PageFile(rank, path, descriptor, found)


def _tidy(path: str) -> None:
    """Remove what a process left behind that was killed while it made this file."""
    for left in glob.glob(f"{glob.escape(path)}.????????.new"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - os.stat(left).st_mtime > _MAKING_S:
                os.unlink(left)


def owner_of(path: str) -> str:
    """Tell the id of the database that gives out a page file's pages; "" where none does.

    Raises: OSError; BackendIncompatible, where it is no page file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return PageFile("", path, descriptor, _read_label(path, descriptor)).owner()
    finally:
        os.close(descriptor)


def _make(root: str, path: str, label: PageFileLabel) -> None:
    """Write a whole file under another name, then link it: nobody ever sees half of it."""
    os.makedirs(root, mode=0o700, exist_ok=True)
    temporary = f"{path}.{label.file_id[:8]}.new"
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        nbytes = label.num_pages * label.page_nbytes
        try:
            os.posix_fallocate(descriptor, 0, nbytes + LABEL_NBYTES)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            os.ftruncate(descriptor, nbytes + LABEL_NBYTES)
        os.pwrite(descriptor, _packed(label), nbytes)
        os.fsync(descriptor)
        _publish(temporary, path)
    finally:
        os.close(descriptor)
        if os.path.lexists(temporary):
            os.unlink(temporary)


def _publish(temporary: str, path: str) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return  # another process was first; its file is the one
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        # No hard links here: two that make it at once get two ids, and the metadata tells the second one.
        os.rename(temporary, path)


def _packed(label: PageFileLabel) -> bytes:
    body = _LABEL.pack(
        _MAGIC, FORMAT_VERSION, bytes.fromhex(label.file_id), label.page_nbytes, label.num_pages
    )
    return body + _CRC.pack(zlib.crc32(body))


def _read_label(path: str, descriptor: int) -> PageFileLabel:
    size = os.fstat(descriptor).st_size
    fields = _label_at(descriptor, max(0, size - LABEL_NBYTES))
    if fields is None:  # format 1 had it before the pages
        first = _label_at(descriptor, 0)
        fields = first if first is not None and first[1] != FORMAT_VERSION else None
    if fields is not None and fields[1] != FORMAT_VERSION:
        upgrade = "Run: pip install -U hicache-hf3fs; or name" if fields[1] > FORMAT_VERSION else "Name"
        raise BackendIncompatible(
            "hf3fs",
            f"the page file {path!r} has another format",
            value=f"version {fields[1]}, this program reads {FORMAT_VERSION}",
            remedy=f"{upgrade} another root.",
        )
    if fields is None or size != fields[3] * fields[4] + LABEL_NBYTES:
        raise BackendIncompatible(
            "hf3fs",
            f"{path!r} is not a page file, or its label is damaged",
            remedy="Move it away, and start its metadata with a new database.",
        )
    _, _, file_id, page_nbytes, num_pages = fields
    return PageFileLabel(file_id.hex(), page_nbytes, num_pages)


def _label_at(descriptor: int, at: int) -> tuple[bytes, int, bytes, int, int] | None:
    packed = os.pread(descriptor, _LABEL.size + _CRC.size, at)
    body = packed[: _LABEL.size]
    whole = len(packed) == _LABEL.size + _CRC.size and body.startswith(_MAGIC)
    if not whole or _CRC.unpack(packed[_LABEL.size :])[0] != zlib.crc32(body):
        return None
    magic, version, file_id, page_nbytes, num_pages = _LABEL.unpack(body)
    return magic, version, file_id, page_nbytes, num_pages


def _check_same(path: str, found: PageFileLabel, wanted: PageFileLabel) -> None:
    if found.page_nbytes != wanted.page_nbytes:
        raise BackendIncompatible(
            "hf3fs",
            f"the page file {path!r} has pages of another size",
            value=f"{found.page_nbytes} bytes a page, wanted {wanted.page_nbytes}",
            remedy="Name another root for these pages.",
        )
    if found.num_pages != wanted.num_pages:
        made_with = found.num_pages * found.page_nbytes
        complaint = (
            f"file_size holds {wanted.num_pages} pages, and {path!r} was made for {found.num_pages}; "
            f"set file_size={made_with}, or name another root"
        )
        raise InvalidOptions("hf3fs", [("file_size", complaint, "")])


def _cannot(path: str, error: OSError) -> BackendUnavailable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "Make room there, or lower file_size."
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = f"Give user {os.getuid()} the right to write there, or name another root."
    else:
        remedy = "Check that the file system is mounted at root."
    return BackendUnavailable(
        f"the page file {path!r} cannot be opened", value=error.strerror or str(error), remedy=remedy
    )
