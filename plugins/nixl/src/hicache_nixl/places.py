"""One batch on its way: where its pages lie in memory and in files, and what became of each.

    plain file         segments at their offsets
    O_DIRECT, aligned  the same
    O_DIRECT, odd      one run of private blocks; the page is copied in or out
    device memory      segments at their offsets

The trailer is written and read apart, by the file's own descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from hicache_core import Pages, Status
from hicache_nixl._native import Region
from hicache_nixl.agents import memory_kind
from hicache_nixl.trailer import BLOCK_NBYTES, rounded

#: Page size from which two threads that do the same gain more than the interpreter lock costs them.
WORTH_A_LANE_NBYTES = 256 << 10


class Moving:
    """A batch: what is moved, until when, and a status a page."""

    def __init__(
        self, keys: Sequence[str], paths: list[str], locs: Pages, deadline: float, *, direct: bool
    ) -> None:
        self.keys = keys
        self.paths = paths
        self.nbytes = locs.nbytes
        self.deadline = deadline
        self.statuses = [Status.SKIPPED] * len(keys)
        #: What became of pages that no lane came to.
        self.trouble = Status.TIMEOUT
        #: Makes the names of temporary files unique.
        self.token = os.urandom(8).hex()
        self.kind, self.device = memory_kind(locs.pool)
        self.on_host = self.kind == "DRAM"
        self.segments = locs.segments_per_page
        self.addresses, self.sizes = locs.addresses()
        self._buffers = locs.buffers() if self.on_host else []
        #: True where O_DIRECT cannot reach the segments themselves.
        self.staged = direct and self.on_host and not self._is_aligned()
        #: True where both lanes do all of a chunk; else the helper moves what the caller prepares.
        self.in_lanes = self.nbytes >= WORTH_A_LANE_NBYTES

    def views(self, position: int) -> list[memoryview]:
        """Give the segments of a page in host memory."""
        first = position * self.segments
        return self._buffers[first : first + self.segments]

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

    def describe(self, position: int, descriptor: int, local: list[Region], remote: list[Region]) -> None:
        """Append the pairs of memory and file ranges that make up a page."""
        first = position * self.segments
        if self.segments == 1:
            local.append((self.addresses[first], self.nbytes, self.device))
            remote.append((0, self.nbytes, descriptor))
            return
        offset = 0
        for index in range(first, first + self.segments):
            nbytes = self.sizes[index]
            local.append((self.addresses[index], nbytes, self.device))
            remote.append((offset, nbytes, descriptor))
            offset += nbytes

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

    def _is_aligned(self) -> bool:
        return not any((a | n) % BLOCK_NBYTES for a, n in zip(self.addresses, self.sizes, strict=True))


class OnePage:
    """One page of a batch and its open file."""

    __slots__ = ("descriptor", "direct", "moved", "path", "position", "temporary", "trailer")

    def __init__(self, position: int, path: str, descriptor: int) -> None:
        self.position = position
        self.path = path
        self.descriptor = descriptor
        #: True where the page cache is bypassed.
        self.direct = False
        #: True once the transfer of its bytes went well.
        self.moved = False
        #: What was read of the file's end (get).
        self.trailer = b""
        #: Where it is written (set).
        self.temporary = ""
