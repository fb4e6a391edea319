"""Setting pages: what is there already, what must be replaced, and what OK may be said of.

Mooncake's put answers 0 for a name that exists, whatever its size, and for one
that somebody is still writing. So keys that are not known to be absent are asked
for first; that also counts as the use that a set of a present page is (C15).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hicache_core import Pages, Status
from hicache_mooncake import _native
from hicache_mooncake._checksum import TRAILER_NBYTES, Trailers
from hicache_mooncake._client import Client
from hicache_mooncake._known import WRITERS, KnownKeys
from hicache_mooncake._native import NO_ANSWER, STATUS_OF_CODE

OK, ERROR = Status.OK, Status.ERROR

#: Eviction runs in the master's own time: one pause, then one retry.
_NO_SPACE_PAUSE_S = 0.2
#: A transfer that failed this quickly met a connection that had gone stale, and is tried once more.
_QUICK_S = 0.5


#: How long another client may take to finish a put before it is taken over, and how often that is looked at.
_PENDING_S = 1.0
_PENDING_PAUSE_S = 0.02


class Writer:
    """Writes objects of one client; thread-safe."""

    def __init__(self, client: Client, known: KnownKeys, trailers: Trailers | None, timeout_s: float) -> None:
        self._client = client
        self._known = known
        self._trailers = trailers
        self._timeout_s = timeout_s
        self._pending_s = min(_PENDING_S, 0.25 * timeout_s)

    def set(self, names: Sequence[str], locs: Pages) -> list[Status]:
        """Store slots under different names, unless a good value is there."""
        alone = WRITERS.claim(names, time.monotonic() + self._timeout_s)
        if alone is None:
            return [Status.TIMEOUT] * len(names)
        try:
            absent = self._known.take_absent(names)
            unfinished = self._known.unfinished(names)
            if alone and False not in absent and not unfinished and not self._known.bad(names):
                return self._store(names, locs, unfinished)
            return self._set_unknown(names, locs, unfinished)
        finally:
            WRITERS.release(names)

    def _set_unknown(self, names: Sequence[str], locs: Pages, unfinished: set[int]) -> list[Status]:
        """Ask which keys are there, replace what is bad, and store what is missing."""
        codes = self._client.exist(names)
        if min(codes) < 0:
            return [STATUS_OF_CODE.get(min(codes), ERROR)] * len(names)
        present = [i for i, code in enumerate(codes) if code == 1]
        replaced = self._replaceable(names, present, locs.nbytes)
        if replaced:
            self._client.remove([names[i] for i in sorted(replaced)])
        kept = set(present) - replaced
        self._known.forget_unfinished(names[i] for i in kept)
        statuses = [OK] * len(names)
        missing = [i for i in range(len(names)) if i not in kept]
        if missing:
            hang = {place for place, i in enumerate(missing) if i in unfinished}
            stored = self._store([names[i] for i in missing], locs.take(missing), hang)
            for position, status in zip(missing, stored, strict=True):
                statuses[position] = status
        return statuses

    def _replaceable(self, names: Sequence[str], present: Sequence[int], nbytes: int) -> set[int]:
        """Find values that a set replaces: those on which a get has failed, and those of another size."""
        bad = set(self._known.bad(names))
        unsure = [i for i in present if i not in bad]
        wanted = nbytes + (TRAILER_NBYTES if self._trailers is not None else 0)
        sizes = self._client.sizes([names[i] for i in unsure]) if unsure else []
        other = {i for i, size in zip(unsure, sizes, strict=True) if size is not None and size != wanted}
        return bad | other

    def _store(self, names: Sequence[str], locs: Pages, unfinished: set[int]) -> list[Status]:
        if self._trailers is None:
            codes = self._put(names, locs, None)
            self._finish(names, locs, None, codes, unfinished)
        else:
            with self._trailers.lent(len(names)) as trailers:
                self._trailers.seal(names, locs, trailers)
                codes = self._put(names, locs, trailers)
                self._finish(names, locs, trailers, codes, unfinished)
        if codes.count(0) == len(codes):
            self._known.forget_bad(names)
            return [OK] * len(names)
        self._known.forget_bad(name for name, code in zip(names, codes, strict=True) if code == 0)
        # The master may hold what the put began, and answer the next one with 0.
        self._known.note_unfinished(name for name, code in zip(names, codes, strict=True) if code < 0)
        return [OK if code == 0 else STATUS_OF_CODE.get(code, ERROR) for code in codes]

    def _finish(
        self,
        names: Sequence[str],
        locs: Pages,
        trailers: Pages | None,
        codes: list[int],
        unfinished: set[int],
    ) -> None:
        """Make sure of puts that may have been answered without storing; corrects ``codes`` in place.

        Whoever writes such an object is given time; then it is taken over.
        """
        unsure = [i for i in sorted(unfinished) if codes[i] == 0]
        started = time.monotonic()
        while unsure and not NO_ANSWER & set(codes):
            found = self._client.exist([names[i] for i in unsure])
            self._known.forget_unfinished(
                names[i] for i, there in zip(unsure, found, strict=True) if there == 1
            )
            unsure = [i for i, there in zip(unsure, found, strict=True) if there != 1]
            if time.monotonic() - started > self._pending_s:
                break
            if unsure:
                time.sleep(_PENDING_PAUSE_S)
        for i in unsure:
            part = trailers.take([i]) if trailers is not None else None
            codes[i] = self._client.replace(names[i], locs.take([i]), part)
            if codes[i] == 0:
                self._known.forget_unfinished([names[i]])

    def _put(self, names: Sequence[str], locs: Pages, trailers: Pages | None) -> list[int]:
        started = time.monotonic()
        codes = self._client.put(names, locs, trailers)
        if codes.count(0) == len(codes) or NO_ANSWER & set(codes):
            return codes
        quick = time.monotonic() - started < _QUICK_S
        full = _native.NO_AVAILABLE_HANDLE in codes
        worth = (
            {_native.NO_AVAILABLE_HANDLE, _native.TRANSFER_FAIL} if quick else {_native.NO_AVAILABLE_HANDLE}
        )
        again = [i for i, code in enumerate(codes) if code in worth]
        if again:
            if full:
                time.sleep(min(_NO_SPACE_PAUSE_S, 0.1 * self._timeout_s))
            part = trailers.take(again) if trailers is not None else None
            fresh = self._client.put([names[i] for i in again], locs.take(again), part)
            for position, code in zip(again, fresh, strict=True):
                codes[position] = code
        return codes
