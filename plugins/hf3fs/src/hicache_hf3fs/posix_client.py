"""Pages by preadv and pwritev: any mounted parallel file system, the 3FS FUSE mount included.

Neighbours in the file go in one system call of half a megabyte, which is hashed while it is still in the
cache; larger batches are shared with a few threads. A system call cannot be cancelled: between calls the
deadline is looked at, within one nothing can be done (``hold``).

On a network file system another host writes behind this one's page cache. So a write is flushed before it is
confirmed, and a read first drops what is cached of its range.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from hicache_hf3fs._crew import Crew
from hicache_hf3fs.page_io import PageIO, checksum_of
from hicache_hf3fs.pagefile import PageFile

#: Bytes a system call: below, the call is the cost; above, the hash finds a cold cache (1 MiB a core here).
_CALL_NBYTES = 512 << 10
#: Linux's IOV_MAX.
_MAX_SEGMENTS = 1024


class PosixClient:
    """A PageMover over file descriptors.

    Args:
        numjobs: threads a batch, the caller's included.
        flush: make a write durable before it counts.
        network: other hosts write to the same files.
    """

    def __init__(self, numjobs: int, *, flush: bool, network: bool) -> None:
        self._crew = Crew(numjobs - 1)
        self._flush = flush or network
        self._network = network

    def attach(self, file: PageFile) -> None:
        return None

    def detach(self, file: PageFile) -> None:
        return None

    def read(self, file: PageFile, pages: Sequence[PageIO], *, checksum: bool, deadline: float) -> None:
        self._share(partial(self._read_run, file.fd, checksum, deadline), pages)

    def write(self, file: PageFile, pages: Sequence[PageIO], *, checksum: bool, deadline: float) -> None:
        self._share(partial(self._write_run, file.fd, checksum, deadline), pages)
        if self._flush and any(page.result == page.nbytes for page in pages):
            self._flushed(file.fd, pages)

    def close(self) -> None:
        self._crew.close()

    def abandon_in_child(self) -> None:
        return None

    def _share(self, move: Callable[[list[PageIO]], None], pages: Sequence[PageIO]) -> None:
        runs = list(_runs(pages))
        if len(runs) == 1:
            move(runs[0])
        else:
            self._crew.run([partial(move, run) for run in runs])

    def _read_run(self, fd: int, checksum: bool, deadline: float, run: list[PageIO]) -> None:
        if time.monotonic() >= deadline:
            return
        if self._network:
            os.posix_fadvise(fd, run[0].offset, sum(p.nbytes for p in run), os.POSIX_FADV_DONTNEED)
        _move(partial(os.preadv, fd), run)
        if checksum:
            for page in run:
                if page.result == page.nbytes:
                    page.checksum = checksum_of(page.views)

    def _write_run(self, fd: int, checksum: bool, deadline: float, run: list[PageIO]) -> None:
        if time.monotonic() >= deadline:
            return
        if checksum:
            for page in run:
                page.checksum = checksum_of(page.views)
        _move(partial(os.pwritev, fd), run)

    def _flushed(self, fd: int, pages: Sequence[PageIO]) -> None:
        try:
            os.fdatasync(fd)
        except OSError as error:
            for page in pages:
                page.result = -(error.errno or 5)


def _runs(pages: Sequence[PageIO]) -> Iterator[list[PageIO]]:
    """Cut a batch into runs of neighbours in the file, each small enough for one system call."""
    run: list[PageIO] = []
    nbytes = segments = 0
    for page in sorted(pages, key=lambda page: page.offset):
        fits = nbytes + page.nbytes <= _CALL_NBYTES and segments + len(page.views) <= _MAX_SEGMENTS
        if run and not (fits and run[-1].offset + run[-1].nbytes == page.offset):
            yield run
            run, nbytes, segments = [], 0, 0
        run.append(page)
        nbytes += page.nbytes
        segments += len(page.views)
    if run:
        yield run


def _move(call: Callable[[Sequence[memoryview], int], int], run: list[PageIO]) -> None:
    """Move a run with one call; page by page where that came to a short count or an error."""
    try:
        moved = call([view for page in run for view in page.views], run[0].offset)
    except OSError:
        moved = 0
    for page in run:
        page.result = page.nbytes if moved >= page.nbytes else _alone(call, page)
        moved = max(0, moved - page.nbytes)


def _alone(call: Callable[[Sequence[memoryview], int], int], page: PageIO) -> int:
    """Move one page, however many calls that takes; bytes moved, or -errno."""
    done = 0
    try:
        while done < page.nbytes:
            moved = call(_rest(page.views, done), page.offset + done)
            if moved == 0:
                break
            done += moved
    except OSError as error:
        return -(error.errno or 5)
    return done


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    rest = []
    for view in views:
        if done < view.nbytes:
            rest.append(view[done:])
        done = max(0, done - view.nbytes)
    return rest
