"""MemoryHarness: runs the suite against a memory server of its own.

It starts ``python -m hicache_conformance.memory.server`` on a Unix socket in a
temporary folder, with a journal, in about 0.2 s. The option ``eviction`` is
the server's. Beside the served store, ``store=NAME`` given by the user runs the
suite against a store inside the process, where only damage can be done.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache_conformance.harness import BaseHarness, Damage, HarnessError
from hicache_conformance.memory.client import RemoteStore
from hicache_conformance.memory.options import MemoryOptions
from hicache_conformance.memory.storage import store_of_this_process
from hicache_conformance.memory.store import Store
from hicache_core import BackendUnavailable, Namespace

#: Time for an interpreter to start and bind a socket, on a machine that is busy.
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0

_IN_PROCESS = ("bounded", "stored_bytes", "store_bytes")
_DAMAGES = ("damage_flip", "damage_zero", "damage_truncate", "damage_lose")
_SERVED = ("kill", "pause", "restart", "second_process")


class MemoryHarness(BaseHarness):
    """One server process, or one store of this process; ``store_class`` is for mutants."""

    store_class = "hicache_conformance.memory.store:Store"

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        self._served = "store" not in self.given
        self.faults = frozenset((*_IN_PROCESS, *_DAMAGES, *(_SERVED if self._served else ())))
        self._folder: Path | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._capacity: int | None = None
        self._generation = 0
        self._back_door: Store | RemoteStore | None = None

    def start(self) -> None:
        # A socket's path has room for 107 bytes (unix(7)), which a nested temporary folder can exceed.
        short = None if len(tempfile.gettempdir()) < 70 else "/tmp"
        self._folder = Path(tempfile.mkdtemp(prefix="hicache-memory-", dir=short))
        self._boot()

    def stop(self) -> None:
        self._halt()
        if isinstance(self._back_door, RemoteStore):
            self._back_door.close()
        self._back_door = None
        self._capacity = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def options(self) -> dict[str, Any]:
        if not self._served:
            return dict(self.given)
        own = {name: value for name, value in self.given.items() if name not in ("eviction", "capacity")}
        return own | {"server": str(self._socket())}

    def bounded(self, capacity: int) -> dict[str, Any]:
        if not self._served:
            self._generation += 1
            fresh = {"store": f"{self.given['store']}-bounded-{self._generation}", "capacity": capacity}
            return dict(self.given) | fresh
        self._halt()
        self._capacity = capacity
        self._generation += 1
        self._boot()
        return self.options()

    def kill(self) -> None:
        self._halt()

    def pause(self) -> None:
        self._running().send_signal(signal.SIGSTOP)
        self._await_state("T", _STOP_TIMEOUT_S)

    def resume(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self._halt()
        self._boot()

    def stored_bytes(self, namespace: Namespace, key: str) -> bytes | None:
        return self._round_the_back().peek(namespace.id, key)

    def store_bytes(self, namespace: Namespace, key: str, value: bytes) -> None:
        self._round_the_back().poke(namespace.id, key, value, intact=True)

    def damage(self, namespace: Namespace, key: str, how: Damage) -> None:
        store = self._round_the_back()
        value = store.peek(namespace.id, key)
        if value is None:
            raise HarnessError(f"no value to damage under '{key}'")
        damaged = {
            "flip": bytes([value[0] ^ 1]) + value[1:],
            "zero": bytes(len(value)),
            "truncate": value[:-1],
            "lose": None,
        }[how]
        store.poke(namespace.id, key, damaged, intact=False)

    def _round_the_back(self) -> Store | RemoteStore:
        if self._back_door is None and self._served:
            self._back_door = RemoteStore(self._socket(), _STOP_TIMEOUT_S)
        elif self._back_door is None:
            self._back_door = store_of_this_process(MemoryOptions(**self.given))
        return self._back_door

    def _socket(self) -> Path:
        if self._folder is None:
            raise HarnessError("the memory server has not been started", remedy="Call start() first.")
        return self._folder / "socket"

    def _boot(self) -> None:
        if not self._served:
            return
        path = self._socket()
        command = [sys.executable, "-m", "hicache_conformance.memory.server", str(path)]
        command += [
            "--store",
            self.store_class,
            "--journal",
            str(path.with_name(f"journal-{self._generation}")),
        ]
        command += ["--eviction", str(self.given.get("eviction", "lru"))]
        command += ["--capacity", str(self._capacity)] if self._capacity else []
        # stdin is the leash: the server ends when this process does, however that happens.
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            store = RemoteStore(path, 1.0)
            try:
                store.hello()
            except BackendUnavailable as error:
                if self._server.poll() is not None or time.monotonic() > deadline:
                    raise HarnessError("the memory server did not start", value=str(error)) from error
                time.sleep(0.01)
            else:
                store.close()
                return

    def _running(self) -> subprocess.Popen[bytes]:
        if self._server is None or self._server.poll() is not None:
            raise HarnessError("the memory server is not running", remedy="Call restart() first.")
        return self._server

    def _halt(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            with contextlib.suppress(ProcessLookupError):
                server.kill()
            server.wait(_STOP_TIMEOUT_S)
            if server.stdin is not None:
                server.stdin.close()

    def _await_state(self, letter: str, timeout_s: float) -> None:
        status = Path(f"/proc/{self._running().pid}/stat")
        deadline = time.monotonic() + timeout_s
        while os.path.exists(status) and status.read_text().rpartition(")")[2].split()[0] != letter:
            if time.monotonic() > deadline:
                raise HarnessError("the memory server did not stop", value=f"{timeout_s:g} s")
            time.sleep(0.001)
