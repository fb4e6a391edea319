"""System calls under one folder: opened relative to it, no symbolic link followed, errors as statuses.

Everything below the root goes through a ``Folder``, which holds a directory
descriptor: a folder that is renamed or swapped for a link while we run cannot
lead a write elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hicache_core.status import Status

#: O_NONBLOCK: a FIFO in a file's place must not block open(); it changes nothing for regular files.
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_STATUS = {
    errno.ENOSPC: Status.NO_SPACE,
    errno.EDQUOT: Status.NO_SPACE,
    errno.EFBIG: Status.NO_SPACE,
    errno.EACCES: Status.DENIED,
    errno.EPERM: Status.DENIED,
    errno.EROFS: Status.DENIED,
    errno.ETIMEDOUT: Status.TIMEOUT,
    errno.EMFILE: Status.UNAVAILABLE,
    errno.ENFILE: Status.UNAVAILABLE,
    errno.ENOENT: Status.UNAVAILABLE,
    errno.ENOTDIR: Status.UNAVAILABLE,
    errno.ESTALE: Status.UNAVAILABLE,
    errno.ENOTCONN: Status.UNAVAILABLE,
}

#: flock is not offered: then nobody else may use the root, and open() says so.
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

#: fallocate is not offered: fall back to a sparse file.
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

#: Waiting for a lock looks again after at first this, at last this long.
_POLL_FIRST_S, _POLL_LAST_S = 50e-6, 2e-3


class LockTimeout(OSError):
    """A lock that another process or thread did not give up within the deadline."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.ETIMEDOUT, f"{what} stayed locked")


def status_of(error: OSError) -> Status:
    """Translate an errno; what is not in the table is ERROR."""
    return _STATUS.get(error.errno or 0, Status.ERROR)


class Folder:
    """A directory by descriptor."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def at(cls, path: str) -> Folder:
        """Open a path that a user named; its own links are followed, this once."""
        return cls(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def folder(self, name: str) -> Folder:
        """Open a folder inside this one."""
        return Folder(os.open(name, os.O_RDONLY | os.O_DIRECTORY | _SAFELY, dir_fd=self.fd))

    def make_folder(self, name: str) -> None:
        """Make a folder, 0700; one that exists is fine."""
        try:
            os.mkdir(name, 0o700, dir_fd=self.fd)
        except FileExistsError:
            pass

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a regular file, made 0600 where flags say so.

        Raises:
            OSError: ENOENT for a link and for anything else that is not a regular file.
        """
        try:
            fd = os.open(name, flags | _SAFELY, 0o600, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", name) from error
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.ENOENT, "not a regular file", name)
        return fd

    def size(self, name: str) -> int:
        """Tell a file's size, 0 when there is none."""
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return 0
        return found.st_size if stat.S_ISREG(found.st_mode) else 0

    def names(self) -> list[str]:
        """List the folder."""
        return os.listdir(self.fd)

    def remove(self, name: str) -> bool:
        """Unlink a file; False when there is none."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return False
        return True

    def rename(self, source: str, target: str) -> None:
        """Put a file in another one's place."""
        os.rename(source, target, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def sync(self) -> None:
        """Flush the folder's entries to the disk."""
        os.fsync(self.fd)

    def close(self) -> None:
        """Give the descriptor back; idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class FileLock:
    """An exclusive lock over processes (flock) and threads, never held across a blocking wait.

    Polls with LOCK_NB: a blocking flock cannot be given up, and the holder may be a stopped process.
    """

    __slots__ = ("_fd", "_threads", "_what")

    def __init__(self, fd: int, what: str) -> None:
        self._fd = fd
        self._what = what
        self._threads = threading.Lock()

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock.

        Raises:
            LockTimeout: after timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        if not self._threads.acquire(timeout=timeout_s):
            raise LockTimeout(self._what)
        try:
            pause = _POLL_FIRST_S
            while not try_lock(self._fd):
                if time.monotonic() >= deadline:
                    raise LockTimeout(self._what)
                time.sleep(pause)
                pause = min(pause * 2, _POLL_LAST_S)
            try:
                yield
            finally:
                unlock(self._fd)
        finally:
            self._threads.release()


def try_lock(fd: int) -> bool:
    """Take an exclusive flock without waiting; True as well where the file system knows no flock."""
    return _flock(fd, fcntl.LOCK_EX)


def lock_shared(fd: int) -> bool:
    """Hold a file against ``lock_alone`` for as long as it is open; False while somebody has it alone."""
    return _flock(fd, fcntl.LOCK_SH)


def _flock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
    return True


def lock_alone(fd: int) -> bool:
    """Lock a file that nobody else holds; False as well where the file system knows no flock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give an flock back."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise


def flock_works(folder: Folder, name: str) -> bool:
    """Tell whether two openings of one file exclude each other."""
    first = folder.open(name, os.O_RDWR)
    try:
        second = folder.open(name, os.O_RDWR)
        try:
            return try_lock(first) and not try_lock(second)
        finally:
            os.close(second)
    except OSError:
        return False
    finally:
        os.close(first)


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve a file's blocks, so that a full disk is met here and not in the middle of a page.

    Raises:
        OSError: ENOSPC; what was reserved is the caller's to remove.
    """
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        os.ftruncate(fd, nbytes)


def read_exactly(fd: int, nbytes: int, offset: int) -> bytes:
    """Read up to nbytes, in as many calls as the kernel wants; short only at the end of the file."""
    raw = os.pread(fd, nbytes, offset)
    if len(raw) == nbytes or not raw:
        return raw
    parts = [raw]
    have = len(raw)
    while have < nbytes:
        raw = os.pread(fd, nbytes - have, offset + have)
        if not raw:
            break
        parts.append(raw)
        have += len(raw)
    return b"".join(parts)


def write_exactly(fd: int, payload: bytes | memoryview, offset: int) -> None:
    """Write all of it.

    Raises:
        OSError: and then any leading part may have been written.
    """
    view = memoryview(payload)
    while len(view):
        done = os.pwrite(fd, view, offset)
        view = view[done:]
        offset += done


def boot_id() -> bytes:
    """Give this boot's id as 16 bytes; zeros where the kernel does not tell. Source: random(4)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
