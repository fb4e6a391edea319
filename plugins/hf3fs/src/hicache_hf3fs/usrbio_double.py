"""A double of ``hf3fs_fuse.io`` over a plain folder: for tests, where no 3FS can be had. Never for use.

A folder counts as a 3FS mount when it holds ``3fs-virt/iovs``. What it keeps of the real thing: iovecs in
shared memory that are written by another thread, after a timeout too; rings of an exact depth, EAGAIN when
full, slots that come back only when reaped; a wait that times out gives fewer results; results are counts
or -errno, short at the end of a file; one direction a ring; registered descriptors; a link an iovec,
removed with it; blocking with io_depth > 0.

``FAULTS`` makes it slow, wrong or stuck.

Source: deepseek-ai/3FS, src/lib/api/UsrbIo.cc and src/lib/py, as told in their public documentation.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_IOVS = os.path.join("3fs-virt", "iovs")
#: A ring that is dropped ends its thread within this time.
_JOIN_S = 2.0


class Faults:
    """What goes wrong, for all rings of the process; every hook is asked on a ring's own thread."""

    def __init__(self) -> None:
        self._gate = threading.Event()
        self.reset()

    def reset(self) -> None:
        """Let everything go right again, and what was held go on."""
        self.result: Callable[[bool, int, int], int | None] = lambda reading, offset, nbytes: None
        """(reading, offset, nbytes) -> None, -errno, or a shorter count."""
        self.delay_s: Callable[[bool, int], float] = lambda reading, offset: 0.0
        """(reading, offset) -> seconds before the transfer."""
        self.backwards = False
        """Completions of what was submitted together come in the opposite order."""
        self.entries: int | None = None
        """Depth of rings made from now on, in place of what was asked for."""
        self._gate.set()

    def hold(self) -> None:
        """Have every transfer wait before it touches anything."""
        self._gate.clear()

    def release(self) -> None:
        """End a hold."""
        self._gate.set()

    def pass_gate(self, stop: threading.Event) -> bool:
        """Wait out a hold; False when the ring was dropped meanwhile and its transfers are void."""
        while not self._gate.wait(0.01):
            if stop.is_set():
                return False
        return True


FAULTS = Faults()

_registered: dict[int, tuple[int, int]] = {}
_lock = threading.Lock()


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def extract_mount_point(path: str) -> str | None:
    """Find the mount that holds a path, which must exist."""
    real = os.path.realpath(path, strict=True)
    while real != os.path.dirname(real):
        if os.path.isdir(os.path.join(real, _IOVS)):
            return real
        real = os.path.dirname(real)
    return None


def register_fd(fd: int, flags: int = 0) -> int:
    """Let rings use a descriptor of a file on the mount; EBADF off it, EINVAL the second time."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        raise _error(errno.EBADF) from None
    if not os.path.exists(path) or extract_mount_point(path) is None:
        raise _error(errno.EBADF)
    with _lock:
        if fd in _registered:
            raise _error(errno.EINVAL)
        _registered[fd] = (os.dup(fd), fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE)
    return 0


def deregister_fd(fd: int) -> None:
    """Take it back; must come before the descriptor is closed."""
    with _lock:
        entry = _registered.pop(fd, None)
    if entry is not None:
        os.close(entry[0])


def registered() -> list[int]:
    """Tell which descriptors are registered, for tests."""
    return sorted(_registered)


class iovec:
    """Shared memory that rings may use, or a slice of it."""

    def __init__(self, view: memoryview, link: str | None, base: iovec | None) -> None:
        self.result = 0
        self.userdata: Any = None
        self.view = view
        self._link = link
        self._base = base

    def __getitem__(self, part: slice) -> iovec:
        start, stop, step = part.indices(len(self.view))
        if step != 1:
            raise ValueError("an iovec is sliced with step 1 only")
        return iovec(self.view[start:stop], None, self._base or self)

    def __len__(self) -> int:
        return len(self.view)

    def __del__(self) -> None:
        if self._link is not None:
            try:
                os.unlink(self._link)
            except OSError:
                pass


def make_iovec(shm: Any, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1) -> iovec:
    """Make shared memory known to the mount, by a link to its name."""
    suffix = f".b{block_size}" if block_size > 0 else ""
    link = os.path.join(hf3fs_mount_point, _IOVS, f"{uuid.uuid4()}{suffix}")
    if not os.path.exists(os.path.join("/dev/shm", shm.name)):
        raise _error(errno.ENOENT)
    os.symlink(os.path.join("/dev/shm", shm.name), link)
    return iovec(memoryview(shm.buf), link, None)


class _Queues:
    """What a ring and its thread share; the thread does not keep the ring alive."""

    def __init__(self, entries: int, reading: bool, io_depth: int) -> None:
        self.reading, self.io_depth = reading, io_depth
        self.free = entries
        self.prepared: deque[Any] = deque()
        self.submitted: deque[Any] = deque()
        self.completed: deque[Any] = deque()
        self.changed = threading.Condition(threading.Lock())
        self.stop = threading.Event()

    def run(self) -> None:
        while True:
            with self.changed:
                while not self.stop.is_set() and len(self.submitted) < max(1, self.io_depth):
                    self.changed.wait()
                if self.stop.is_set():
                    return
                count = abs(self.io_depth) or len(self.submitted)
                batch = [self.submitted.popleft() for _ in range(min(count, len(self.submitted)))]
            for iov, fd, offset, userdata in reversed(batch) if FAULTS.backwards else batch:
                result = self._transfer(iov, fd, offset)
                if result is None:
                    return
                with self.changed:
                    self.completed.append((iov, result, userdata))
                    self.changed.notify_all()

    def _transfer(self, iov: iovec, fd: int, offset: int) -> int | None:
        time.sleep(FAULTS.delay_s(self.reading, offset))
        if not FAULTS.pass_gate(self.stop):
            return None
        wanted = FAULTS.result(self.reading, offset, len(iov))
        if wanted is not None and wanted < 0:
            return wanted
        view = iov.view if wanted is None else iov.view[:wanted]
        try:
            return os.preadv(fd, [view], offset) if self.reading else os.pwritev(fd, [view], offset)
        except OSError as error:
            return -(error.errno or errno.EIO)


class ioring:
    """A ring of one direction; prepare is for one thread at a time."""

    def __init__(self, mount: str, entries: int, for_read: bool, io_depth: int) -> None:
        if not mount or entries < 1:
            raise _error(errno.EINVAL)
        if not os.path.isdir(os.path.join(mount, _IOVS)):
            raise _error(errno.ENOENT)
        self._queues = _Queues(FAULTS.entries or entries, for_read, io_depth)
        self._thread = threading.Thread(target=self._queues.run, name="usrbio-double", daemon=True)
        self._thread.start()

    def prepare(self, iov: iovec, read: bool, fd: int, offset: int, userdata: Any = None) -> ioring:
        """Take a slot; EINVAL, EBADF, EACCES, EAGAIN."""
        queues = self._queues
        if read != queues.reading or not len(iov):
            raise _error(errno.EINVAL)
        with _lock:
            entry = _registered.get(fd)
        if entry is None:
            raise _error(errno.EBADF)
        if entry[1] == (os.O_WRONLY if read else os.O_RDONLY):
            raise _error(errno.EACCES)
        with queues.changed:
            if not queues.free:
                raise _error(errno.EAGAIN)
            queues.free -= 1
            queues.prepared.append((iov, entry[0], offset, userdata))
        return self

    def submit(self) -> ioring:
        """Start what was prepared."""
        with self._queues.changed:
            self._queues.submitted.extend(self._queues.prepared)
            self._queues.prepared.clear()
            self._queues.changed.notify_all()
        return self

    def wait(
        self, max_results: int = 0, min_results: int = 0, timeout: timedelta | None = None
    ) -> list[iovec]:
        """Reap completions; after the timeout, as many as there are."""
        queues = self._queues
        results: list[iovec] = []
        most = max(max_results, min_results) or 1
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        with queues.changed:
            while True:
                while queues.completed and len(results) < most:
                    iov, iov.result, iov.userdata = queues.completed.popleft()
                    results.append(iov)
                    queues.free += 1
                left = None if end is None else end - time.monotonic()
                if len(results) >= min_results or (left is not None and left <= 0):
                    return results
                queues.changed.wait(left)

    def __del__(self) -> None:
        queues = getattr(self, "_queues", None)
        if queues is not None:
            queues.stop.set()
            with queues.changed:
                queues.changed.notify_all()
            if threading.current_thread() is not self._thread:
                self._thread.join(_JOIN_S)


def make_ioring(
    hf3fs_mount_point: str,
    entries: int,
    for_read: bool = True,
    io_depth: int = 0,
    priority: int | None = None,
    timeout: int | None = None,
    numa: int = -1,
    flags: int = 0,
) -> ioring:
    """Make a ring of ``entries`` slots."""
    return ioring(hf3fs_mount_point, entries, for_read, io_depth)


def force_fsync(fd: int) -> int:
    """Flush a file."""
    os.fsync(fd)
    return 0
