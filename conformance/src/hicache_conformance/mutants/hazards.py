"""Mutants that no test in the same process survives: for these the suite has a process of its own."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Sequence

from hicache_conformance.memory.storage import MemoryStorage
from hicache_conformance.mutants.registry import breaks
from hicache_core import HostPool, Pages, Status


@breaks("C11", hazard=True)
class HangsForEver(MemoryStorage):
    """A get never returns.

    Seen: Mooncake with a dead etcd; SGLang's NIXL, an endless poll.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        threading.Event().wait()
        return super().batch_get(keys, locs)


@breaks("C11", hazard=True)
class HangsHoldingTheGil(MemoryStorage):
    """A native get never returns, and no other thread runs meanwhile.

    Seen: bindings without a released GIL.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        ctypes.PyDLL(None).sleep(3600)  # PyDLL, unlike CDLL, keeps the GIL
        return super().batch_get(keys, locs)


@breaks("C2", hazard=True)
class Crashes(MemoryStorage):
    """A get kills the process.

    Seen: Mooncake before setup and after close; NIXL with a released handle.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return [Status.OK] * ctypes.c_ubyte.from_address(8).value


@breaks("C16", hazard=True)
class Exits(MemoryStorage):
    """A get ends the process without a word.

    Seen: Mooncake with redis:// metadata aborts.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        os._exit(0)


@breaks("C16", hazard=True)
class FloodsStdout(MemoryStorage):
    """It writes to standard output without end.

    Seen: debug levels left on in native clients.
    """

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        super().open(pools)
        threading.Thread(target=self._flood, daemon=True).start()

    def _flood(self) -> None:
        line = b"debug: everything is fine\n" * 4000
        while self.is_open:
            os.write(sys.__stdout__.fileno() if sys.__stdout__ else 1, line)
