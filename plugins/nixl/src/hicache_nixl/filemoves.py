"""Moving pages between slots and files: open, transfer, judge; or make, transfer, rename.

The calling thread opens, makes, renames and closes files; chunks of them are moved
by the lanes (lanes.py says how). A transfer tells of one failure for all of its
pages, so after one they are moved again alone, each by an agent that no failed
transfer has touched.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Sequence
from itertools import repeat

import numpy as np

from hicache_core import Namespace, Status
from hicache_nixl._native import Agent, Scratch
from hicache_nixl.byname import Remembered
from hicache_nixl.folders import Folders, status_of, unlink
from hicache_nixl.places import Moving
from hicache_nixl.trailer import (
    TRAILER_NBYTES,
    Verdict,
    checksum_in,
    examine,
    pack,
    padded_nbytes,
    plain_nbytes,
    rounded,
    sealer,
)
from hicache_nixl.transfers import transfer
from hicache_nixl.verdicts import Verdicts, why_not_read, why_not_written

#: Bytes a chunk: what was copied is still in the processor's cache when it is hashed.
CHUNK_NBYTES = 2 << 20
#: The same for pages that are read by name, where fewer transfers save more than the cache does.
NAMED_CHUNK_NBYTES = 4 << 20
#: The same past the page cache, and so past the processor's; a disk wants many requests at a time.
DIRECT_CHUNK_NBYTES = 32 << 20
MAX_CHUNK_PAGES = 64
#: Files open at a time for one call; a process may have 1024 by default.
MAX_OPEN = 256

_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
_TO_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OK = Status.OK


class Mover:
    """Moves pages for one storage; thread-safe, since agents carry what changes."""

    def __init__(
        self,
        folders: Folders,
        remembered: Remembered,
        *,
        direct: bool,
        checksums: bool,
        fsync: bool,
        max_descriptors: int,
    ) -> None:
        self._folders = folders
        self._namespace: Namespace = folders.namespace
        self._prefix = folders.namespace.qualify("")
        self.verdicts = Verdicts(folders.namespace)
        self.remembered = remembered
        self.direct = direct
        self._checksums = checksums
        self._fsync = fsync
        self._max_descriptors = max_descriptors

    def chunks(self, batch: Moving, positions: Sequence[int]) -> list[Sequence[int]]:
        """Cut a batch into what one transfer carries each."""
        past_cache = self.direct and not batch.staged
        return _cut(
            positions, self._pages_a_chunk(batch, DIRECT_CHUNK_NBYTES if past_cache else CHUNK_NBYTES)
        )

    def named_chunks(self, batch: Moving, positions: Sequence[int]) -> list[Sequence[int]]:
        """The same for pages that are read by name."""
        size = self._pages_a_chunk(batch, NAMED_CHUNK_NBYTES)
        if size < len(positions) <= 2 * size:
            # One chunk a lane: the helper comes to its own .1 ms later, so that halves would end one by one.
            size = min(len(positions) * 5 // 8, self._max_descriptors // batch.segments)
        return _cut(positions, size)

    def _pages_a_chunk(self, batch: Moving, nbytes: int) -> int:
        by_size = nbytes // max(1, batch.nbytes)
        by_descriptors = self._max_descriptors // batch.segments
        return max(1, min(MAX_CHUNK_PAGES, by_size, by_descriptors))

    def file_nbytes(self, page_nbytes: int) -> int:
        """Size of the file that a set makes for a page."""
        return padded_nbytes(page_nbytes) if self.direct else plain_nbytes(page_nbytes)

    # Get.

    def open(self, batch: Moving, positions: Sequence[int]) -> list[int]:
        """Open the files of pages and read their trailers; what is not there has its status set."""
        read_at, statuses, direct = os.pread, batch.statuses, self.direct
        at = self.file_nbytes(batch.nbytes) - TRAILER_NBYTES
        descriptors, trailers = batch.descriptors, batch.trailers
        files = map(os.open, map(batch.paths.__getitem__, positions), repeat(_TO_READ))
        opened: list[int] = []
        if time.monotonic() > batch.deadline:
            return opened
        for position in positions:
            try:
                for descriptors[position] in files:  # the next one: no interrupt between open() and the list
                    break
                opened.append(position)
                descriptor = descriptors[position]
                # One byte more than there should be: what comes back tells the size too.
                trailer = trailers[position] = read_at(descriptor, TRAILER_NBYTES + 1, at)
                if len(trailer) != TRAILER_NBYTES:
                    self._measure(batch, position)
                elif direct and bypass_cache(descriptor):
                    batch.direct.add(position)
            except OSError as error:
                statuses[position] = status_of(error)
        return opened

    def _measure(self, batch: Moving, position: int) -> None:
        """Look at a file that is not as a set makes them now: of the other kind, or of another size."""
        path, descriptor, nbytes = batch.paths[position], batch.descriptors[position], batch.nbytes
        found = os.fstat(descriptor)
        size = found.st_size
        if size in (plain_nbytes(nbytes), padded_nbytes(nbytes)):  # the usual one: it became whole meanwhile
            batch.trailers[position] = os.pread(descriptor, TRAILER_NBYTES, size - TRAILER_NBYTES)
            return
        # Of the size that was seen, or OK might be said of a page that nobody reads.
        batch.statuses[position] = self.verdicts.by_trailer(
            descriptor, size, path, batch.keys[position], nbytes
        )
        self.verdicts.remember(path, found)

    def read(self, agent: Agent, batch: Moving, positions: Sequence[int]) -> Sequence[int]:
        """Read one chunk of opened pages into their slots; give those to be read again alone."""
        positions = batch.skipped(positions)
        if not positions:
            return ()
        if not self._transfer(agent, "READ", batch, positions):
            if len(positions) > 1:
                return positions
            (position,) = positions
            batch.statuses[position] = why_not_read(batch.descriptors[position])
        elif batch.staged:
            for slot, position in enumerate(positions):
                self._judge(batch, position, self._staged(agent, batch, position, slot))
        else:
            self._judge_all(batch, positions)
        return ()

    def _judge_all(self, batch: Moving, positions: Sequence[int]) -> None:
        """Believe pages whose trailers are to the byte what they would be sealed with; judge the others."""
        if not self._checksums or not batch.on_host:
            for position in positions:
                self._judge(batch, position, None)
            return
        seal, remember = sealer(self._prefix, batch.nbytes), self.remembered.keep
        keys, trailers, statuses = batch.keys, batch.trailers, batch.statuses
        for position, checksum in zip(positions, batch.checksums(positions), strict=True):
            if trailers[position] == seal(keys[position], checksum):
                statuses[position] = _OK
                remember(batch.paths[position], checksum)
            else:
                self._judge(batch, position, None)

    def _judge(self, batch: Moving, position: int, staged: memoryview | None) -> None:
        """Believe a page only when its trailer and checksum agree; copy it out where it was staged."""
        key, trailer = batch.keys[position], batch.trailers[position]
        path, descriptor = batch.paths[position], batch.descriptors[position]
        verdict, wanted = examine(trailer, self._namespace.qualify(key), batch.nbytes)
        good = verdict is Verdict.GOOD
        if good and wanted is not None and self._checksums and batch.on_host:
            good = batch.checksum(position, staged) == wanted
        if good:
            if staged is not None:
                batch.copy_out(position, staged)
            batch.statuses[position] = _OK
        elif verdict is Verdict.OTHER_SIZE:  # padded files of several page sizes are of one size
            self.verdicts.remember(path, os.fstat(descriptor))
            batch.statuses[position] = Status.SIZE_MISMATCH
        else:
            found = self.verdicts.condemn(descriptor, path, key, trailer, batch.nbytes)
            batch.statuses[position] = found

    def close(self, batch: Moving, positions: Sequence[int]) -> None:
        """Close the files of pages; of those that have none open, nothing."""
        close, descriptors = os.close, batch.descriptors
        for position in positions:
            descriptor = descriptors[position]
            if descriptor >= 0:
                descriptors[position] = -1
                close(descriptor)

    # Set.

    def make(self, batch: Moving, positions: Sequence[int]) -> list[int]:
        """Create the temporary files of pages; what cannot be made has its status set."""
        made: list[int] = []
        if time.monotonic() > batch.deadline:
            return made
        descriptors = batch.descriptors
        for position in positions:
            place = batch.paths[position]
            temporary = f"{place[: place.rindex('/')]}/.{batch.token}-{position}.tmp"
            batch.temporaries[position] = temporary
            try:
                try:
                    _make(temporary, descriptors, position)
                except FileNotFoundError:
                    self._folders.make_fan(place)
                    _make(temporary, descriptors, position)
            except OSError as error:
                batch.statuses[position] = _not_miss(error)
                continue
            made.append(position)
        return made

    def write(self, agent: Agent, batch: Moving, positions: Sequence[int]) -> Sequence[int]:
        """Write one chunk of pages to their temporary files; give those to be written again alone."""
        self._seal(batch, [position for position in positions if not batch.trailers[position]])
        positions = batch.skipped(positions)
        if not positions:
            return ()
        for slot, position in enumerate(positions if batch.staged else ()):
            staged = self._staged(agent, batch, position, slot)
            if staged is not None:
                batch.copy_in(position, staged)
        if self._transfer(agent, "WRITE", batch, positions):
            for position in positions:
                batch.moved[position] = True
        elif len(positions) > 1:
            return positions
        else:
            (position,) = positions
            nbytes = self.file_nbytes(batch.nbytes)
            batch.statuses[position] = why_not_written(batch.descriptors[position], nbytes)
        return ()

    def _seal(self, batch: Moving, positions: Sequence[int]) -> None:
        """Write pages' trailers, and bypass the page cache for the rest where that is wanted."""
        trailers, descriptors, write_at = batch.trailers, batch.descriptors, os.pwrite
        at = self.file_nbytes(batch.nbytes) - TRAILER_NBYTES
        for position, trailer in zip(positions, self._sealed(batch, positions), strict=True):
            trailers[position] = trailer
            try:
                if write_at(descriptors[position], trailer, at) != TRAILER_NBYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if self.direct and bypass_cache(descriptors[position]):
                    batch.direct.add(position)
            except OSError as error:
                batch.statuses[position] = _not_miss(error)

    def _sealed(self, batch: Moving, positions: Sequence[int]) -> list[bytes]:
        """Make pages' trailers."""
        keys = batch.keys
        if self._checksums and batch.on_host:
            seal = sealer(self._prefix, batch.nbytes)
            found = zip(positions, batch.checksums(positions), strict=True)
            return [seal(keys[position], checksum) for position, checksum in found]
        return [pack(self._namespace.qualify(keys[position]), batch.nbytes, None) for position in positions]

    def publish(self, batch: Moving, positions: Sequence[int]) -> None:
        """Give whole files their names, and remove the others; of what was not made, nothing."""
        descriptors, statuses = batch.descriptors, batch.statuses
        for position in positions:
            descriptor = descriptors[position]
            if descriptor < 0:
                continue
            if batch.moved[position] and statuses[position] is not _OK:
                statuses[position] = self._publish_one(batch, position)
            if statuses[position] is not _OK:
                unlink(batch.temporaries[position])
            descriptors[position] = -1
            os.close(descriptor)

    def _publish_one(self, batch: Moving, position: int) -> Status:
        descriptor, path = batch.descriptors[position], batch.paths[position]
        try:
            if os.lseek(descriptor, 0, os.SEEK_END) != self.file_nbytes(batch.nbytes):
                return Status.ERROR
            if self._fsync:
                os.fdatasync(descriptor)
            os.rename(batch.temporaries[position], path)
            if self._fsync:
                _sync_folder(os.path.dirname(path))
        except OSError as error:
            return _not_miss(error)
        self.verdicts.forget(path)
        checksum = checksum_in(batch.trailers[position])
        if checksum is not None:
            self.remembered.keep(path, checksum)
        return _OK

    # Both.

    def _transfer(self, agent: Agent, verb: str, batch: Moving, positions: Sequence[int]) -> bool:
        """Run one transfer to its end; False where it failed."""
        nbytes = self.file_nbytes(batch.nbytes)
        if batch.staged:
            ranges = batch.staged_ranges(positions, self._scratch(agent, batch).address)
        else:
            ranges = batch.ranges(positions, [batch.descriptors[position] for position in positions])
        files = np.zeros((len(positions), 3), np.uint64)
        files[:, 1], files[:, 2] = nbytes, [batch.descriptors[position] for position in positions]
        return transfer(agent, verb, batch, files, ranges)

    def _scratch(self, agent: Agent, batch: Moving) -> Scratch:
        return agent.scratch(rounded(batch.nbytes) * max(1, CHUNK_NBYTES // max(1, batch.nbytes)))

    def _staged(self, agent: Agent, batch: Moving, position: int, slot: int) -> memoryview | None:
        """Where a page lies in an agent's private blocks; None where its slot itself is used."""
        if position not in batch.direct:
            return None
        stride = rounded(batch.nbytes)
        return self._scratch(agent, batch).view[slot * stride : (slot + 1) * stride]


def _cut(positions: Sequence[int], size: int) -> list[Sequence[int]]:
    return [positions[at : at + size] for at in range(0, len(positions), size)]


def _make(path: str, descriptors: list[int], position: int) -> None:
    for descriptors[position] in map(os.open, (path,), (_TO_MAKE,), (0o600,)):  # as in Mover.open
        break


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
