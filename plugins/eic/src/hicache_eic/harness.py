"""EicHarness: a simulated EIC service in a process of its own; see simulator/.

It starts in about 0.2 s on a free loopback port that it keeps across restarts, holds values in memory, and
ends with the thread that started it. What the suite proves here is this backend, not EIC.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache_conformance.harness import BaseHarness, Damage, HarnessError
from hicache_conformance.leash import start_leashed
from hicache_core import Namespace
from hicache_eic.simulator.wire import receive, send

_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_HEAD_NBYTES = 32
_END_NBYTES = 8
_INSTANCE = "hicache-check"
_FAULTS = [
    "kill",
    "pause",
    "restart",
    "second_process",
    "stored_bytes",
    "damage_flip",
    "damage_zero",
    "damage_truncate",
    "damage_lose",
]


class EicHarness(BaseHarness):
    """One simulator process."""

    faults = frozenset(_FAULTS)

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        self._folder: Path | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._address = "127.0.0.1:0"

    def available(self) -> str | None:
        own = [name for name in ("url", "instance_id", "module", "yaml") if name in self.given]
        return f"the suite runs on a simulator that it starts: leave out {', '.join(own)}" if own else None

    def start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hicache-eic-"))
        self._address = "127.0.0.1:0"
        self._serve()

    def stop(self) -> None:
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def options(self) -> dict[str, Any]:
        own = {
            "url": f"eic://{self._address}",
            "instance_id": _INSTANCE,
            "module": "hicache_eic.simulator.eic",
        }
        return own | self.given

    def kill(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.kill()
            server.wait(_STOP_TIMEOUT_S)

    def pause(self) -> None:
        self._running().send_signal(signal.SIGSTOP)
        status = Path(f"/proc/{self._running().pid}/stat")
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            if time.monotonic() > deadline:
                raise HarnessError("the simulator did not stop")
            time.sleep(0.001)

    def resume(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self._serve()

    def quirks(self, **quirks: Any) -> None:
        """Switch the simulator's quirks; those not named are as at the start."""
        self._tell({"verb": "quirks", "quirks": quirks})

    def calls(self) -> dict[str, int]:
        """Count the calls that the simulator has answered, by verb."""
        calls: dict[str, int] = self._tell({"verb": "calls"})[0]["calls"]
        return calls

    def names(self) -> list[list[str]]:
        """List what the simulator holds: (instance, namespace, key) each."""
        names: list[list[str]] = self._tell({"verb": "names"})[0]["names"]
        return names

    def stored_bytes(self, namespace: Namespace, key: str) -> bytes | None:
        value = self._peek(namespace, key)
        return None if value is None else value[_HEAD_NBYTES:-_END_NBYTES]

    def damage(self, namespace: Namespace, key: str, how: Damage) -> None:
        value = self._peek(namespace, key)
        if value is None:
            raise HarnessError(f"no value to damage under '{key}'")
        if how == "lose":
            self._ask("mdel", namespace, key)
            return
        page = value[_HEAD_NBYTES:]
        damaged = {
            "flip": value[:_HEAD_NBYTES] + bytes([page[0] ^ 1]) + page[1:],
            "zero": bytes(len(value)),
            "truncate": value[:-1],
        }[how]
        self._ask("mset", namespace, key, damaged, ttl_s=-1, sizes=[len(damaged)])

    def _peek(self, namespace: Namespace, key: str) -> bytes | None:
        head, body = self._ask("mget", namespace, key)
        return bytes(body) if head["codes"] == [0] else None

    def _ask(
        self, verb: str, namespace: Namespace, key: str, value: bytes = b"", **more: Any
    ) -> tuple[dict[str, Any], bytes]:
        own = str(self.given.get("eic_namespace", ""))
        head = {"verb": verb, "instance": _INSTANCE, "ns": own, "keys": [f"{namespace.id}/{key}"]}
        return self._tell(head | more, value)

    def _tell(self, head: dict[str, Any], value: bytes = b"") -> tuple[dict[str, Any], bytes]:
        host, _, port = self._address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), _STOP_TIMEOUT_S) as connection:
                send(connection, head, [value] if value else [])
                answer, body = receive(connection)
        except OSError as error:
            raise HarnessError("the simulator does not answer", value=str(error)) from error
        return answer, bytes(body)

    def _serve(self) -> None:
        if self._folder is None:
            raise HarnessError("the simulator has not been started", remedy="Call start() first.")
        ready = self._folder / "ready"
        ready.unlink(missing_ok=True)
        port = self._address.rpartition(":")[2]
        command = [sys.executable, "-m", "hicache_eic.simulator.server"]
        command += ["--port", port, "--ready-file", str(ready)]
        self._server = start_leashed(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not ready.exists():
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise HarnessError("the simulator did not start", value=os.fspath(self._folder))
            time.sleep(0.01)
        self._address = ready.read_text().strip()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._server is None or self._server.poll() is not None:
            raise HarnessError("the simulator is not running", remedy="Call restart() first.")
        return self._server
