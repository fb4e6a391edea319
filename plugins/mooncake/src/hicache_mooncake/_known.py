"""What this process has learnt about keys, so that the master need not be asked, or is not believed.

Hints with an expiry, and the keys being written at this moment:

- absent: the master said so a moment ago. A set of such keys asks nothing first.
- bad: a get has failed on the value. contains is not OK for it (C6), and a set replaces it (C4).
- unfinished: a put was begun and not ended, here or elsewhere. Mooncake answers
  another put with 0 and stores nothing, so a set of such a key makes sure.
- writers: two sets of one key in one process take turns. Mooncake answers the
  second with 0 while the first still moves bytes, which would make OK a lie (C3).

Batches come as sets where they can: set operations run in C on hashes that are
computed once, and a set of 128 pages has 50 us to spend.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from hicache_core import Status
from hicache_core.lifecycle import close_in_child

#: An engine asks for a prefix, computes what is missing, and stores it within this time, or twice it.
ABSENT_S = 20.0
#: Damage stays until somebody replaces the value; others may have done so after this time.
BAD_S = 30.0
#: The owner of a page is dead: its segment leaves the master after client_ttl, 10 s by default.
LOST_S = 12.0
#: The master discards a put that was never ended after 30 s (put_start_discard_timeout_sec), at the next put.
UNFINISHED_S = 60.0
#: Hints are dropped all at once beyond this number; they only save time, or cost a failed get.
MAX_KEYS = 1 << 17


class KnownKeys:
    """Hints of one instance, by key; thread-safe, since each step on a set or dictionary is atomic."""

    def __init__(self) -> None:
        self._absent: set[str] = set()
        self._absent_before: set[str] = set()
        self._absent_until = 0.0
        self._bad: dict[str, tuple[Status, float]] = {}
        self._unfinished: dict[str, float] = {}
        #: False where no key is bad or unfinished, as nearly always.
        self.trouble = False

    def note_absent(self, keys: Iterable[str]) -> None:
        """Remember that the master has no such object."""
        now = time.monotonic()
        if now > self._absent_until or len(self._absent) > MAX_KEYS:
            stale = now > self._absent_until + ABSENT_S
            self._absent_before = set() if stale else self._absent
            self._absent = set()
            self._absent_until = now + ABSENT_S
        self._absent.update(keys)

    def take_absent(self, keys: set[str]) -> bool:
        """Tell whether all these keys are known to be absent, and forget it: they are about to be set."""
        now, before = self._absent, self._absent_before
        fresh = time.monotonic() < self._absent_until
        known = fresh and (keys <= now or keys - now <= before)
        now -= keys
        if before:
            before -= keys
        return known

    def note_bad(self, key: str, status: Status, seconds: float = BAD_S) -> None:
        """Remember that a get failed on a key's value."""
        if len(self._bad) > MAX_KEYS:
            self._bad = {}
        self._bad[key] = (status, time.monotonic() + seconds)
        self.trouble = True

    def bad(self, keys: Sequence[str]) -> dict[int, Status]:
        """Give the positions of keys whose value is bad, and how."""
        table = self._bad
        if not table:
            return {}
        now = time.monotonic()
        found = {}
        for position, key in enumerate(keys):
            status, until = table.get(key, (Status.OK, 0.0))
            if until > now:
                found[position] = status
            elif until:
                table.pop(key, None)
        return found

    def note_unfinished(self, keys: Iterable[str]) -> None:
        """Remember that a put of these keys may hang in the master."""
        if len(self._unfinished) > MAX_KEYS:
            self._unfinished = {}
        self._unfinished.update(dict.fromkeys(keys, time.monotonic() + UNFINISHED_S))
        self.trouble = self.trouble or bool(self._unfinished)

    def unfinished(self, keys: Sequence[str]) -> set[int]:
        """Give the positions of such keys."""
        table = self._unfinished
        if not table:
            return set()
        now = time.monotonic()
        return {position for position, key in enumerate(keys) if table.get(key, 0.0) > now}

    def note_good(self, keys: Iterable[str]) -> None:
        """Forget what was wrong with keys: a whole value is there now."""
        if self.trouble:
            for key in keys:
                self._bad.pop(key, None)
                self._unfinished.pop(key, None)
            self.trouble = bool(self._bad or self._unfinished)

    def forget_bad(self, keys: Iterable[str]) -> None:
        """Forget what was wrong with values that are gone; a put that hangs goes on doing so."""
        if self._bad:
            for key in keys:
                self._bad.pop(key, None)

    def clear(self) -> None:
        """Forget what was known of values."""
        self._absent, self._absent_before = set(), set()
        self._bad = {}


class Writers:
    """Batches of one namespace that some thread of this process is setting; thread-safe.

    Batches and not keys: there are a handful at most, and usually none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._batches: list[set[str]] = []
        self._waiting = 0

    def claim(self, keys: set[str], deadline: float) -> bool | None:
        """Become the writer of all these keys.

        Returns: True when nobody else was writing any of them, False when it had
            to wait for somebody, None when that took longer than the deadline.
        """
        with self._lock:
            if not self._batches:
                self._batches.append(keys)
                return True
            alone = self._is_free(keys)
            self._waiting += not alone
            try:
                while not self._is_free(keys):
                    left = deadline - time.monotonic()
                    if left <= 0:
                        return None
                    self._changed.wait(left)
            finally:
                self._waiting -= not alone
            self._batches.append(keys)
            return alone

    def release(self, keys: set[str]) -> None:
        """Let others write them; ``keys`` is the set that was claimed."""
        with self._lock:
            self._batches.remove(keys)  # no other one is equal: they are disjoint
            if self._waiting:
                self._changed.notify_all()

    def _is_free(self, keys: set[str]) -> bool:
        return all(batch.isdisjoint(keys) for batch in self._batches)


class _AllWriters:
    """The process's writers by namespace: instances of one namespace write the same objects."""

    def __init__(self) -> None:
        self.of: dict[str, Writers] = {}

    def after_fork_in_child(self) -> None:
        """Start empty in a fork's child: the parent's threads hold nothing there."""
        self.of.clear()


_WRITERS = _AllWriters()
close_in_child(_WRITERS)


def writers_of(namespace: str) -> Writers:
    """Give the writers of a namespace."""
    return _WRITERS.of.setdefault(namespace, Writers())
