"""Which memory is registered with Mooncake, and for which pools.

Mooncake refuses a range that overlaps a registered one with -600, and pools do
overlap: head groups and layer ranges lie interleaved in the same memory. So a
pool adds only what is not covered yet, and a range goes when its last pool does.

Pure bookkeeping: it says what to register, its owner does so under one lock.
"""

from __future__ import annotations

from collections.abc import Iterable

from hicache_core import HostPool

Range = tuple[int, int]
"""First byte and end of a range."""


class Regions:
    """Registered ranges and the pools that use each."""

    def __init__(self) -> None:
        self._users: dict[Range, set[int]] = {}
        #: Keeps the memory alive for as long as it is registered, whoever else lets go of it.
        self._pools: dict[int, HostPool] = {}

    def __contains__(self, pool: HostPool) -> bool:
        return id(pool) in self._pools

    def missing(self, pools: Iterable[HostPool]) -> list[Range]:
        """Give the ranges that these pools need and nothing has registered."""
        wanted = _joined((start, start + nbytes) for pool in pools for start, nbytes in pool.regions())
        gaps: list[Range] = []
        for start, end in wanted:
            for low, high in sorted(self._users):
                if high <= start or end <= low:
                    continue
                if start < low:
                    gaps.append((start, low))
                start = max(start, high)
            if start < end:
                gaps.append((start, end))
        return gaps

    def add(self, pool: HostPool, registered: Iterable[Range]) -> None:
        """Note newly registered ranges and that this pool uses all that it touches."""
        for added in registered:
            self._users.setdefault(added, set())
        self._pools[id(pool)] = pool
        for start, nbytes in pool.regions():
            for (low, high), users in self._users.items():
                if low < start + nbytes and start < high:
                    users.add(id(pool))

    def drop(self, pool: HostPool) -> list[Range]:
        """Forget a pool; give the ranges that nobody uses any more."""
        self._pools.pop(id(pool), None)
        for users in self._users.values():
            users.discard(id(pool))
        unused = [each for each, users in self._users.items() if not users]
        for each in unused:
            del self._users[each]
        return unused

    def straddled(self, pool: HostPool) -> int | None:
        """Give an address at which a segment of this pool passes from one range into the next, if any.

        RDMA cannot move such a segment: each range is a memory region of its own.
        """
        for boundary in sorted(high for _, high in self._users):
            for segment in pool.segments:
                offset = boundary - segment.address
                page = offset // segment.stride if segment.stride else 0
                if 0 <= page < pool.num_pages and 0 < offset - page * segment.stride < segment.nbytes:
                    return boundary
        return None

    def ranges(self) -> list[Range]:
        """Give all registered ranges in order."""
        return sorted(self._users)


def _joined(ranges: Iterable[Range]) -> list[Range]:
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
