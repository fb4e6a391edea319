"""AibrixKVCacheStorage: KV pages in AIBrix's KV cache.

A page becomes one record (record.py) under a digest of its key, in a store of
the namespace's own: the library's L2 path tells neither model nor dtype, so the
whole identity goes into its namespace. Pages are opaque bytes, which is why MLA,
split heads and every other layout need nothing here.

A batch is one call of the library (library.py). Its answer is a count; which
page is there, each record says for itself. What a batch left unread or unstored
is asked for again by itself, to learn why.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from hicache_aibrix.library import Library, forget_in_child, leave, open_library
from hicache_aibrix.options import AibrixOptions
from hicache_aibrix.record import TRAILER_NBYTES, copy_out, digest_of, seal, verdict
from hicache_aibrix.spec import SPEC
from hicache_core.errors import BackendTimeout, BackendUnavailable
from hicache_core.memory import HostPool, Pages
from hicache_core.mounts import is_network
from hicache_core.status import OK, Status
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig, Usage

#: Private bytes and pages of one call of the library.
_CALL_NBYTES = 64 << 20
_CALL_PAGES = 128


class AibrixKVCacheStorage(HiCacheStorage):
    """Pages of one namespace in AIBrix's store; see the module's text."""

    spec = SPEC
    options: AibrixOptions

    def __init__(self, config: HiCacheStorageConfig, options: AibrixOptions) -> None:
        super().__init__(config, options)
        self._library: Library | None = None

    # Life.

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        self._gate.check_new()
        options: AibrixOptions = self.options
        self._library = open_library(options, self.config.namespace.id, self.config.timeout_s)
        rocksdb = options.backend == "rocksdb"
        network = options.network if options.network is not None else is_network(options.root)
        self.capabilities = dataclasses.replace(
            self.capabilities,
            shared=not rocksdb,
            eviction="ttl" if options.ttl_s else "none",
            deadline="none" if network else "hold",
            transport="RocksDB" if rocksdb else "network mount" if network else "local mount",
        )
        super().open(pools)

    def close(self) -> None:
        if self._drain():
            self._give_back()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._library = None
        forget_in_child()

    def _give_back(self) -> None:
        library, self._library = self._library, None
        if library is not None:
            leave(library)

    # Verbs.

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            library = self._opened()
            digests = [digest_of(key) for key in keys]
            return [
                Status.CORRUPT if digest in library.bad else library.contains(digest.hex())
                for digest in digests
            ]

    def batch_exists(self, keys: Sequence[str]) -> int:
        with self._gate:
            library = self._opened()
            digests = [digest_of(key) for key in keys]
            if not library.bad.isdisjoint(digests):
                digests = digests[: next(i for i, digest in enumerate(digests) if digest in library.bad)]
            return library.exists([digest.hex() for digest in digests]) if digests else 0

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs, writes_slots=True)
            statuses: list[Status] = []
            for start, stop in _calls(len(keys), locs.nbytes):
                statuses += self._get(self._opened(), keys[start:stop], locs[start:stop])
            return statuses

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            if not keys:
                return []
            library = self._opened()
            if not library.writing.acquire(timeout=self.config.timeout_s):
                return [Status.TIMEOUT] * len(keys)
            try:
                statuses: list[Status] = []
                for start, stop in _calls(len(keys), locs.nbytes):
                    statuses += self._set(library, keys[start:stop], locs[start:stop])
                return statuses
            finally:
                library.writing.release()

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            library = self._opened()
            digests = [digest_of(key) for key in keys]
            statuses = [library.remove(digest.hex()) for digest in digests]
            library.bad.difference_update(digests)
            return statuses

    def clear(self) -> int:
        with self._gate:
            library = self._opened()
            if not library.writing.acquire(timeout=self.config.timeout_s):
                raise BackendTimeout("clearing 'aibrix'", remedy="A set takes long: look at the disk.")
            try:
                library.bad.clear()
                return library.clear()
            except OSError as error:
                raise BackendUnavailable("clearing 'aibrix'", value=str(error)) from error
            finally:
                library.writing.release()

    def usage(self) -> Usage:
        """Read every value (rocksdb) or look at every file (shfs), since the library keeps no account."""
        deadline = time.monotonic() + self.config.timeout_s
        with self._gate:
            library = self._opened()
            pages = nbytes = 0
            try:
                for size in library.sizes():
                    pages += 1
                    nbytes += max(0, size - TRAILER_NBYTES)
                    if time.monotonic() > deadline:
                        raise BackendTimeout(
                            "counting the pages of 'aibrix'",
                            value=f"{pages} in {self.config.timeout_s:g} s",
                            remedy="Raise timeout_s: the library keeps no account, every value is read.",
                        )
                return Usage(pages, nbytes, max(nbytes, library.store_nbytes()), None)
            except OSError as error:
                raise BackendUnavailable("counting the pages of 'aibrix'", value=str(error)) from error

    # One call of the library.

    def _get(self, library: Library, keys: Sequence[str], locs: Pages) -> list[Status]:
        digests = [digest_of(key) for key in keys]
        nbytes = locs.nbytes + TRAILER_NBYTES
        values = library.get([digest.hex() for digest in digests], nbytes)
        statuses: list[Status] = []
        for position, (digest, value) in enumerate(zip(digests, values, strict=True)):
            status = OK
            if value is None:
                status, value = library.get_one(digest.hex(), nbytes)
            if value is not None:
                status = verdict(value, locs.nbytes, digest)
            if status is OK and value is not None:
                copy_out(value, locs.views(position))
                library.bad.discard(digest)  # another process may have mended it
            elif status in (Status.CORRUPT, Status.SIZE_MISMATCH, Status.ERROR):
                library.bad.add(digest)
            statuses.append(status)
        return statuses

    def _set(self, library: Library, keys: Sequence[str], locs: Pages) -> list[Status]:
        digests = [digest_of(key) for key in keys]
        wanted: dict[bytes, int] = {}
        results: dict[bytes, Status] = {}
        for position, digest in enumerate(digests):
            if digest not in wanted and digest not in results:
                if self._is_stored(library, digest, locs.nbytes):
                    results[digest] = OK
                else:
                    wanted[digest] = position
        if wanted:
            records = [partial(seal, locs.views(at), locs.nbytes, digest) for digest, at in wanted.items()]
            results |= self._put(library, list(wanted), locs.nbytes, records)
        return [results[digest] for digest in digests]

    def _is_stored(self, library: Library, digest: bytes, nbytes: int) -> bool:
        """Tell whether a key holds a value that stays (C4)."""
        if digest in library.bad or library.contains(digest.hex()) is not OK:
            return False
        return library.is_whole(digest.hex(), nbytes, digest)

    def _put(
        self, library: Library, digests: list[bytes], nbytes: int, records: Sequence[Callable[[], bytes]]
    ) -> dict[bytes, Status]:
        size = nbytes + TRAILER_NBYTES
        if library.put([digest.hex() for digest in digests], size, records):
            library.bad.difference_update(digests)
            return dict.fromkeys(digests, OK)
        results: dict[bytes, Status] = {}
        for digest, record in zip(digests, records, strict=True):
            status = library.put_one(digest.hex(), size, record)
            if status is not OK:  # another process may have stored it at this moment
                _, value = library.get_one(digest.hex(), size)
                there = value is not None and verdict(value, nbytes, digest) is OK
                status = OK if there else status
            if status is OK:
                library.bad.discard(digest)
            results[digest] = status
        return results

    def _opened(self) -> Library:
        if self._library is None:
            raise BackendUnavailable("'aibrix' has no store", remedy="Open it again.")
        return self._library


def _calls(count: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Split a batch so that its private copy stays small."""
    step = max(1, min(_CALL_PAGES, _CALL_NBYTES // max(1, nbytes)))
    for start in range(0, count, step):
        yield start, min(start + step, count)
