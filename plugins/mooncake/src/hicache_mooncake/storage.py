"""MooncakeStore: pages as objects of a Mooncake store.

Theory of operation. A page is one object, named ``{namespace}/{key}``, whatever
its segments: several segments go through the multi-buffer calls. Bytes move
between the pool's registered memory and the store without a copy. The master
decides where an object lies and which ones go when the store is full.

What the library's answers mean is settled here, page by page:

- A get gives the OBJECT's size, so only the expected size is OK. Where a slot is
  too small or too large the code is ambiguous, and the size is asked for.
- A put gives 0 for a name that exists, whatever it holds, and for one that another
  client is still writing. So a set asks first for keys that are not known to be
  absent, replaces values of another size, and sets of one key in one process take
  turns. A get of a page that is still being written waits for it a little.
- Nothing is removed by force: a reader elsewhere may hold a lease on its memory. See _remover.py.

Facts: mooncake-transfer-engine-non-cuda 0.3.13.post1, run by hand; _native.py
names the codes.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

from hicache_core import (
    BackendUnavailable,
    HiCacheStorage,
    HiCacheStorageConfig,
    HostPool,
    Pages,
    Status,
    StorageClosed,
    Usage,
)
from hicache_mooncake._admin import Admin
from hicache_mooncake._checksum import NAME_SUFFIX, TRAILER_NBYTES, Trailers
from hicache_mooncake._client import Client, Names, unavailable
from hicache_mooncake._known import KnownKeys
from hicache_mooncake._native import (
    OBJECT_NOT_FOUND,
    REPLICA_IS_NOT_READY,
    RPC_FAIL,
    RPC_TIMEOUT,
    STATUS_OF_CODE,
)
from hicache_mooncake._reader import Reader
from hicache_mooncake._remover import Remover
from hicache_mooncake._writer import Writer
from hicache_mooncake.options import MooncakeOptions
from hicache_mooncake.spec import SPEC

OK, MISS, ERROR = Status.OK, Status.MISS, Status.ERROR
_T = TypeVar("_T")
_NO_ANSWER = {Status.UNAVAILABLE: RPC_FAIL, Status.TIMEOUT: RPC_TIMEOUT}


class MooncakeStore(HiCacheStorage):
    """See hicache_core.HiCacheStorage for what each verb promises."""

    spec = SPEC
    options: MooncakeOptions

    def __init__(self, config: HiCacheStorageConfig, options: MooncakeOptions) -> None:
        super().__init__(config, options)
        self._names = Names(config.namespace.qualify(""), NAME_SUFFIX if options.checksum else "")
        self._known = KnownKeys()
        self._client: Client | None = None
        #: Made by open() and rebind(); verbs inside the gate have them.
        self._reader: Reader
        self._writer: Writer
        self._remover: Remover
        self._closes_at_exit: Any = None

    # The beginning and the end.

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        self._gate.check_new()
        client = Client(self.options, self.config.timeout_s)
        client.connect()
        try:
            self._serve(client, pools)
        except BaseException:
            client.close(self._gate, self.config.timeout_s)
            raise

    def _serve(self, client: Client, pools: Sequence[HostPool]) -> None:
        client.register(pools)
        trailers = None
        if self.options.checksum:
            trailers = Trailers(client.private_memory, lambda pool: client.register([pool]))
        timeout_s = self.config.timeout_s
        self._remover = Remover(client, timeout_s)
        self._reader = Reader(client, self._names, self._known, trailers, timeout_s)
        self._writer = Writer(client, self._names, self._known, trailers, timeout_s, self._remover)
        self._client = client
        self.capabilities = dataclasses.replace(
            self.spec.capabilities,
            checksum=self.options.checksum,
            eviction="none" if self.options.hard_pin else self.spec.capabilities.eviction,
            transport=self.options.protocol,
        )
        # A process that ends without close() must not leave its segment in the master for client_ttl.
        self._closes_at_exit = weakref.finalize(self, client.close, self._gate, self.config.timeout_s)
        super().open(pools)

    def rebind(self, config: HiCacheStorageConfig, pools: Sequence[HostPool]) -> HiCacheStorage:
        """Keep the client: closing it would lose the pages of everybody in its segment."""
        fresh = type(self)(config, self.options)
        client, self._client = self._opened(self._client), None
        if self._closes_at_exit is not None:
            self._closes_at_exit.detach()
        self._drain()
        try:
            fresh._serve(client, pools)
        except BaseException:
            client.close(fresh._gate, self.config.timeout_s)
            raise
        return fresh

    def close(self) -> None:
        started = time.monotonic()
        self._drain()
        client, self._client = self._client, None
        if client is not None:
            if self._closes_at_exit is not None:
                self._closes_at_exit.detach()
            client.close(self._gate, max(0.1, self.config.timeout_s - (time.monotonic() - started)))

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        client, self._client = self._client, None
        if self._closes_at_exit is not None:
            self._closes_at_exit.detach()
        if client is not None:
            client.abandon_in_child()

    def add_pool(self, pool: HostPool) -> None:
        with self._gate:
            self._opened(self._client).register([pool])
            super().add_pool(pool)

    def drop_pool(self, pool: HostPool) -> None:
        with self._gate:
            super().drop_pool(pool)
            self._opened(self._client).unregister(pool)

    # Verbs.

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            if not keys:
                return []
            codes = self._opened(self._client).exist(self._names.of(keys))
            there = codes.count(1)
            if there == len(codes):
                statuses = [OK] * there
            elif not there and codes.count(0) == len(codes):
                self._known.note_absent(keys)
                return [MISS] * len(keys)
            else:
                statuses = [_presence(code) for code in codes]
                self._known.note_absent(key for key, code in zip(keys, codes, strict=True) if code == 0)
            for position, status in self._known.bad(keys).items():
                if statuses[position] is OK:
                    statuses[position] = status
            return statuses

    def batch_exists(self, keys: Sequence[str]) -> int:
        statuses = self.batch_contains(keys)
        if statuses and statuses[0] in _NO_ANSWER:
            raise unavailable(_NO_ANSWER[statuses[0]], "tell what exists", self.options.master)
        return next((i for i, status in enumerate(statuses) if status is not OK), len(statuses))

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            if id(locs.pool) not in self._pools or len(keys) != len(locs.indices):  # without two frames
                self._check(keys, locs, writes_slots=True)
            return self._reader.read(keys, locs) if keys else []

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            if id(locs.pool) not in self._pools or len(keys) != len(locs.indices):
                self._check(keys, locs)
            return self._writer.write(keys, locs) if keys else []

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            if not keys:
                return []
            codes = self._remover.remove(self._names.of(keys))
            self._known.forget_bad(keys)
            return [OK if code == 0 else STATUS_OF_CODE.get(code, ERROR) for code in codes]

    def touch(self, keys: Sequence[str]) -> None:
        with self._gate:
            if keys:
                self._opened(self._client).exist(self._names.of(keys))

    def clear(self) -> int:
        with self._gate:
            # The namespace is hex digits and a slash: nothing in it means anything to a regular expression.
            count = self._opened(self._client).remove_matching(f"^{self._names.prefix}")
            self._known.clear()
            if count < 0:
                raise unavailable(count, "clear the namespace", self.options.master)
            codes = self._remover.remove(self._left())
            failed = [code for code in codes if code not in (0, OBJECT_NOT_FOUND, REPLICA_IS_NOT_READY)]
            if failed:
                raise unavailable(min(failed), f"clear {len(failed)} pages", self.options.master)
            return count + codes.count(0)

    def usage(self) -> Usage:
        with self._gate:
            self._opened(self._client)
            usage = self._admin().usage(self._names.prefix)
            if self.options.checksum:
                return dataclasses.replace(usage, bytes=usage.bytes - usage.pages * TRAILER_NBYTES)
            return usage

    # Helpers.

    def _left(self) -> list[str]:
        """List what a first, unforced removal has left: pages that somebody has asked for lately."""
        try:
            return self._admin().names(self._names.prefix)
        except BackendUnavailable as error:
            raise BackendUnavailable(
                "'mooncake' has cleared the namespace except for what was asked for lately",
                value=f"{error.what}: {error.value}",
                remedy=error.remedy,
            ) from error

    def _admin(self) -> Admin:
        return Admin(self.options.metrics_address, self.config.timeout_s, self.options.tenant)

    def _opened(self, part: _T | None) -> _T:
        """Give a part of the open instance; close() may have taken it away under a running verb."""
        if part is None:
            raise StorageClosed(self.spec.name)
        return part


def _presence(code: int) -> Status:
    if code == 1:
        return OK
    return MISS if code == 0 else STATUS_OF_CODE.get(code, Status.UNAVAILABLE)
