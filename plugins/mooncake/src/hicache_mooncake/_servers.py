"""Real parts of Mooncake as child processes on loopback: a master, and a client that holds memory.

For the harness, the tests and the benchmarks. Ports are free ones, readiness is a
condition with a deadline, children are ended by pid. A master is up in 0.1 to
0.5 s and takes 55 MB.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hicache_conformance.leash import start_leashed
from hicache_core.errors import HiCacheError
from hicache_mooncake._admin import Admin

_START_S = 30.0
_STOP_S = 15.0


class ServerError(HiCacheError):
    """A child did not start, answer or end."""


def program(name: str) -> Path:
    """Find a program of the wheel beside this interpreter."""
    return Path(sysconfig.get_path("scripts")) / name


def free_port() -> int:
    """Give a port of the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
    """Wait for a condition.

    Raises: ServerError, naming it.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ServerError(f"{what} took more than {timeout_s:g} s")
        time.sleep(0.01)


class Master:
    """A mooncake_master; the same ports across restarts; it ends with this process, however that ends."""

    def __init__(self, *arguments: str, lease_ms: int = 1000, client_ttl_s: int = 10) -> None:
        self.port, self.metrics_port = free_port(), free_port()
        self._arguments = [
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.metrics_port}",
            "--rpc_thread_num=2",
            "--logtostderr=1",
            f"--default_kv_lease_ttl={lease_ms}",
            f"--client_ttl={client_ttl_s}",
            *arguments,
        ]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process: subprocess.Popen[bytes] | None = None
        self.admin = Admin(self.metrics, 5.0)

    @property
    def address(self) -> str:
        """What clients connect to."""
        return f"127.0.0.1:{self.port}"

    @property
    def metrics(self) -> str:
        """Where its HTTP metrics are."""
        return f"127.0.0.1:{self.metrics_port}"

    @property
    def pids(self) -> list[int]:
        """The script that the wheel installs, and the master that it runs."""
        return [] if self._process is None else [self._process.pid, *_children(self._process.pid)]

    def start(self) -> Master:
        """Bring it up and wait until it answers."""
        command = [str(program("mooncake_master")), *self._arguments]
        self._process = start_leashed(command, stdout=self._log, stderr=self._log)
        process = self._process
        wait_for("starting mooncake_master", lambda: process.poll() is not None or self._answers(), _START_S)
        if process.poll() is not None:
            raise ServerError("mooncake_master ended at once", value=self.log()[-800:])
        return self

    def signal(self, number: int) -> None:
        """Send a signal to all of it."""
        for pid in reversed(self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pause(self) -> None:
        """Stop it from answering; return once it has."""
        pids = self.pids
        self.signal(signal.SIGSTOP)
        wait_for("stopping mooncake_master", lambda: all(_state(pid) == "T" for pid in pids), _STOP_S)

    def resume(self) -> None:
        """Let it go on."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as by kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in good order."""
        self.resume()
        self._end(signal.SIGTERM)
        self._log.close()

    def log(self) -> str:
        """What it has written."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _end(self, number: int) -> None:
        pids = self.pids
        process, self._process = self._process, None
        if process is None:
            return
        for pid in reversed(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in pids[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for("the end of mooncake_master", lambda: not self._listens(), _STOP_S)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.2):
            return True
        return False

    def _answers(self) -> bool:
        if not self._listens():
            return False
        with contextlib.suppress(HiCacheError):
            self.admin.segments()
            return True
        return False


class Holder:
    """A client in a process of its own (``_raw``) that gives memory, and reads and writes values by name."""

    def __init__(self, master: Master, segment_nbytes: int) -> None:
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, "-m", "hicache_mooncake._raw", master.address, str(segment_nbytes)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={"MC_RPC_TIMEOUT_MS": "5000", "MC_LOG_LEVEL": "ERROR"} | dict(os.environ),
        )
        if self._line(_START_S) != "ready":
            self.kill()
            raise ServerError("a second client did not start", value=self.log()[-800:])

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def ask(self, verb: str, **arguments: Any) -> Any:
        """Have it call a verb of RawClient."""
        with self._lock:
            if self._process.stdin is None:
                raise ServerError("the second client has no input")
            self._process.stdin.write(json.dumps({"verb": verb} | arguments) + "\n")
            self._process.stdin.flush()
            return json.loads(self._line(_START_S) or "null")

    def get(self, name: str) -> bytes | None:
        """Read an object."""
        text = self.ask("get", key=name)
        return None if text is None else base64.b64decode(text)

    def put(self, name: str, value: bytes) -> None:
        """Put an object in the place of whatever there was."""
        code = self.ask("put", key=name, value=base64.b64encode(value).decode())
        if code != 0:
            raise ServerError("the second client could not put", value=str(code))

    def begin(self, name: str, nbytes: int) -> int:
        """Begin to put an object; give the code."""
        return int(self.ask("begin", key=name, nbytes=nbytes))

    def finish(self, name: str, value: bytes) -> int:
        """Finish what was begun; give the code."""
        return int(self.ask("finish", key=name, value=base64.b64encode(value).decode()))

    def look_up(self, name: str) -> int:
        """Begin a read: learn where an object lies; give the code."""
        return int(self.ask("look_up", key=name))

    def read_looked_up(self, name: str, nbytes: int) -> tuple[int, bytes]:
        """Go on with that read: give the code and what lies there by now."""
        code, text = self.ask("read_looked_up", key=name, nbytes=nbytes)
        return int(code), base64.b64decode(text)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as by kill -9: the master goes on believing in its segment for client_ttl."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def stop(self) -> None:
        """Have it unmount and end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            if self._process.stdin is not None:
                self._process.stdin.close()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._close_pipes()

    def log(self) -> str:
        """What it has written to standard error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _line(self, timeout_s: float) -> str:
        """Read one line; whoever does not answer in time is killed."""
        watch = threading.Timer(timeout_s, self._process.kill)
        watch.start()
        try:
            return self._process.stdout.readline().strip() if self._process.stdout else ""
        finally:
            watch.cancel()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "T"


def _children(pid: int) -> Sequence[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
