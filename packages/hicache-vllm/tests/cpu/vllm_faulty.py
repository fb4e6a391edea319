"""The file backend with faults on demand, for whole engines: half of a batch is done, then it happens.

``mode_file`` holds a verb and a fault: ``hang`` until the file changes or for ``hang_s``,
``die`` (the backend is gone), ``raise``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hicache_core import BackendSpec, BackendUnavailable, Pages, Status
from hicache_file.options import FileOptions
from hicache_file.spec import SPEC
from hicache_file.storage import HiCacheFile


class FaultyOptions(FileOptions):
    mode_file: str = ""
    hang_s: float = 600.0


class FaultyFile(HiCacheFile):
    spec = BackendSpec(
        name="faulty",
        api=SPEC.api,
        target="vllm_faulty:FaultyFile",
        options="vllm_faulty:FaultyOptions",
        capabilities=SPEC.capabilities,
    )

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        return self._middle("contains", keys, lambda a, b: super(FaultyFile, self).batch_contains(keys[a:b]))

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return self._middle("get", keys, lambda a, b: super(FaultyFile, self).batch_get(keys[a:b], locs[a:b]))

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return self._middle("set", keys, lambda a, b: super(FaultyFile, self).batch_set(keys[a:b], locs[a:b]))

    def _middle(self, verb, keys, work):
        fault = self._fault(verb)
        if not fault:
            return work(0, len(keys))
        half = len(keys) // 2
        done = work(0, half)
        if fault == "raise":
            raise RuntimeError(f"{verb} was told to raise")
        if fault == "die":
            if not half:
                raise BackendUnavailable(f"{verb} was told to die")
            return done + [Status.UNAVAILABLE] * (len(keys) - half)
        deadline = time.monotonic() + self.options.hang_s
        waiting = threading.Event()
        while self._fault(verb) and time.monotonic() < deadline:
            waiting.wait(0.05)
        return done + [Status.TIMEOUT] * (len(keys) - half)

    def _fault(self, verb: str) -> str:
        path = Path(self.options.mode_file)
        told = path.read_text().split() if path.is_file() else []
        return told[1] if told[:1] == [verb] else ""
