"""One batch on its way: where its pages lie in memory and in files, and what became of each.

    plain file         segments at their offsets
    O_DIRECT, aligned  the same
    O_DIRECT, odd      one run of private blocks; the page is copied in or out
    device memory      segments at their offsets

The trailer is written and read apart, by the file's own descriptor. Everything is
kept by position in the batch, in lists and arrays, since an object a page costs
as much as its system calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hicache_core import Pages, Status
from hicache_nixl.agents import memory_kind
from hicache_nixl.trailer import BLOCK_NBYTES, checksum, checksums, rounded

Rows = npt.NDArray[np.uint64]
"""Descriptors as NIXL takes them: address or offset, nbytes, device or file descriptor."""


class Ranges(NamedTuple):
    """What one transfer moves: pairs of memory and file ranges."""

    local: Rows
    remote: Rows


class Moving:
    """A batch: what is moved, until when, and a status a page."""

    def __init__(
        self, keys: Sequence[str], paths: list[str], locs: Pages, deadline: float, *, direct: bool
    ) -> None:
        count = len(keys)
        self.keys = keys
        self.paths = paths
        self.nbytes = locs.nbytes
        self.deadline = deadline
        self.statuses = [Status.SKIPPED] * count
        #: What became of pages that no lane came to.
        self.trouble = Status.TIMEOUT
        #: Makes the names of temporary files unique.
        self.token = os.urandom(8).hex()
        self.kind, device = memory_kind(locs.pool)
        self.on_host = self.kind == "DRAM"
        self.segments = locs.segments_per_page
        #: Segments in host memory, segment-minor; none of a device.
        self.buffers = locs.buffers() if self.on_host else []
        addresses, self.sizes = locs.addresses()
        self._local = np.empty((len(addresses), 3), np.uint64)
        self._local[:, 0], self._local[:, 1], self._local[:, 2] = addresses, self.sizes, device
        #: True where O_DIRECT cannot reach the segments themselves.
        self.staged = direct and self.on_host and bool((self._local[:, :2] % BLOCK_NBYTES).any())
        #: By position: the open file; its trailer, once read or written; where it is made (set).
        self.descriptors = [-1] * count
        self.trailers = [b""] * count
        self.temporaries = [""] * count
        #: By position: the checksum that the page must have, where it is remembered (get).
        self.wanted = [b""] * count
        #: By position: True once its bytes are in the file (set).
        self.moved = [False] * count
        #: Positions of files that bypass the page cache.
        self.direct: set[int] = set()

    def views(self, position: int) -> list[memoryview]:
        """Give the segments of a page in host memory."""
        first = position * self.segments
        return self.buffers[first : first + self.segments]

    def checksums(self, positions: Sequence[int]) -> list[bytes]:
        """Give the checksum of each page as it lies in memory."""
        return checksums(self.buffers, self.segments, positions)

    def checksum(self, position: int, staged: memoryview | None) -> bytes:
        """Give the checksum of one page, as it lies in private blocks where it does."""
        return checksum(self.views(position) if staged is None else [staged[: self.nbytes]])

    def fill(self, positions: Sequence[int], status: Status) -> None:
        """Give pages one status."""
        for position in positions:
            self.statuses[position] = status

    def settle(self, positions: Iterable[int]) -> None:
        """Say of pages that no lane came to why that is."""
        if Status.SKIPPED in self.statuses:
            for position in positions:
                if self.statuses[position] is Status.SKIPPED:
                    self.statuses[position] = self.trouble

    def skipped(self, positions: Sequence[int]) -> Sequence[int]:
        """Give those of which nothing is known yet."""
        statuses = self.statuses
        return [position for position in positions if statuses[position] is Status.SKIPPED]

    def ranges(self, positions: Sequence[int], numbers: Sequence[int]) -> Ranges:
        """Say what a transfer between slots and files moves, the files by descriptor or number."""
        count, segments = len(positions), self.segments
        first, last = positions[0], positions[-1]
        if last - first == count - 1 and positions[count // 2] == first + count // 2:
            local = self._local[first * segments : (last + 1) * segments]
        else:
            local = self._local.reshape(-1, segments, 3)[list(positions)].reshape(-1, 3)
        remote = np.empty_like(local)
        sizes = local[:segments, 1]
        if segments == 1:
            remote[:, 0], remote[:, 2] = 0, numbers
        else:
            remote[:, 0] = np.tile(np.cumsum(sizes) - sizes, count)
            remote[:, 2] = np.repeat(np.asarray(numbers, np.uint64), segments)
        remote[:, 1] = local[:, 1]
        return Ranges(local, remote)

    def staged_ranges(self, positions: Sequence[int], address: int) -> Ranges:
        """Say the same where pages whose files bypass the page cache lie in private blocks."""
        local, remote = [], []
        stride = rounded(self.nbytes)
        for slot, position in enumerate(positions):
            descriptor = self.descriptors[position]
            if position in self.direct:
                local.append((address + slot * stride, stride, 0))
                remote.append((0, stride, descriptor))
            else:
                alone = self.ranges([position], [descriptor])
                local += map(tuple, alone.local.tolist())
                remote += map(tuple, alone.remote.tolist())
        return Ranges(*(np.array(rows, np.uint64) for rows in (local, remote)))

    def copy_in(self, position: int, private: memoryview) -> None:
        """Copy a page into private blocks, zeros behind it."""
        at = 0
        for view in self.views(position):
            private[at : at + view.nbytes] = view
            at += view.nbytes
        private[at:] = bytes(rounded(at) - at)

    def copy_out(self, position: int, private: memoryview) -> None:
        """Copy a page out of private blocks into its slot."""
        at = 0
        for view in self.views(position):
            view[:] = private[at : at + view.nbytes]
            at += view.nbytes
