"""A real redis-server of one's own, for the suite and the tests: a free port, no disk, stopped by its pid."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

_START_TIMEOUT_S = 20.0


def program() -> str | None:
    """Find redis-server or valkey-server."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """One server process on a loopback port that it keeps across restarts."""

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    def start(self) -> None:
        """Bring up an empty server.

        Raises: OSError: there is no program, or it does not answer.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="hicache-redis-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.boot()

    def boot(self) -> None:
        """Start the process, and wait until it answers."""
        found = program()
        if found is None or self._folder is None:
            raise OSError("there is no redis-server: apt-get install redis-server")
        command = [found, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        log = (self._folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [*command, "--dir", str(self._folder)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise OSError((self._folder / "log").read_text(errors="replace")[-1000:])
            time.sleep(0.02)

    def kill(self) -> None:
        """End it as by kill -9."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(10)

    def pause(self) -> None:
        """Stop it with its connections left open; return once it has stopped."""
        if self._process is None:
            raise OSError("the server is not running")
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it go on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it and remove its folder; idempotent."""
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
