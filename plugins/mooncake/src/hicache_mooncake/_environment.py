"""The variables that Mooncake reads from its environment, set for it alone.

Mooncake takes its time-outs from ``MC_*`` variables, some at import, some when a
client is set up. A backend may not change the process's environment (C16), so
they are written to the C library's copy only, around those two moments, and put
back. ``os.environ`` and what children inherit from it never change.

One of them, MC_TCP_PROGRESS_TIMEOUT_SEC, is read when bytes first move. It stays in
the C library's copy for as long as some client is open (``lasting``).

A variable that the user has set stands, unless the options name it in ``extra``.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_lock = threading.RLock()
_libc = ctypes.CDLL(None)
_libc.getenv.restype = ctypes.c_char_p


@contextmanager
def native_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let native code see these variables inside the block; one block at a time in a process."""
    with _lock:
        before = {name: _libc.getenv(name.encode()) for name in variables}
        try:
            for name, value in variables.items():
                _libc.setenv(name.encode(), value.encode(), 1)
            yield
        finally:
            _put_back(before)


class Lasting:
    """Variables that native code may read at any time while a client is open; thread-safe."""

    def __init__(self) -> None:
        # Not the lock of a block above: that one may be held by a setup() that hangs.
        self._lock = threading.Lock()
        self._holders = 0
        self._before: dict[str, bytes | None] = {}

    def hold(self, variables: Mapping[str, str]) -> None:
        """Set them unless another client has done so already."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                self._before = {name: _libc.getenv(name.encode()) for name in variables}
                for name, value in variables.items():
                    _libc.setenv(name.encode(), value.encode(), 1)

    def release(self) -> None:
        """Put everything back with the last client."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                _put_back(self._before)


#: One for the process, as the environment is.
LASTING = Lasting()


def _put_back(before: Mapping[str, bytes | None]) -> None:
    for name, old in before.items():
        if old is None:
            _libc.unsetenv(name.encode())
        else:
            _libc.setenv(name.encode(), old, 1)


def variables_of(derived: Mapping[str, str], explicit: Mapping[str, object]) -> dict[str, str]:
    """Choose what to set: explicit ``MC_*`` entries always, derived ones where the user has set none."""
    chosen = {name: value for name, value in derived.items() if name not in os.environ}
    return chosen | {name: _text(value) for name, value in explicit.items() if name.startswith("MC_")}


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
