"""Hf3fsHarness: page files in a temporary folder, and a metadata server process of its own.

The server takes about half a second to start, on a free loopback port that it keeps across restarts. It ends
with the process that started it, so that a killed harness leaves none behind (hicache_conformance.leash).
Options given by the user choose what is checked: ``root`` is a folder of his, on the mount that he means,
and page files lie in a new folder in it, removed afterwards; ``client=usrbio`` puts the double of the usrbio
library under it (usrbio_double.py), unless ``usrbio_module`` names another; ``metadata=local`` leaves the
server out; then no other process can open the store.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hicache_conformance.harness import BaseHarness, Damage, HarnessError
from hicache_conformance.leash import start_leashed
from hicache_core import Namespace

#: Sparse enough on any disk, and more than any case stores.
FILE_NBYTES = 256 << 20
#: An interpreter, FastAPI and a socket, on a machine that is busy.
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_DOUBLE = "hicache_hf3fs.usrbio_double"

#: Options that are the harness's.
_OWN = ("file_size", "metadata_url", "metadata_token", "metadata_path")

_ALWAYS = ("bounded", "stored_bytes", "damage_flip", "damage_zero", "damage_lose")
_SERVED = ("kill", "pause", "restart", "second_process")


class Hf3fsHarness(BaseHarness):
    """One folder and, unless ``metadata=local`` was given, one server process."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        self._local = self.given.pop("metadata", "") == "local"
        self._mount = self.given.pop("root", None)
        self.faults = frozenset(_ALWAYS if self._local else _ALWAYS + _SERVED)
        self._folder: Path | None = None
        self._pages: Path | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._address = "127.0.0.1:0"
        self._generation = 0
        self._file_nbytes = FILE_NBYTES
        #: ``--lease`` and ``--hold`` of the server, where they are not to be its own.
        self.terms: dict[str, float] = {}

    def available(self) -> str | None:
        own = [name for name in _OWN if name in self.given]
        if own:
            return f"the suite makes its store and its metadata server itself: leave out {', '.join(own)}"
        if self._mount is not None and not os.path.isdir(self._mount):
            return f"root={self._mount!r} is not a folder"
        missing = [name for name in ("fastapi", "uvicorn") if not self._local and find_spec(name) is None]
        return f"{missing[0]} is not installed: pip install 'hicache-hf3fs[check]'" if missing else None

    def start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hicache-hf3fs-"))
        self._pages = Path(tempfile.mkdtemp(prefix="hicache-hf3fs-pages-", dir=self._mount))
        self._file_nbytes = FILE_NBYTES
        self._address = "127.0.0.1:0"
        self._fresh()

    def stop(self) -> None:
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._pages is not None:
            shutil.rmtree(self._pages, ignore_errors=True)
            self._pages = None

    def options(self) -> dict[str, Any]:
        options = {"root": str(self._root()), "file_size": self._file_nbytes} | self.given
        if not self._local:
            options["metadata_url"] = f"http://{self._address}"
        if self.given.get("client") == "usrbio":
            options.setdefault("usrbio_module", _DOUBLE)
        return options

    def bounded(self, capacity: int) -> dict[str, Any]:
        self.kill()
        self._file_nbytes = capacity
        self._fresh()
        return self.options()

    def kill(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.kill()
            server.wait(_STOP_TIMEOUT_S)

    def pause(self) -> None:
        self._running().send_signal(signal.SIGSTOP)
        self._await_state("T")

    def resume(self) -> None:
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self._serve()

    def stored_bytes(self, namespace: Namespace, key: str) -> bytes | None:
        place = self._place(namespace, key)
        if place is None:
            return None
        path, offset, nbytes = place
        with open(path, "rb") as file:
            return os.pread(file.fileno(), nbytes, offset)

    def damage(self, namespace: Namespace, key: str, how: Damage) -> None:
        place = self._place(namespace, key)
        if place is None:
            raise HarnessError(f"no value to damage under '{key}'")
        path, offset, nbytes = place
        with open(path, "r+b") as file:
            first = os.pread(file.fileno(), 1, offset)
            # A page cannot be taken out of a page file: lost, it reads as a hole does.
            damaged = bytes([first[0] ^ 1]) if how == "flip" else bytes(nbytes)
            os.pwrite(file.fileno(), damaged, offset)

    def _place(self, namespace: Namespace, key: str) -> tuple[Path, int, int] | None:
        """Find a page with nothing but the database: page file, offset, size."""
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        with closing(sqlite3.connect(f"file:{self._database()}?mode=ro", uri=True)) as base:
            row = base.execute(
                "SELECT r.name, p.idx * r.page_nbytes, p.nbytes FROM page p JOIN rank r ON r.id = p.rank "
                "JOIN space s ON s.id = p.space WHERE s.live AND s.namespace=? AND p.key=?",
                (namespace.id, digest),
            ).fetchone()
        return row and (self._root() / f"{row[0]}.pages", row[1], row[2])

    def _fresh(self) -> None:
        self._generation += 1
        root = self._root()
        root.mkdir(mode=0o700)
        if self.options().get("usrbio_module") == _DOUBLE:
            (root / "3fs-virt" / "iovs").mkdir(parents=True)
        self._serve()

    def _serve(self) -> None:
        if self._local:
            return
        ready = self._database().with_suffix(".ready")
        ready.unlink(missing_ok=True)
        host, _, port = self._address.rpartition(":")
        command = [sys.executable, "-m", "hicache_hf3fs.metadata_server"]
        command += ["--database", str(self._database()), "--host", host, "--port", port]
        command += ["--ready-file", str(ready)]
        command += [word for name, seconds in self.terms.items() for word in (f"--{name}", str(seconds))]
        log = self._database().with_suffix(".log").open("ab")
        with log:
            self._server = start_leashed(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not ready.exists():
            if self._server.poll() is not None or time.monotonic() > deadline:
                said = Path(log.name).read_text(errors="replace")[-2000:]
                raise HarnessError("the metadata server did not start", value=said)
            time.sleep(0.01)
        self._address = ready.read_text().strip()
        self._await_answer(deadline)

    def _await_answer(self, deadline: float) -> None:
        """Wait out what lies between listening and answering."""
        while True:
            connection = http.client.HTTPConnection(
                self._address, timeout=max(0.1, deadline - time.monotonic())
            )
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == http.HTTPStatus.OK:
                    return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise HarnessError("the metadata server does not answer", value=str(error)) from error
            finally:
                connection.close()
            time.sleep(0.01)

    def _root(self) -> Path:
        if self._pages is None:
            raise HarnessError("the store has not been started", remedy="Call start() first.")
        return self._pages / f"root-{self._generation}"

    def _database(self) -> Path:
        if self._local:
            return self._root() / "metadata.sqlite"
        if self._folder is None:
            raise HarnessError("the store has not been started", remedy="Call start() first.")
        return self._folder / f"root-{self._generation}.sqlite"

    def _running(self) -> subprocess.Popen[bytes]:
        if self._server is None or self._server.poll() is not None:
            raise HarnessError("the metadata server is not running", remedy="Call restart() first.")
        return self._server

    def _await_state(self, letter: str) -> None:
        status = Path(f"/proc/{self._running().pid}/stat")
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while status.read_text().rpartition(")")[2].split()[0] != letter:
            if time.monotonic() > deadline:
                raise HarnessError("the metadata server did not stop")
            time.sleep(0.001)
