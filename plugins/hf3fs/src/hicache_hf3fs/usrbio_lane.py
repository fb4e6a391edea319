"""A lane: one piece of shared memory and a ring a direction, used by one call at a time."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hicache_core.errors import BackendUnavailable
from hicache_hf3fs.page_io import TIMED_OUT, PageIO, checksum_of
from hicache_hf3fs.pagefile import PageFile

_SHM = "/dev/shm"


class Lane:
    """See the module's text. ``begin`` and ``finish`` move one batch of at most ``entries`` pages.

    Raises: BackendUnavailable, where there is no shared memory or no ring to be had.
    """

    def __init__(self, library: Any, mount: str, nbytes: int, entries: int) -> None:
        self.broken = False
        """A ring has failed: nothing is known of what is in flight, and the lane is thrown away."""
        self._tokens = itertools.count(1)
        self._flights: dict[int, tuple[PageIO, int]] = {}
        self._lost: set[int] = set()
        self._reading = True
        try:
            memory = _SharedMemory(nbytes)
            try:
                self._rings = {
                    reading: library.make_ioring(mount, entries, for_read=reading, io_depth=0)
                    for reading in (True, False)
                }
                self._iov = library.make_iovec(memory, mount)
            finally:
                # The daemon has opened it by now; without a name it goes away with its last user, kill -9
                # included.
                memory.unlink()
        except (OSError, RuntimeError) as error:
            raise BackendUnavailable(
                "a usrbio ring cannot be made",
                value=str(error),
                remedy="Look at the 3FS mount and at the room in /dev/shm, or set client=posix.",
            ) from error
        self._memory: _SharedMemory | None = memory
        self._view = memory.buf

    def begin(
        self, file: PageFile, pages: Sequence[PageIO], checksum: bool, deadline: float, *, reading: bool
    ) -> None:
        """Put pages into the ring; a set's bytes are copied in first."""
        self._reading = reading
        ring, at = self._rings[reading], 0
        for page in pages:
            if not reading:
                _copy_in(page, self._view[at : at + page.nbytes])
                if checksum:
                    page.checksum = checksum_of([self._view[at : at + page.nbytes]])
            if not self._prepare(ring, file, page, at, deadline):
                break
            at += page.nbytes
        self._guarded(ring.submit)

    def finish(self, checksum: bool, deadline: float) -> None:
        """Wait for what was begun, until the deadline; a get's bytes are copied out."""
        ring = self._rings[self._reading]
        while self._flights and not self.broken:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._reap(ring, 1, left, checksum)
        for page, _ in self._flights.values():
            page.result, page.in_flight = TIMED_OUT, not self._reading
        self._lost |= set(self._flights)
        self._flights.clear()

    def drained(self) -> bool:
        """True when nothing is in flight: completions that were left behind are taken out and dropped."""
        self._lost |= set(self._flights)  # of a batch that was interrupted
        self._flights.clear()
        ring = self._rings[self._reading]
        while self._lost and not self.broken:
            done = self._guarded(lambda: ring.wait(len(self._lost), 0, timedelta(0)))
            if not done:
                return False
            self._lost -= {completion.userdata for completion in done}
        return not self._lost and not self.broken

    def close(self) -> None:
        """Let go of rings and memory; what is in flight keeps the memory on its side, and reaches nobody."""
        self._rings, self._iov = {}, None
        self._view = memoryview(b"")
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _prepare(self, ring: Any, file: PageFile, page: PageIO, at: int, deadline: float) -> bool:
        """Put one page into the ring, reaping while it is full; False where that cannot be done any more."""
        token = next(self._tokens)
        while not self.broken:
            try:
                ring.prepare(self._iov[at : at + page.nbytes], self._reading, file.fd, page.offset, token)
            except OSError as error:
                left = deadline - time.monotonic()
                if error.errno != errno.EAGAIN:
                    page.result = -(error.errno or errno.EIO)
                    return True
                if left <= 0 or not self._flights:
                    return False
                self._guarded(ring.submit)
                self._reap(ring, 1, left, checksum=self._reading)
            else:
                self._flights[token] = (page, at)
                return True
        return False

    def _reap(self, ring: Any, least: int, timeout_s: float, checksum: bool) -> None:
        """Settle completions; a timeout gives fewer of them and raises nothing."""
        most = len(self._flights)
        done = self._guarded(lambda: ring.wait(most, min(least, most), timedelta(seconds=timeout_s)))
        for completion in done or ():
            flight = self._flights.pop(completion.userdata, None)
            if flight is None:
                self._lost.discard(completion.userdata)
                continue
            page, at = flight
            page.result = int(completion.result)
            if self._reading and page.result == page.nbytes:
                view = self._view[at : at + page.nbytes]
                if checksum:
                    page.checksum = checksum_of([view])
                _copy_out(view, page)

    def _guarded(self, call: Any) -> Any:
        """Call into a ring; one that fails is not trusted any more."""
        try:
            return call()
        except OSError:
            self.broken = True
            return None


class _SharedMemory:
    """What make_iovec takes: a name in /dev/shm and a buffer.

    The standard library's own starts a process to track its names, which a library must not do to its user.
    """

    def __init__(self, nbytes: int) -> None:
        self.name = f"hicache-hf3fs-{os.getpid()}-{secrets.token_hex(8)}"
        self.size = nbytes
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(os.path.join(_SHM, self.name), flags, 0o600)
        try:
            os.ftruncate(descriptor, nbytes)
            self._map = mmap.mmap(descriptor, nbytes)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(descriptor)
        self.buf = memoryview(self._map)

    def unlink(self) -> None:
        try:
            os.unlink(os.path.join(_SHM, self.name))
        except FileNotFoundError:
            pass

    def close(self) -> None:
        """Drop our view; the mapping goes with the last one, which may be a completion's."""
        self.buf = memoryview(b"")


def _copy_in(page: PageIO, view: memoryview) -> None:
    at = 0
    for segment in page.views:
        view[at : at + segment.nbytes] = segment
        at += segment.nbytes


def _copy_out(view: memoryview, page: PageIO) -> None:
    at = 0
    for segment in page.views:
        segment[:] = view[at : at + segment.nbytes]
        at += segment.nbytes
