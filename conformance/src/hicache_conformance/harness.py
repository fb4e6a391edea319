"""Harness: what the suite needs from the world around a backend, and how a plugin provides it.

The suite knows the contract; only a plugin's author knows how to start the
store, stop it in the middle of a call, or damage a value behind the backend's
back. A harness is that knowledge. It loads only when the suite runs (extra
``[check]``), so it may need whatever it likes.

The order of calls, all from one thread::

    harness = Harness(given)          # the user's --option values, maybe none
    harness.available()               # a reason why it cannot run here, or None
    harness.start()                   # a store of its own: empty, private, no fixed port
    harness.options()                 # what opens a storage on it, `given` included
    ... powers, only those named in `faults` ...
    harness.stop()                    # everything gone: processes, folders, shared memory

Rules. Every call returns within a bounded time and raises HarnessError with a
reason when it could not do what it says. Ports are free loopback ports. Servers
are children of this process, in its process group (the supervisor kills the
group of a check that hangs), ended by pid. Temporary folders come from
``tempfile``, so that a killed run leaves nothing behind.

A plugin derives from ``BaseHarness`` and overrides what it can do.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from hicache_core.errors import HiCacheError
from hicache_core.identity import Namespace

#: What ``faults`` may name. A power that is not named makes the cases that need it "unsupported".
Fault = Literal[
    "bounded",  # bounded(): an empty store of a given capacity
    "kill",  # kill(): the store's server dies at once
    "pause",  # pause(), resume(): the server stops answering and goes on later
    "restart",  # restart(): the server comes (back) up with what it keeps across restarts
    "second_process",  # second_process(): another process may open the same store
    "stored_bytes",  # stored_bytes(): read a value round the backend
    "store_bytes",  # store_bytes(): write a value round the backend
    "damage_flip",  # damage(..., "flip"): one bit of the value changes
    "damage_zero",  # damage(..., "zero"): the value's bytes become zero, its size stays
    "damage_truncate",  # damage(..., "truncate"): the value loses its last byte or more
    "damage_lose",  # damage(..., "lose"): the value is gone, whatever an index says
]

Damage = Literal["flip", "zero", "truncate", "lose"]


class HarnessError(HiCacheError):
    """The harness could not do what it was asked; the check is not run, rather than failed."""


class Harness(Protocol):
    """The world around one backend; see the module's text for the order of calls."""

    @property
    def faults(self) -> frozenset[str]:
        """Which powers work here and now; values of ``Fault``."""

    def available(self) -> str | None:
        """Give the reason why this cannot run on this machine (a library, a program is missing), or None."""

    def start(self) -> None:
        """Bring up an empty store and wait until it answers."""

    def stop(self) -> None:
        """Take everything down, in whatever state it is; idempotent."""

    def options(self) -> dict[str, Any]:
        """Give the options that open a storage on the store, the user's included."""

    def bounded(self, capacity: int) -> dict[str, Any]:
        """Make an empty store of about this many bytes and give the options that open it.

        The suite learns the true capacity from ``usage()``. It may take the
        place of the store that start() made; the suite calls stop() and start()
        when it is done with it.
        """

    def kill(self) -> None:
        """End the server as by kill -9; return once it is dead."""

    def pause(self) -> None:
        """Make the server stop answering with connections left open (SIGSTOP, a black-holed port)."""

    def resume(self) -> None:
        """End a pause; harmless when there is none."""

    def restart(self) -> None:
        """Bring the server back, after kill() or in good order, under the same options; wait for it."""

    def second_process(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start ``command`` with stdin, stdout and stderr as pipes, in whatever environment clients need."""

    def stored_bytes(self, namespace: Namespace, key: str) -> bytes | None:
        """Read what the store holds under a key, without the backend's code; None where it holds nothing."""

    def store_bytes(self, namespace: Namespace, key: str, value: bytes) -> None:
        """Put a value under a key, without the backend's code, as an intact value of this size."""

    def damage(self, namespace: Namespace, key: str, how: Damage) -> None:
        """Damage the stored value of a key behind the backend's back."""


class BaseHarness:
    """Defaults for a store that lives inside the process: no server, no powers.

    A subclass sets ``faults`` and overrides the powers it names there.
    """

    faults: frozenset[str] = frozenset()

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        """Keep the user's options, for ``options()``; do nothing yet."""
        self.given: dict[str, Any] = dict(given or {})

    def available(self) -> str | None:
        return None

    def start(self) -> None:
        return None

    def stop(self) -> None:
        return None

    def options(self) -> dict[str, Any]:
        return dict(self.given)

    def bounded(self, capacity: int) -> dict[str, Any]:
        raise self._cannot("bounded")

    def kill(self) -> None:
        raise self._cannot("kill")

    def pause(self) -> None:
        raise self._cannot("pause")

    def resume(self) -> None:
        return None

    def restart(self) -> None:
        raise self._cannot("restart")

    def second_process(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def stored_bytes(self, namespace: Namespace, key: str) -> bytes | None:
        raise self._cannot("stored_bytes")

    def store_bytes(self, namespace: Namespace, key: str, value: bytes) -> None:
        raise self._cannot("store_bytes")

    def damage(self, namespace: Namespace, key: str, how: Damage) -> None:
        raise self._cannot(f"damage_{how}")

    def _cannot(self, fault: str) -> HarnessError:
        return HarnessError(
            f"{type(self).__name__} cannot '{fault}'",
            remedy="Override the method, or leave the power out of `faults`.",
        )
