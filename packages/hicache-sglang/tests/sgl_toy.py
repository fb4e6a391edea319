"""A dictionary as a backend, with misbehaviour on demand; for tests in this process and in a scheduler's.

``mode_file`` names a file whose text is read at each call: ``raise``, ``hang``,
``short``, ``damaged``, ``dead``, ``full``, or nothing at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hicache_core import BackendSpec, BackendUnavailable, Capabilities, HiCacheStorage, Pages, Status, Usage
from hicache_core.options import Options

#: Namespace and key to bytes; one for the process, like a server that outlives its clients.
STORE: dict[str, bytes] = {}
#: (verb, keys) of every call that reached the store.
CALLS: list[tuple[str, list[str]]] = []


class ToyOptions(Options):
    mode_file: str = ""
    hang_s: float = 30.0


class ToyStore(HiCacheStorage):
    spec = BackendSpec(
        name="toy",
        api=1,
        target="sgl_toy:ToyStore",
        options="sgl_toy:ToyOptions",
        capabilities=Capabilities(shared=True, clear=True, checksum=True, deadline="none"),
    )

    def open(self, pools=()):
        self._mode("open")
        super().open(pools)

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            mode = self._mode("contains", keys)
            found = [Status.OK if self._name(key) in STORE else Status.MISS for key in keys]
            return found[:-1] if mode == "short" else found

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        self._check(keys, locs, writes_slots=True)
        with self._gate:
            mode = self._mode("get", keys)
            found = [self._read(key, locs.views(i), mode) for i, key in enumerate(keys)]
            return found[:-1] if mode == "short" else found

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        self._check(keys, locs)
        with self._gate:
            if self._mode("set", keys) == "full":
                return [Status.NO_SPACE] * len(keys)
            for i, key in enumerate(keys):
                STORE.setdefault(self._name(key), b"".join(bytes(view) for view in locs.views(i)))
            return [Status.OK] * len(keys)

    def clear(self) -> int:
        with self._gate:
            mine = [name for name in STORE if name.startswith(str(self.config.namespace))]
            for name in mine:
                del STORE[name]
            return len(mine)

    def usage(self) -> Usage:
        with self._gate:
            return Usage(len(STORE), sum(map(len, STORE.values())), 0, None)

    def _read(self, key: str, views: list[memoryview], mode: str) -> Status:
        value = STORE.get(self._name(key))
        if value is None:
            return Status.MISS
        if mode == "damaged":
            views[0][:] = bytes(len(views[0]))
            return Status.CORRUPT
        if len(value) != sum(len(view) for view in views):
            return Status.SIZE_MISMATCH
        start = 0
        for view in views:
            view[:] = value[start : start + len(view)]
            start += len(view)
        return Status.OK

    def _name(self, key: str) -> str:
        return self.config.namespace.qualify(key)

    def _mode(self, verb: str, keys: Sequence[str] = ()) -> str:
        CALLS.append((verb, list(keys)))
        path = self.options.mode_file
        mode = Path(path).read_text().strip() if path and Path(path).exists() else ""
        if mode == "raise":
            raise RuntimeError(f"{verb} was told to raise")
        if mode == "dead":
            raise BackendUnavailable(f"{verb} was told to be unreachable")
        if mode == "hang" and verb != "open":
            deadline = time.monotonic() + self.options.hang_s
            waiting = threading.Event()
            while time.monotonic() < deadline and Path(path).read_text().strip() == "hang":
                waiting.wait(0.05)
        return mode


#: Extra-config options under which HiCache finds this class without an installation.
OPTIONS = {"backend_name": "toy", "module_path": "sgl_toy", "class_name": "ToyStore"}
