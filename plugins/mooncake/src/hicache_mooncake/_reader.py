"""Getting pages: what each code means, and what is worth asking again.

Mooncake's answer to a get is the object's size, so only the expected size is OK;
SGLang's own class takes any positive count for a hit. A slot of another size is
met with -600 or, in multi-buffer calls, -800, which also stands for a dead owner:
there the size decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hicache_core import Pages, Status
from hicache_mooncake import _native
from hicache_mooncake._checksum import TRAILER_NBYTES, Trailers
from hicache_mooncake._client import MAX_BUFFERS, Client, Names, whole
from hicache_mooncake._known import LOST_S, KnownKeys
from hicache_mooncake._native import NO_ANSWER, STATUS_OF_CODE
from hicache_mooncake._remover import TOMBSTONES

OK, ERROR = Status.OK, Status.ERROR

#: A transfer that failed this quickly met a connection that had gone stale, or an object that was just being
#: removed and set anew; the next one may go well.
_QUICK_S = 0.5
_QUICK_PAUSES_S = (0.0, 0.002, 0.005, 0.01)
#: Into how many parts a batch is cut that moved more slowly than its leases last.
_PARTS = 4
#: How long a get waits for a page that another client is writing at this moment, and how often it looks.
_PENDING_S = 1.0
_PENDING_PAUSES_S = (0.002, 0.005, 0.01, 0.02)
_LONGEST_PAUSE_S = 0.05
#: How long a removal that was met half-way is believed to go on; one whose process died goes on for ever.
_REMOVAL_S = 2.0


class Reader:
    """Reads objects of one namespace; thread-safe."""

    def __init__(
        self, client: Client, names: Names, known: KnownKeys, trailers: Trailers | None, timeout_s: float
    ) -> None:
        self._client = client
        self._names = names
        self._known = known
        self._trailers = trailers
        self._timeout_s = timeout_s
        self._usual = (names.prefix, client.native.batch_get_into, client.lifeline.holds, known)
        self._pending_s = min(_PENDING_S, 0.5 * timeout_s)

    def read(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        """Read objects into their slots; keys may be repeated.

        The usual case stands here, in one place: after a transfer everything is cold, and each function
        entered costs half a microsecond of the 18 that 128 pages of 64 KiB have to spend.
        """
        prefix, get_into, holds, known = self._usual
        pool, count = locs.pool, len(keys)
        if pool is None or known.trouble or count > MAX_BUFFERS or len(pool.segments) != 1 or not holds():
            return self._get_with_care(keys, locs)
        names = [prefix + key for key in keys]
        if len(set(keys)) != count or self._trailers is not None:
            return self._get_with_care(keys, locs)
        addresses, sizes = locs.addresses()
        started = time.monotonic()
        codes: list[int] = get_into(names, addresses, sizes)
        if codes == sizes:
            return [OK] * count
        return self._settled(keys, names, locs, None, whole(codes, count), started)

    def _get_with_care(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        """Get each key once, whatever is known of it, and copy pages that are asked for more than once.

        Of repeated names the library fills one slot, the last, and reports all of them as read.
        """
        first: dict[str, int] = {}
        for position, key in enumerate(keys):
            first.setdefault(key, position)
        if len(first) == len(keys):
            return self._get_distinct(keys, locs)
        statuses = self._get_distinct(list(first), locs.take(list(first.values())))
        found = dict(zip(first, statuses, strict=True))
        for position, key in enumerate(keys):
            if found[key] is OK and position != first[key]:
                for target, filled in zip(locs.views(position), locs.views(first[key]), strict=True):
                    target[:] = filled
        return [found[key] for key in keys]

    def _get_distinct(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        lost = {i for i, status in self._known.bad(keys).items() if status is ERROR}
        if lost:
            return self._get_rest(keys, locs, lost)
        names = self._names.of(keys)
        started = time.monotonic()
        if self._trailers is None:
            codes = self._client.get(names, locs, None)
            return self._settled(keys, names, locs, None, codes, started)
        with self._trailers.lent(len(keys)) as trailers:
            codes = self._client.get(names, locs, trailers)
            statuses = self._settled(keys, names, locs, trailers, codes, started)
            for position, status in enumerate(statuses):
                if status is OK and not self._trailers.fits(position, names[position], locs, trailers):
                    statuses[position] = Status.CORRUPT
                    self._known.note_bad(keys[position], Status.CORRUPT)
            return statuses

    def _get_rest(self, keys: Sequence[str], locs: Pages, lost: set[int]) -> list[Status]:
        """Get all but the pages of dead owners: asking again would cost up to a second for each batch."""
        statuses = [ERROR] * len(keys)
        asked = [i for i in range(len(keys)) if i not in lost]
        if asked:
            found = self._get_distinct([keys[i] for i in asked], locs.take(asked))
            for position, status in zip(asked, found, strict=True):
                statuses[position] = status
        return statuses

    def _settled(
        self,
        keys: Sequence[str],
        names: Sequence[str],
        locs: Pages,
        trailers: Pages | None,
        codes: list[int],
        started: float,
    ) -> list[Status]:
        wanted = locs.nbytes + (TRAILER_NBYTES if trailers is not None else 0)
        if codes != [wanted] * len(codes):
            self._again(keys, names, locs, trailers, codes, started)
        statuses = self._settle(keys, names, codes, wanted)
        self._known.note_good(key for key, status in zip(keys, statuses, strict=True) if status is OK)
        return statuses

    def _again(
        self,
        keys: Sequence[str],
        names: Sequence[str],
        locs: Pages,
        trailers: Pages | None,
        codes: list[int],
        started: float,
    ) -> None:
        """Ask again for what may go better now; corrects ``codes`` in place."""

        def ask(positions: list[int]) -> None:
            part = trailers.take(positions) if trailers is not None else None
            fresh = self._client.get([names[i] for i in positions], locs.take(positions), part)
            for position, code in zip(positions, fresh, strict=True):
                codes[position] = code

        for pause_s in _QUICK_PAUSES_S:
            stale = _where(codes, _native.TRANSFER_FAIL)
            if not stale or time.monotonic() - started > _QUICK_S:
                break
            time.sleep(pause_s)
            ask(stale)
        self._ask_in_parts(codes, ask, started + self._timeout_s)
        given_up = self._known.unfinished(keys)  # waited for in vain a moment ago
        pauses = iter(_PENDING_PAUSES_S)
        while time.monotonic() - started < self._pending_s:
            pending = [i for i in _where(codes, _native.REPLICA_IS_NOT_READY) if i not in given_up]
            if not pending:
                return
            time.sleep(next(pauses, _LONGEST_PAUSE_S))
            ask(pending)

    def _ask_in_parts(self, codes: list[int], ask: Callable[[list[int]], None], deadline: float) -> None:
        """Ask for pages whose lease ran out while the whole batch moved: a smaller one is done sooner."""
        while (expired := _where(codes, _native.LEASE_EXPIRED)) and time.monotonic() < deadline:
            size = max(1, len(expired) // _PARTS)
            for start in range(0, len(expired), size):
                if time.monotonic() < deadline:
                    ask(expired[start : start + size])

    def _settle(
        self, keys: Sequence[str], names: Sequence[str], codes: Sequence[int], wanted: int
    ) -> list[Status]:
        """Turn codes into statuses, and remember what must not be believed again."""
        sizes = self._sizes_where_unclear(names, codes)
        statuses = []
        for position, code in enumerate(codes):
            size = code if code >= 0 else sizes.get(position)
            status = _verdict(code, size, wanted)
            statuses.append(status)
            if size in TOMBSTONES:
                self._known.note_bad(keys[position], status, _REMOVAL_S)
            elif status is Status.SIZE_MISMATCH:
                self._known.note_bad(keys[position], status)
            elif code == _native.TRANSFER_FAIL and status is ERROR:
                self._known.note_bad(keys[position], status, LOST_S)
        self._known.note_absent(keys[i] for i in _where(codes, _native.OBJECT_NOT_FOUND))
        self._known.note_unfinished(keys[i] for i in _where(codes, _native.REPLICA_IS_NOT_READY))
        return statuses

    def _sizes_where_unclear(self, names: Sequence[str], codes: Sequence[int]) -> dict[int, int | None]:
        unclear = [i for i, c in enumerate(codes) if c in (_native.INVALID_PARAMS, _native.TRANSFER_FAIL)]
        if not unclear or NO_ANSWER & set(codes):
            return {}
        return dict(zip(unclear, self._client.sizes([names[i] for i in unclear]), strict=True))


def _verdict(code: int, size: int | None, wanted: int) -> Status:
    """Say what a code means, beside the size that the object has now: None where that was not asked."""
    if code == wanted:
        return OK
    if size in TOMBSTONES or (code < 0 and size == 0):
        return Status.MISS  # it is being removed, or has gone since
    if size is not None and size != wanted:
        return Status.SIZE_MISMATCH
    return STATUS_OF_CODE.get(code, ERROR)


def _where(codes: Sequence[int], code: int) -> list[int]:
    return [position for position, met in enumerate(codes) if met == code]
