"""Moving one chunk of pages between slots and files: descriptors, trailers, verdicts.

Where a page's bytes go in a chunk, with one slot of private memory each:

    plain file         segments at their offsets, and 64 bytes of private memory as the trailer
    O_DIRECT, aligned  segments at their offsets, and a private block that ends in the trailer
    O_DIRECT, odd      all of the file is one private block run; the page is copied in or out
    device memory      segments at their offsets; the trailer goes through a descriptor of its own

The trailer is always the last 64 bytes of the file and of the private slot.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence

from hicache_core import Namespace, Pages, Status

from hicache_nixl._native import Agent, Region, TransferFailed
from hicache_nixl.agents import memory_kind
from hicache_nixl.folders import Folders, status_of, unlink
from hicache_nixl.trailer import (
    BLOCK_NBYTES,
    TRAILER_NBYTES,
    Verdict,
    checksum,
    examine,
    pack,
    padded_nbytes,
    plain_nbytes,
    stored_page_nbytes,
)

#: Bytes a chunk: what was copied is still in the processor's cache when it is hashed.
CHUNK_NBYTES = 1 << 20
MAX_CHUNK_PAGES = 64
MAX_BAD = 65_536

_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_TO_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_TO_CUT = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_OK = Status.OK


class Moving:
    """One batch on its way: what is moved, and what became of each page."""

    def __init__(self, keys: Sequence[str], locs: Pages, deadline: float) -> None:
        self.keys = keys
        self.locs = locs
        self.deadline = deadline
        self.statuses = [Status.SKIPPED] * len(keys)
        #: Makes the names of temporary files unique.
        self.token = os.urandom(8).hex()
        self.kind, self.device = memory_kind(locs.pool)
        self.segments = locs.segments_per_page
        self.addresses, self.sizes = locs.addresses()
        self._buffers = locs.buffers() if self.kind == "DRAM" else []

    def views(self, position: int) -> list[memoryview]:
        """Give the segments of a page in host memory."""
        return self._buffers[position * self.segments : (position + 1) * self.segments]

    def fill(self, positions: Sequence[int], status: Status) -> None:
        """Give pages one status."""
        for position in positions:
            self.statuses[position] = status

    def is_aligned(self) -> bool:
        """True where O_DIRECT can reach every segment itself."""
        return not any((a | n) % BLOCK_NBYTES for a, n in zip(self.addresses, self.sizes, strict=True))


class _Page:
    """One page of a chunk: its file, and its place in private memory."""

    __slots__ = ("descriptor", "direct", "nbytes", "path", "position", "slot", "temporary")

    def __init__(self, position: int, path: str, temporary: str, descriptor: int, nbytes: int, slot: int) -> None:
        self.position = position
        self.path = path
        self.temporary = temporary
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.slot = slot
        self.direct = False


class Mover:
    """Moves chunks for one storage; thread-safe, since agents carry what changes."""

    def __init__(
        self, folders: Folders, *, direct: bool, checksums: bool, fsync: bool, max_descriptors: int
    ) -> None:
        self._folders = folders
        self._namespace: Namespace = folders.namespace
        self._direct = direct
        self._checksums = checksums
        self._fsync = fsync
        self._max_descriptors = max_descriptors
        #: path -> inode of a file on which a get has failed (C6), unless it was cut.
        self._bad: dict[str, int] = {}

    def pages_a_chunk(self, locs: Pages) -> int:
        """How many pages one transfer carries."""
        by_size = CHUNK_NBYTES // max(1, locs.nbytes)
        by_descriptors = self._max_descriptors // (locs.segments_per_page + 1)
        return max(1, min(MAX_CHUNK_PAGES, by_size, by_descriptors))

    def file_nbytes(self, locs: Pages) -> int:
        """Size of the file that a set makes for a page."""
        return padded_nbytes(locs.nbytes) if self._direct else plain_nbytes(locs.nbytes)

    def is_bad(self, path: str) -> bool:
        """True for a file on which a get of this instance has failed."""
        if not self._bad or path not in self._bad:
            return False
        try:
            same = os.stat(path, follow_symlinks=False).st_ino == self._bad[path]
        except OSError:
            same = False
        if not same:
            self._bad.pop(path, None)
        return same

    # Get.

    def get(self, agent: Agent, batch: Moving, chunk: Sequence[int]) -> None:
        """Read these pages into their slots."""
        private = _Private(agent, batch, len(chunk), self._direct)
        pages: list[_Page] = []
        try:
            for position in chunk:
                page = self._open(batch, position, len(pages))
                if page is not None:
                    pages.append(page)
            if not pages:
                return
            private.forget_trailers(len(pages))
            if self._transfer(agent, "READ", batch, private, pages):
                batch.fill([page.position for page in pages], _OK)
            else:
                for page in pages:
                    alone = self._transfer(agent, "READ", batch, private, [page])
                    batch.statuses[page.position] = _OK if alone else self._why_not_read(batch, page)
            for page in pages:
                if batch.statuses[page.position] is _OK:
                    self._verify(batch, private, page)
        finally:
            for page in pages:
                os.close(page.descriptor)

    def _open(self, batch: Moving, position: int, slot: int) -> _Page | None:
        """Open and measure a page's file; None, with its status set, where there is nothing to read."""
        key, wanted = batch.keys[position], batch.locs.nbytes
        path = self._folders.path(key)
        try:
            descriptor = os.open(path, _TO_READ)
        except OSError as error:
            batch.statuses[position] = status_of(error)
            return None
        try:
            nbytes = os.fstat(descriptor).st_size
            page = _Page(position, path, "", descriptor, nbytes, slot)
            if nbytes == plain_nbytes(wanted):
                return page
            if nbytes == padded_nbytes(wanted):
                page.direct = self._direct and _bypass_cache(descriptor)
                return page
            status = batch.statuses[position] = self.judge_by_trailer(descriptor, path, key, wanted)
            if status in (Status.CORRUPT, Status.SIZE_MISMATCH):
                self._remember(path, os.fstat(descriptor).st_ino)
        except OSError as error:
            batch.statuses[position] = status_of(error)
        os.close(descriptor)
        return None

    def _verify(self, batch: Moving, private: _Private, page: _Page) -> None:
        """Believe a page only when its trailer and checksum agree; copy it out where it was staged."""
        key = batch.keys[page.position]
        if batch.kind != "DRAM":
            trailer = os.pread(page.descriptor, TRAILER_NBYTES, page.nbytes - TRAILER_NBYTES)
        else:
            trailer = bytes(private.trailer(page.slot))
        verdict, wanted = examine(trailer, self._namespace.qualify(key), batch.locs.nbytes)
        good = verdict is Verdict.GOOD
        staged = private.staged(page) if good and batch.kind == "DRAM" else None
        if good and wanted is not None and self._checksums and batch.kind == "DRAM":
            good = checksum([staged] if staged is not None else batch.views(page.position)) == wanted
        if not good:
            batch.statuses[page.position] = self._condemn(page, key, batch.locs.nbytes)
        elif staged is not None:
            at = 0
            for view in batch.views(page.position):
                view[:] = staged[at : at + view.nbytes]
                at += view.nbytes

    def judge_by_trailer(self, descriptor: int, path: str, key: str, wanted: int | None) -> Status:
        """Tell what an open file is that does not have the wanted size; ``wanted`` None for any size."""
        nbytes = os.fstat(descriptor).st_size
        trailer = os.pread(descriptor, TRAILER_NBYTES, max(0, nbytes - TRAILER_NBYTES))
        stored = stored_page_nbytes(trailer)
        if stored is None or nbytes not in (plain_nbytes(stored), padded_nbytes(stored)):
            return Status.CORRUPT
        verdict, _ = examine(trailer, self._namespace.qualify(key), wanted)
        if verdict is Verdict.GOOD and stored:  # a page has bytes
            return Status.CORRUPT if self.is_bad(path) else _OK
        if verdict is Verdict.GOOD:
            return Status.SIZE_MISMATCH
        return Status.SIZE_MISMATCH if verdict is Verdict.OTHER_SIZE else Status.CORRUPT

    def _condemn(self, page: _Page, key: str, wanted: int) -> Status:
        """Look again without NIXL; a file that is damaged is cut to nothing, so that every process sees it."""
        try:
            if self._is_intact(page, key, wanted):
                return Status.ERROR  # the slot changed under the read, or the read lied
            inode = os.fstat(page.descriptor).st_ino
        except OSError as error:
            return status_of(error)
        try:
            descriptor = os.open(page.path, _TO_CUT)
            try:
                if os.fstat(descriptor).st_ino == inode:
                    os.ftruncate(descriptor, 0)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            pass
        except OSError:
            self._remember(page.path, inode)
        return Status.CORRUPT

    def _remember(self, path: str, inode: int) -> None:
        """Have contains deny, and a set replace, a file on which a get has failed."""
        if len(self._bad) >= MAX_BAD:
            self._bad.clear()
        self._bad[path] = inode

    def _is_intact(self, page: _Page, key: str, wanted: int) -> bool:
        descriptor = os.open(f"/proc/self/fd/{page.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            stored = os.pread(descriptor, wanted, 0)
            trailer = os.pread(descriptor, TRAILER_NBYTES, page.nbytes - TRAILER_NBYTES)
        finally:
            os.close(descriptor)
        verdict, expected = examine(trailer, self._namespace.qualify(key), wanted)
        if verdict is not Verdict.GOOD or len(stored) != wanted:
            return False
        return expected is None or checksum([memoryview(stored)]) == expected

    def _why_not_read(self, batch: Moving, page: _Page) -> Status:
        try:
            if os.fstat(page.descriptor).st_size != page.nbytes:
                return Status.CORRUPT
            os.pread(page.descriptor, TRAILER_NBYTES, 0)
        except OSError as error:
            return status_of(error)
        return Status.ERROR

    # Set.

    def set(self, agent: Agent, batch: Moving, chunk: Sequence[int]) -> None:
        """Write these pages to temporary files and rename them."""
        private = _Private(agent, batch, len(chunk), self._direct)
        pages: list[_Page] = []
        try:
            for position in chunk:
                page = self._make(batch, position, len(pages))
                if page is not None:
                    pages.append(page)
                    self._prepare(batch, private, page)
            if not pages:
                return
            good = self._transfer(agent, "WRITE", batch, private, pages)
            for page in pages:
                alone = good or self._transfer(agent, "WRITE", batch, private, [page])
                batch.statuses[page.position] = self._publish(page) if alone else self._why_not_written(page)
        finally:
            for page in pages:
                os.close(page.descriptor)
                if batch.statuses[page.position] is not _OK:
                    unlink(page.temporary)

    def _make(self, batch: Moving, position: int, slot: int) -> _Page | None:
        """Create the temporary file of a page; None, with its status set, where that cannot be."""
        path = self._folders.path(batch.keys[position])
        temporary = f"{path[: path.rindex('/')]}/.{batch.token}-{position}.tmp"
        direct = self._direct
        try:
            try:
                descriptor = os.open(temporary, _TO_MAKE, 0o600)
            except FileNotFoundError:
                self._folders.make_fan(path)
                descriptor = os.open(temporary, _TO_MAKE, 0o600)
        except OSError as error:
            status = status_of(error)
            batch.statuses[position] = Status.ERROR if status is Status.MISS else status
            return None
        page = _Page(position, path, temporary, descriptor, self.file_nbytes(batch.locs), slot)
        batch.statuses[position] = Status.ERROR
        page.direct = direct and _bypass_cache(descriptor)
        return page

    def _prepare(self, batch: Moving, private: _Private, page: _Page) -> None:
        """Put the page's trailer, and the page itself where it is staged, into private memory."""
        host = batch.kind == "DRAM"
        views = batch.views(page.position)
        value = checksum(views) if self._checksums and host else None
        trailer = pack(self._namespace.qualify(batch.keys[page.position]), batch.locs.nbytes, value)
        if not host:
            descriptor = os.open(page.temporary, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.pwrite(descriptor, trailer, page.nbytes - TRAILER_NBYTES)
            finally:
                os.close(descriptor)
            return
        private.trailer(page.slot)[:] = trailer
        staged = private.staged(page)
        if staged is not None:
            at = 0
            for view in views:
                staged[at : at + view.nbytes] = view
                at += view.nbytes
            private.blank(page.slot)

    def _publish(self, page: _Page) -> Status:
        """Give a whole file its name."""
        try:
            if os.fstat(page.descriptor).st_size != page.nbytes:
                return Status.ERROR
            if self._fsync:
                os.fdatasync(page.descriptor)
            os.rename(page.temporary, page.path)
            if self._fsync:
                _sync_folder(os.path.dirname(page.path))
        except OSError as error:
            status = status_of(error)
            return Status.ERROR if status is Status.MISS else status
        if self._bad:
            self._bad.pop(page.path, None)
        return _OK

    def _why_not_written(self, page: _Page) -> Status:
        """Find what NIXL does not tell: no space, a quota, a limit."""
        try:
            os.posix_fallocate(page.descriptor, 0, page.nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                return status_of(error)
        return Status.ERROR

    # Both.

    def _transfer(
        self, agent: Agent, verb: str, batch: Moving, private: _Private, pages: Sequence[_Page]
    ) -> bool:
        """Run one transfer to its end, whenever that is (C11: hold); an agent that failed or overran is spent."""
        local: list[Region] = []
        remote: list[Region] = []
        for page in pages:
            private.describe(batch, page, local, remote)
        try:
            files = agent.register("FILE", [(0, page.nbytes, page.descriptor, "") for page in pages])
            try:
                transfer = agent.start(verb, (batch.kind, local), ("FILE", remote))
                in_time = transfer.wait(batch.deadline, hold=True)
            finally:
                agent.forget(files)
        except TransferFailed:
            agent.spent = True
            return False
        if transfer.failed or not in_time:
            agent.spent = True
        return not transfer.failed


class _Private:
    """The private memory of a chunk: a slot a page, each ending in the page's trailer."""

    def __init__(self, agent: Agent, batch: Moving, count: int, direct: bool) -> None:
        self._whole = direct and batch.kind == "DRAM" and not batch.is_aligned()
        self._page_nbytes = batch.locs.nbytes
        self._stride = TRAILER_NBYTES
        if direct:
            self._stride = padded_nbytes(self._page_nbytes) if self._whole else BLOCK_NBYTES
        scratch = agent.scratch(max(1 << 16, self._stride * count))
        self._view = scratch.view
        self._address = scratch.address

    def trailer(self, slot: int) -> memoryview:
        """Where a page's trailer lies."""
        end = (slot + 1) * self._stride
        return self._view[end - TRAILER_NBYTES : end]

    def forget_trailers(self, count: int) -> None:
        """Wipe what earlier chunks left, so that a read that wrote nothing is not believed."""
        for slot in range(count):
            self.trailer(slot)[:] = bytes(TRAILER_NBYTES)

    def blank(self, slot: int) -> None:
        """Zero what lies between a staged page and its trailer."""
        start, end = slot * self._stride + self._page_nbytes, (slot + 1) * self._stride - TRAILER_NBYTES
        self._view[start:end] = bytes(end - start)

    def staged(self, page: _Page) -> memoryview | None:
        """Where a page's bytes lie when they go through private memory."""
        if not (self._whole and page.direct):
            return None
        start = page.slot * self._stride
        return self._view[start : start + self._page_nbytes]

    def describe(self, batch: Moving, page: _Page, local: list[Region], remote: list[Region]) -> None:
        """Append the pairs of memory and file ranges that make up a page."""
        end = self._address + (page.slot + 1) * self._stride
        descriptor = page.descriptor
        if self._whole and page.direct:
            local.append((end - self._stride, self._stride, 0))
            remote.append((0, self._stride, descriptor))
            return
        offset = 0
        first = page.position * batch.segments
        for index in range(first, first + batch.segments):
            nbytes = batch.sizes[index]
            local.append((batch.addresses[index], nbytes, batch.device))
            remote.append((offset, nbytes, descriptor))
            offset += nbytes
        if batch.kind == "DRAM":
            tail = BLOCK_NBYTES if page.direct else TRAILER_NBYTES
            local.append((end - tail, tail, 0))
            remote.append((page.nbytes - tail, tail, descriptor))


def _bypass_cache(descriptor: int) -> bool:
    """Turn O_DIRECT on for an open file; False where its file system has none (tmpfs)."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        return False
    return True


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
