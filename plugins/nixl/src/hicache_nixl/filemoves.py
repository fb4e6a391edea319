"""Moving pages between slots and files: open, transfer, judge; or make, transfer, rename.

The calling thread opens, makes, renames and closes files; chunks of them are moved
by the lanes (lanes.py says how).
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Sequence

from hicache_core import Namespace, Status
from hicache_nixl._native import Agent, Region, Scratch, TransferFailed
from hicache_nixl.folders import Folders, status_of, unlink
from hicache_nixl.places import Moving, OnePage
from hicache_nixl.trailer import (
    TRAILER_NBYTES,
    Verdict,
    checksum,
    examine,
    pack,
    padded_nbytes,
    plain_nbytes,
    rounded,
    stored_page_nbytes,
)

#: Bytes a chunk: what was copied is still in the processor's cache when it is hashed.
CHUNK_NBYTES = 2 << 20
MAX_CHUNK_PAGES = 64
#: Files open at a time for one call; a process may have 1024 by default.
MAX_OPEN = 256
MAX_BAD = 65_536

_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_TO_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_TO_CUT = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_OK = Status.OK


class Mover:
    """Moves pages for one storage; thread-safe, since agents carry what changes."""

    def __init__(
        self, folders: Folders, *, direct: bool, checksums: bool, fsync: bool, max_descriptors: int
    ) -> None:
        self._folders = folders
        self._namespace: Namespace = folders.namespace
        self.direct = direct
        self._checksums = checksums
        self._fsync = fsync
        self._max_descriptors = max_descriptors
        #: path -> inode of a file on which a get has failed (C6), unless it was cut.
        self._bad: dict[str, int] = {}

    def pages_a_chunk(self, batch: Moving) -> int:
        """How many pages one transfer carries."""
        by_size = CHUNK_NBYTES // max(1, batch.nbytes)
        by_descriptors = self._max_descriptors // batch.segments
        return max(1, min(MAX_CHUNK_PAGES, by_size, by_descriptors))

    def file_nbytes(self, page_nbytes: int) -> int:
        """Size of the file that a set makes for a page."""
        return padded_nbytes(page_nbytes) if self.direct else plain_nbytes(page_nbytes)

    # Get.

    def open(self, batch: Moving, positions: Sequence[int]) -> list[OnePage]:
        """Open the files of pages and read their trailers; what is not there has its status set."""
        open_file, read_at = os.open, os.pread
        paths, statuses, wanted = batch.paths, batch.statuses, batch.nbytes
        pages: list[OnePage] = []
        if time.monotonic() > batch.deadline:
            return pages
        for position in positions:
            path = paths[position]
            try:
                descriptor = open_file(path, _TO_READ)
            except OSError as error:
                statuses[position] = status_of(error)
                continue
            page = OnePage(position, path, descriptor)
            pages.append(page)
            try:
                # One byte more than there should be: what comes back tells the size too.
                page.trailer = read_at(descriptor, TRAILER_NBYTES + 1, wanted)
                if len(page.trailer) != TRAILER_NBYTES:
                    self._measure(batch, page)
            except OSError as error:
                statuses[position] = status_of(error)
        return pages

    def _measure(self, batch: Moving, page: OnePage) -> None:
        """Open a file that is not a plain one of the wanted size: padded, or of another size."""
        key, descriptor, nbytes = batch.keys[page.position], page.descriptor, padded_nbytes(batch.nbytes)
        if os.fstat(descriptor).st_size == nbytes:
            page.trailer = os.pread(descriptor, TRAILER_NBYTES, nbytes - TRAILER_NBYTES)
            page.direct = self.direct and bypass_cache(descriptor)
            return
        batch.statuses[page.position] = self.judge_by_trailer(descriptor, page.path, key, batch.nbytes)
        self._remember(page.path, os.fstat(descriptor).st_ino)

    def read(self, agent: Agent, batch: Moving, pages: Sequence[OnePage]) -> None:
        """Read one chunk of opened pages into their slots."""
        pages = [page for page in pages if batch.statuses[page.position] is Status.SKIPPED]
        if not pages:
            return
        whole = self._transfer(agent, "READ", batch, pages)
        for slot, page in enumerate(pages):
            if whole or (len(pages) > 1 and self._transfer(agent, "READ", batch, [page])):
                page.moved = True
                self._judge(batch, page, self._staged(agent, batch, page, slot if whole else 0))
            else:
                batch.statuses[page.position] = self._why_not_read(page)

    def _judge(self, batch: Moving, page: OnePage, staged: memoryview | None) -> None:
        """Believe a page only when its trailer and checksum agree; copy it out where it was staged."""
        position = page.position
        key = batch.keys[position]
        verdict, wanted = examine(page.trailer, self._namespace.qualify(key), batch.nbytes)
        good = verdict is Verdict.GOOD
        if good and wanted is not None and self._checksums and batch.on_host:
            good = checksum(batch.views(position) if staged is None else [staged[: batch.nbytes]]) == wanted
        if good:
            if staged is not None:
                batch.copy_out(position, staged)
            batch.statuses[position] = _OK
        elif verdict is Verdict.OTHER_SIZE:  # padded files of several page sizes are of one size
            self._remember(page.path, os.fstat(page.descriptor).st_ino)
            batch.statuses[position] = Status.SIZE_MISMATCH
        else:
            batch.statuses[position] = self._condemn(page, key, batch.nbytes)

    def close(self, pages: Sequence[OnePage]) -> None:
        """Close the files of pages."""
        for page in pages:
            os.close(page.descriptor)

    # Set.

    def make(self, batch: Moving, positions: Sequence[int]) -> list[OnePage]:
        """Create the temporary files of pages; what cannot be made has its status set."""
        pages: list[OnePage] = []
        if time.monotonic() > batch.deadline:
            return pages
        for position in positions:
            place = batch.paths[position]
            temporary = f"{place[: place.rindex('/')]}/.{batch.token}-{position}.tmp"
            try:
                try:
                    descriptor = os.open(temporary, _TO_MAKE, 0o600)
                except FileNotFoundError:
                    self._folders.make_fan(place)
                    descriptor = os.open(temporary, _TO_MAKE, 0o600)
            except OSError as error:
                batch.statuses[position] = _not_miss(error)
                continue
            page = OnePage(position, place, descriptor)
            page.temporary = temporary
            pages.append(page)
        return pages

    def write(self, agent: Agent, batch: Moving, pages: Sequence[OnePage]) -> None:
        """Write one chunk of pages to their temporary files."""
        for page in pages:
            self._seal(batch, page)
        pages = [page for page in pages if batch.statuses[page.position] is Status.SKIPPED]
        if not pages:
            return
        self._stage(agent, batch, pages)
        whole = self._transfer(agent, "WRITE", batch, pages)
        for page in pages:
            page.moved = whole or self._write_alone(agent, batch, page)
            if not page.moved:
                batch.statuses[page.position] = self._why_not_written(batch, page)

    def _seal(self, batch: Moving, page: OnePage) -> None:
        """Write a page's trailer, and bypass the page cache for the rest where that is wanted."""
        value = checksum(batch.views(page.position)) if self._checksums and batch.on_host else None
        trailer = pack(self._namespace.qualify(batch.keys[page.position]), batch.nbytes, value)
        try:
            end = self.file_nbytes(batch.nbytes)
            if os.pwrite(page.descriptor, trailer, end - TRAILER_NBYTES) != TRAILER_NBYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            page.direct = self.direct and bypass_cache(page.descriptor)
        except OSError as error:
            batch.statuses[page.position] = _not_miss(error)

    def _stage(self, agent: Agent, batch: Moving, pages: Sequence[OnePage]) -> None:
        for slot, page in enumerate(pages if batch.staged else ()):
            staged = self._staged(agent, batch, page, slot)
            if staged is not None:
                batch.copy_in(page.position, staged)

    def _write_alone(self, agent: Agent, batch: Moving, page: OnePage) -> bool:
        self._stage(agent, batch, [page])
        return self._transfer(agent, "WRITE", batch, [page])

    def publish(self, batch: Moving, pages: Sequence[OnePage]) -> None:
        """Give whole files their names, and remove the others."""
        for page in pages:
            if page.moved:
                batch.statuses[page.position] = self._publish_one(batch, page)
            os.close(page.descriptor)
            if batch.statuses[page.position] is not _OK:
                unlink(page.temporary)

    def _publish_one(self, batch: Moving, page: OnePage) -> Status:
        try:
            if os.lseek(page.descriptor, 0, os.SEEK_END) != self.file_nbytes(batch.nbytes):
                return Status.ERROR
            if self._fsync:
                os.fdatasync(page.descriptor)
            os.rename(page.temporary, page.path)
            if self._fsync:
                _sync_folder(os.path.dirname(page.path))
        except OSError as error:
            return _not_miss(error)
        if self._bad:
            self._bad.pop(page.path, None)
        return _OK

    # Both.

    def _transfer(self, agent: Agent, verb: str, batch: Moving, pages: Sequence[OnePage]) -> bool:
        """Run one transfer to its end, whenever that is (C11: hold)."""
        local: list[Region] = []
        remote: list[Region] = []
        for slot, page in enumerate(pages):
            if batch.staged and page.direct:
                stride = rounded(batch.nbytes)
                local.append((self._scratch(agent, batch).address + slot * stride, stride, 0))
                remote.append((0, stride, page.descriptor))
            else:
                batch.describe(page.position, page.descriptor, local, remote)
        nbytes = self.file_nbytes(batch.nbytes)
        try:
            files = agent.register("FILE", [(0, nbytes, page.descriptor, "") for page in pages])
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

    def _scratch(self, agent: Agent, batch: Moving) -> Scratch:
        return agent.scratch(rounded(batch.nbytes) * max(1, CHUNK_NBYTES // max(1, batch.nbytes)))

    def _staged(self, agent: Agent, batch: Moving, page: OnePage, slot: int) -> memoryview | None:
        """Where a page lies in an agent's private blocks; None where its slot itself is used."""
        if not (batch.staged and page.direct):
            return None
        stride = rounded(batch.nbytes)
        return self._scratch(agent, batch).view[slot * stride : (slot + 1) * stride]

    # Verdicts.

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
        return Status.CORRUPT if verdict is Verdict.DAMAGED else Status.SIZE_MISMATCH

    def _condemn(self, page: OnePage, key: str, wanted: int) -> Status:
        """Look again without NIXL; cut a damaged file to nothing, so that every process sees it."""
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

    def _is_intact(self, page: OnePage, key: str, wanted: int) -> bool:
        descriptor = os.open(f"/proc/self/fd/{page.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            stored = os.pread(descriptor, wanted, 0)
        finally:
            os.close(descriptor)
        verdict, expected = examine(page.trailer, self._namespace.qualify(key), wanted)
        if verdict is not Verdict.GOOD or len(stored) != wanted:
            return False
        return expected is None or checksum([memoryview(stored)]) == expected

    def _why_not_read(self, page: OnePage) -> Status:
        """Find what NIXL does not tell: cut short since it was opened, or unreadable."""
        try:
            nbytes = os.fstat(page.descriptor).st_size
        except OSError as error:
            return status_of(error)
        return Status.ERROR if nbytes else Status.CORRUPT  # another get has found it damaged

    def _why_not_written(self, batch: Moving, page: OnePage) -> Status:
        """Find what NIXL does not tell: no space, a quota, a limit."""
        try:
            os.posix_fallocate(page.descriptor, 0, self.file_nbytes(batch.nbytes))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                return status_of(error)
        return Status.ERROR


def bypass_cache(descriptor: int) -> bool:
    """Turn O_DIRECT on for an open file; False where its file system has none (tmpfs)."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        return False
    return True


def _not_miss(error: OSError) -> Status:
    """Give the status of a set that met this error: a folder that vanished is no miss."""
    status = status_of(error)
    return Status.ERROR if status is Status.MISS else status


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
