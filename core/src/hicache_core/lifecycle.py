"""A backend's life: a gate that verbs pass and close() shuts, and what a fork does to it.

Every backend needs the same three things (C12): verbs refused before open and
after close, a close that waits for running verbs up to a deadline, and an
instance that is closed in the child of a fork although some thread of the
parent held its lock at that moment. They are here so that no backend invents
them anew.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from types import TracebackType
from typing import Protocol

from hicache_core.errors import StorageClosed, StorageNotOpened

_NEW, _OPEN, _CLOSED = range(3)


class VerbGate:
    """Counts running verbs; ``with gate:`` around each one, or ``enter`` and ``leave``.

    Thread-safe; entering and leaving cost one uncontended lock each. A fork's
    child gets a new, shut gate.
    """

    __slots__ = ("_idle", "_lock", "_name", "_running", "_state")

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = _NEW
        self._running = 0
        #: Taken as a lock of C, not through the condition's own methods: those are two frames more a verb.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)

    def enter(self) -> bool:
        """Count a verb in; False when the gate is not open. Each True needs one ``leave``."""
        with self._lock:
            if self._state != _OPEN:
                return False
            self._running += 1
            return True

    def leave(self) -> None:
        """Count a verb out."""
        with self._lock:
            self._running -= 1
            if not self._running and self._state == _CLOSED:
                self._idle.notify_all()

    def __enter__(self) -> VerbGate:
        """Raise StorageNotOpened or StorageClosed unless open."""
        if not self.enter():
            raise self._refusal()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def check(self) -> None:
        """Raise unless open, without counting."""
        if self._state != _OPEN:
            raise self._refusal()

    def check_new(self) -> None:
        """Raise StorageClosed after close(); for the first lines of open()."""
        if self._state == _CLOSED:
            raise StorageClosed(self._name)

    def open(self) -> None:
        """Let verbs in."""
        with self._idle:
            if self._state == _CLOSED:
                raise StorageClosed(self._name)
            self._state = _OPEN

    def close(self, timeout_s: float) -> bool:
        """Refuse new verbs, wait for the running ones; False when some still run after timeout_s."""
        with self._idle:
            self._state = _CLOSED
            deadline = time.monotonic() + timeout_s
            while self._running > 0:  # below, in the child of a fork inside a verb
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    @property
    def is_open(self) -> bool:
        """True between open() and close()."""
        return self._state == _OPEN

    @property
    def is_closed(self) -> bool:
        """True after close()."""
        return self._state == _CLOSED

    @property
    def running(self) -> int:
        """How many verbs are inside."""
        return self._running

    def abandon_in_child(self) -> None:
        """Close without any lock: for the child of a fork, where a lock may be held by nobody."""
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._running = 0
        self._state = _CLOSED

    def _refusal(self) -> StorageClosed | StorageNotOpened:
        return StorageClosed(self._name) if self._state == _CLOSED else StorageNotOpened(self._name)


class ForkAware(Protocol):
    """Something that must not be used in the child of a fork."""

    def after_fork_in_child(self) -> None:
        """Become closed: take no Python lock, close lock descriptors, touch nothing shared."""


_watched: dict[int, weakref.ref[ForkAware]] = {}
_hooked = False


def close_in_child(instance: ForkAware) -> None:
    """Have ``instance.after_fork_in_child()`` called in every child forked from here on, while it lives.

    One process-wide handler serves all instances: os.register_at_fork has no
    way to take one back.
    """
    global _hooked
    if not _hooked:
        os.register_at_fork(after_in_child=_after_fork_in_child)
        _hooked = True
    key = id(instance)
    _watched[key] = weakref.ref(instance, lambda _: _watched.pop(key, None))


def _after_fork_in_child() -> None:
    for reference in list(_watched.values()):
        instance = reference()
        if instance is not None:
            try:
                instance.after_fork_in_child()
            except Exception:  # noqa: BLE001 - the others must be closed whatever this one does
                continue
    _watched.clear()
