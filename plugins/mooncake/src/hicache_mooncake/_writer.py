"""Setting pages: what is there already, what must be replaced, and what OK may be said of.

Mooncake's put answers 0 for a name that exists, whatever its size, and for one
that somebody is still writing. So keys that are not known to be absent are asked
for first; that also counts as the use that a set of a present page is.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from hicache_core import Pages, Status
from hicache_mooncake import _native
from hicache_mooncake._checksum import TRAILER_NBYTES, Trailers
from hicache_mooncake._client import MAX_BUFFERS, Client, Names, whole
from hicache_mooncake._known import KnownKeys, writers_of
from hicache_mooncake._native import NO_ANSWER, OBJECT_NOT_FOUND, REPLICA_IS_NOT_READY, STATUS_OF_CODE
from hicache_mooncake._remover import Remover

OK, ERROR = Status.OK, Status.ERROR

#: Eviction runs in the master's own time: one pause, then one retry.
_NO_SPACE_PAUSE_S = 0.2
#: A transfer that failed this quickly met a connection that had gone stale, and is tried once more.
_QUICK_S = 0.5
#: How long another client may take to finish a put before it is taken over, and how often that is looked at.
_PENDING_S = 1.0
_PENDING_PAUSE_S = 0.02


class Writer:
    """Writes objects of one namespace; thread-safe."""

    def __init__(
        self,
        client: Client,
        names: Names,
        known: KnownKeys,
        trailers: Trailers | None,
        timeout_s: float,
        remover: Remover,
    ) -> None:
        self._client = client
        self._remover = remover
        self._names = names
        self._known = known
        self._trailers = trailers
        self._timeout_s = timeout_s
        self._pending_s = min(_PENDING_S, 0.25 * timeout_s)
        self._holds = client.lifeline.holds
        self._put_from = client.native.batch_put_from
        self._replication = client.replication
        self._writers = writers_of(names.prefix)

    def write(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        """Store slots, unless a good value is there; of a repeated key the first one."""
        key_set = set(keys)
        if len(key_set) != len(keys):
            return self._set_first_of_each(keys, locs)
        alone = self._writers.claim(key_set, time.monotonic() + self._timeout_s)
        if alone is None:
            return [Status.TIMEOUT] * len(keys)
        try:
            absent = self._known.take_absent(key_set)
            if alone and absent and not self._known.trouble:
                return self._store(keys, locs, (), self._names.of(keys))
            return self._set_unknown(keys, locs)
        finally:
            self._writers.release(key_set)

    def _set_first_of_each(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        first: dict[str, int] = {}
        for position, key in enumerate(keys):
            first.setdefault(key, position)
        statuses = self.write(list(first), locs.take(list(first.values())))
        found = dict(zip(first, statuses, strict=True))
        return [found[key] for key in keys]

    def _set_unknown(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        """Ask which keys are there, replace what is bad, and store what is missing."""
        names = self._names.of(keys)
        codes = self._client.exist(names)
        if codes.count(0) == len(codes):
            return self._store(keys, locs, self._known.unfinished(keys), names)
        if min(codes) < 0:
            return [STATUS_OF_CODE.get(min(codes), ERROR)] * len(keys)
        present = [i for i, code in enumerate(codes) if code == 1]
        replaced = sorted(self._replaceable(keys, present, locs.nbytes))
        stuck, unfinished = self._cleared_away(keys, replaced) if replaced else ({}, set())
        kept = set(present).difference(replaced)
        self._known.note_good(keys[i] for i in kept)
        statuses = [stuck.get(i, OK) for i in range(len(keys))]
        missing = [i for i in range(len(keys)) if i not in kept and i not in stuck]
        if missing:
            unfinished |= self._known.unfinished(keys)
            hang = {place for place, i in enumerate(missing) if i in unfinished}
            part = [names[i] for i in missing]
            stored = self._store([keys[i] for i in missing], locs.take(missing), hang, part)
            for position, status in zip(missing, stored, strict=True):
                statuses[position] = status
        return statuses

    def _cleared_away(
        self, keys: Sequence[str], positions: Sequence[int]
    ) -> tuple[dict[int, Status], set[int]]:
        """Remove what a set replaces; tell what cannot be removed, and what somebody is writing just now."""
        codes = self._remover.remove(self._names.of([keys[i] for i in positions]))
        found = dict(zip(positions, codes, strict=True))
        gone = (0, OBJECT_NOT_FOUND, REPLICA_IS_NOT_READY)
        stuck = {i: STATUS_OF_CODE.get(code, ERROR) for i, code in found.items() if code not in gone}
        return stuck, {i for i, code in found.items() if code == REPLICA_IS_NOT_READY}

    def _replaceable(self, keys: Sequence[str], present: Sequence[int], nbytes: int) -> set[int]:
        """Find values that a set replaces: those on which a get has failed, and those of another size."""
        bad = set(self._known.bad(keys)) & set(present)
        unsure = [i for i in present if i not in bad]
        wanted = nbytes + (TRAILER_NBYTES if self._trailers is not None else 0)
        sizes = self._client.sizes(self._names.of([keys[i] for i in unsure])) if unsure else []
        other = {i for i, size in zip(unsure, sizes, strict=True) if size is not None and size != wanted}
        return bad | other

    def _store(
        self, keys: Sequence[str], locs: Pages, unfinished: Collection[int], names: Sequence[str]
    ) -> list[Status]:
        """Put pages; the usual case stands here, in one place, as in Reader.read."""
        trailers, count = self._trailers, len(keys)
        started = time.monotonic()
        if trailers is not None:
            with trailers.lent(count) as tails:
                trailers.seal(names, locs, tails)
                codes = self._client.put(names, locs, tails)
                self._finish(names, locs, tails, codes, unfinished, started)
        elif locs.segments_per_page == 1 and count <= MAX_BUFFERS and self._holds():
            codes = self._put_from(names, *locs.addresses(), self._replication)
            if codes.count(0) == count and not self._known.trouble:
                return [OK] * count
            codes = whole(codes, count)
            self._finish(names, locs, None, codes, unfinished, started)
        else:
            codes = self._client.put(names, locs, None)
            self._finish(names, locs, None, codes, unfinished, started)
        self._known.note_good(key for key, code in zip(keys, codes, strict=True) if code == 0)
        # The master may hold what the put began, and answer the next one with 0.
        self._known.note_unfinished(key for key, code in zip(keys, codes, strict=True) if code < 0)
        return [OK if code == 0 else STATUS_OF_CODE.get(code, ERROR) for code in codes]

    def _finish(
        self,
        names: Sequence[str],
        locs: Pages,
        trailers: Pages | None,
        codes: list[int],
        unfinished: Collection[int],
        started: float,
    ) -> None:
        """Try again what may go better now, and make sure of what may not be there; corrects ``codes``."""
        if codes.count(0) != len(codes) and not NO_ANSWER & set(codes):
            self._try_again(names, locs, trailers, codes, started)
        if unfinished:
            self._make_sure(names, locs, trailers, codes, unfinished)

    def _try_again(
        self, names: Sequence[str], locs: Pages, trailers: Pages | None, codes: list[int], started: float
    ) -> None:
        worth = {_native.NO_AVAILABLE_HANDLE}
        if time.monotonic() - started < _QUICK_S:
            worth.add(_native.TRANSFER_FAIL)
        again = [i for i, code in enumerate(codes) if code in worth]
        if not again:
            return
        if _native.NO_AVAILABLE_HANDLE in codes:
            time.sleep(min(_NO_SPACE_PAUSE_S, 0.1 * self._timeout_s))
        part = trailers.take(again) if trailers is not None else None
        fresh = self._client.put([names[i] for i in again], locs.take(again), part)
        for position, code in zip(again, fresh, strict=True):
            codes[position] = code

    def _make_sure(
        self,
        names: Sequence[str],
        locs: Pages,
        trailers: Pages | None,
        codes: list[int],
        unfinished: Collection[int],
    ) -> None:
        """Make sure of puts that may have been answered without storing; corrects ``codes`` in place.

        Whoever writes such an object is given time; then it is taken over.
        """
        unsure = [i for i in sorted(unfinished) if codes[i] == 0]
        started = time.monotonic()
        while unsure:
            found = self._client.exist([names[i] for i in unsure])
            if NO_ANSWER & set(found):
                for i, code in zip(unsure, found, strict=True):
                    codes[i] = min(code, 0)
                return
            unsure = [i for i, there in zip(unsure, found, strict=True) if there != 1]
            if time.monotonic() - started > self._pending_s:
                break
            if unsure:
                time.sleep(_PENDING_PAUSE_S)
        if unsure:
            self._take_over(names, locs, trailers, codes, unsure)

    def _take_over(
        self,
        names: Sequence[str],
        locs: Pages,
        trailers: Pages | None,
        codes: list[int],
        positions: Sequence[int],
    ) -> None:
        """Store in the place of puts that do not end; corrects ``codes`` in place."""
        part = [names[i] for i in positions]
        self._remover.take_over(part)
        tails = trailers.take(positions) if trailers is not None else None
        fresh = self._client.put(part, locs.take(positions), tails)
        there = self._client.exist(part)  # somebody else may have begun once more
        for i, code, found in zip(positions, fresh, there, strict=True):
            codes[i] = code or (0 if found == 1 else min(found, -1))
