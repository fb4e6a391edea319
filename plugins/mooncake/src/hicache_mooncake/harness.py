"""MooncakeHarness: runs the suite against a real mooncake_master and a second client that holds the memory.

Both are started on free loopback ports, in about a second. The storages under test
give no memory themselves unless ``segment_size`` is given, so their pages outlive
them and every byte crosses a connection. Leases last 1 s instead of 10.

A bounded store has leases of a tenth of that, since the suite fills it with pages that
it has just read, and what is leased cannot be evicted. Its master evicts when a set
finds no room, and not in its own time above 90 %: nothing may go between two looks.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from hicache_conformance.harness import BaseHarness, Damage, HarnessError
from hicache_core import HiCacheError, Namespace
from hicache_mooncake import _native
from hicache_mooncake._checksum import NAME_SUFFIX, TRAILER_NBYTES, Trailers
from hicache_mooncake._servers import Holder, Master, ServerError, program, wait_for
from hicache_mooncake.options import LEAST_SEGMENT_NBYTES

_SEGMENT_NBYTES = 256 << 20
_MOUNT_S = 30.0
#: How much larger a bounded store is made than it was asked for, so that a batch is a small part of it; the
#: suite goes by usage().
_BOUNDED_ROOM = 7
#: Less than the pause after which a set tries again in a full store.
_BOUNDED_LEASE_MS = 100
_EVICT_ON_NEED = ("--eviction_high_watermark_ratio=1", "--eviction_ratio=0.1")


class MooncakeHarness(BaseHarness):
    """One master and one holder."""

    faults = frozenset(
        (
            "bounded",
            "kill",
            "pause",
            "restart",
            "second_process",
            "stored_bytes",
            "store_bytes",
            "damage_flip",
            "damage_zero",
            "damage_truncate",
            "damage_lose",
        )
    )

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        self._master: Master | None = None
        self._holder: Holder | None = None
        self._segment_nbytes = _SEGMENT_NBYTES
        self._checksum = str(self.given.get("checksum", "")).lower() in ("1", "true", "yes", "on")

    def available(self) -> str | None:
        try:
            _native.load({})
        except HiCacheError as error:
            return str(error)
        if not shutil.which(program("mooncake_master")):
            return f"no mooncake_master beside this interpreter; run: {_native.EXTRAS}"
        return None

    def start(self) -> None:
        self._segment_nbytes = _SEGMENT_NBYTES
        self._boot(Master())

    def stop(self) -> None:
        holder, self._holder = self._holder, None
        master, self._master = self._master, None
        if master is not None:
            master.resume()
        if holder is not None:
            holder.kill()
        if master is not None:
            master.stop()

    def options(self) -> dict[str, Any]:
        master = self._running()
        own = {"master": master.address, "metrics": master.metrics, "segment_size": 0}
        return own | self.given

    def bounded(self, capacity: int) -> dict[str, Any]:
        self.stop()
        self._segment_nbytes = max(capacity * _BOUNDED_ROOM, LEAST_SEGMENT_NBYTES)
        self._boot(Master(*_EVICT_ON_NEED, lease_ms=_BOUNDED_LEASE_MS))
        return self.options()

    def kill(self) -> None:
        self._running().kill()

    def pause(self) -> None:
        self._running().pause()

    def resume(self) -> None:
        if self._master is not None:
            self._master.resume()

    def restart(self) -> None:
        master = self._running()
        master.resume()
        master.kill()
        master.start()
        self._await_segment()

    def stored_bytes(self, namespace: Namespace, key: str) -> bytes | None:
        value = self._holding().get(self._name(namespace, key))
        return value[:-TRAILER_NBYTES] if value is not None and self._checksum else value

    def store_bytes(self, namespace: Namespace, key: str, value: bytes) -> None:
        name = self._name(namespace, key)
        if not value:
            return  # Mooncake takes an object without bytes, says 0, and stores nothing
        trailer = Trailers(bytearray, lambda _: None).trailer(name, value) if self._checksum else b""
        self._holding().put(name, value + trailer)

    def damage(self, namespace: Namespace, key: str, how: Damage) -> None:
        name = self._name(namespace, key)
        value = self._holding().get(name)
        if value is None:
            raise HarnessError(f"no value to damage under '{key}'")
        if how == "lose":
            self._holding().ask("remove", key=name)
            return
        damaged = {
            "flip": bytes([value[0] ^ 1]) + value[1:],
            "zero": bytes(len(value)),
            "truncate": value[:-1],
        }[how]
        self._holding().put(name, damaged)

    def _name(self, namespace: Namespace, key: str) -> str:
        return namespace.qualify(key) + (NAME_SUFFIX if self._checksum else "")

    def _boot(self, master: Master) -> None:
        try:
            self._master = master
            self._master.start()
            self._holder = Holder(self._master, self._segment_nbytes)
            self._await_segment()
        except ServerError as error:
            raise HarnessError("Mooncake did not start", value=str(error)) from error

    def _await_segment(self) -> None:
        """Wait until the holder's memory is in the master, as it is again a second after a restart."""
        master = self._running()
        wait_for("mounting a segment", lambda: bool(master.admin.segments()), _MOUNT_S)

    def _running(self) -> Master:
        if self._master is None:
            raise HarnessError("mooncake_master has not been started", remedy="Call start() first.")
        return self._master

    def _holding(self) -> Holder:
        if self._holder is None:
            raise HarnessError("no second client has been started", remedy="Call start() first.")
        return self._holder
