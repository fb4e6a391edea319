"""Taking objects away without pulling memory from under a reader.

A get reads an object's memory as long as its lease lasts, in whatever process. A
forced removal frees that memory at once, the next put fills it, and the reader is
told OK over another page's bytes (C2). Unforced, the library refuses leased objects.

So nothing is ever forced. A leased object is overwritten by a tombstone of another
size: the master then keeps the old memory out of use for a while
(put_start_release_timeout_sec, 600 s by default, longer than any lease). Nobody has
a lease on the tombstone, so that it can be removed; whoever reads it in between is
told another size and knows it for what it is.

Source: ``MasterService::UpsertStart``, case C, and 0.3.13.post1 as met.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import cycle

from hicache_mooncake._client import Client
from hicache_mooncake._native import NO_ANSWER, OBJECT_HAS_LEASE, OBJECT_NOT_FOUND, REPLICA_IS_NOT_READY

#: Bytes of a tombstone, odd and few, as of no page. Two sizes, since one of the same size is written in place
#: and keeps the lease that somebody has taken on it meanwhile.
TOMBSTONES = (7, 9)
#: Names a native call.
_PART = 4096
#: From the second attempt on: somebody keeps asking for the tombstones.
_PAUSE_S = 0.005


class Remover:
    """Removes objects of one client; thread-safe."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove objects, leased ones too: 0, or a negative code; OBJECT_HAS_LEASE where time ran out."""
        deadline = time.monotonic() + self._timeout_s
        codes: list[int] = []
        for start in range(0, len(names), _PART):
            part = names[start : start + _PART]
            codes += self._settled(part, self._client.remove(part), deadline)
        return codes

    def take_over(self, names: Sequence[str]) -> None:
        """Remove objects of which a put may be under way in some process; that one then fails."""
        deadline = time.monotonic() + self._timeout_s
        self._client.overwrite(names, TOMBSTONES[0])
        self._settled(names, self._client.remove(names), deadline)

    def _settled(self, names: Sequence[str], codes: list[int], deadline: float) -> list[int]:
        """Bury what is leased until it is gone."""
        buried: set[int] = set()
        for attempt, nbytes in enumerate(cycle(TOMBSTONES)):
            # Of two that bury one object, the second finds the first one's tombstone half-written.
            left = [i for i, code in enumerate(codes) if code == OBJECT_HAS_LEASE or _half(i, code, buried)]
            if not left or NO_ANSWER & set(codes) or time.monotonic() > deadline:
                return codes
            if attempt:
                time.sleep(_PAUSE_S)
            part = [names[i] for i in left]
            self._client.overwrite(part, nbytes)
            buried.update(left)
            for i, code in zip(left, self._client.remove(part), strict=True):
                # What could not be overwritten for want of room is gone all the same.
                codes[i] = 0 if code == OBJECT_NOT_FOUND else code
        return codes


def _half(position: int, code: int, buried: set[int]) -> bool:
    return code == REPLICA_IS_NOT_READY and position in buried
