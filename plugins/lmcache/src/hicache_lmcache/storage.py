"""LMCacheStorage: KV pages in the stores that LMCache's L2 adapters speak to.

A page becomes one value: a header that tells whose it is, and its bytes
(record.py). The store is asked what is there (ledger.py), LMCache moves the
bytes (native.py), between the store and private memory; the calling thread
copies, and walks away at the deadline. With ``l1_bytes`` pages stay in LMCache's
L1 too (memory.py), and come from there while the store still has them.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence

from hicache_core.errors import BackendIncompatible, BackendTimeout, BackendUnavailable
from hicache_core.memory import HostPool, Pages
from hicache_core.mounts import is_network
from hicache_core.status import OK, Status
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig, Usage
from hicache_lmcache.adapters import Adapters, Use
from hicache_lmcache.ledger import FolderLedger, Ledger, RedisLedger
from hicache_lmcache.memory import Memory
from hicache_lmcache.native import Adapter, adapter_maker, key_maker
from hicache_lmcache.options import LMCacheOptions
from hicache_lmcache.record import HEADER_NBYTES, Record, Scratch, digest_of
from hicache_lmcache.spec import SPEC

#: Private bytes and pages of one call of LMCache.
_CALL_NBYTES = 64 << 20
_CALL_PAGES = 128
_CANARY_NBYTES = 256
#: How long a RESP adapter may take before it is suspected: a moment, and its bytes at a slow network's pace.
_PATIENCE_S = 0.25
_SLOW_NBYTES_PER_S = 50e6

_MISS, _CORRUPT, _SIZE_MISMATCH = Status.MISS, Status.CORRUPT, Status.SIZE_MISMATCH


class LMCacheStorage(HiCacheStorage):
    """Pages of one namespace; see the module's text."""

    spec = SPEC
    options: LMCacheOptions

    def __init__(self, config: HiCacheStorageConfig, options: LMCacheOptions) -> None:
        super().__init__(config, options)
        self._ledger: Ledger | None = None
        self._adapters: Adapters | None = None
        self._writing = threading.Lock()
        self._scratch = Scratch()
        self._memory: Memory | None = None
        #: Digests of values on which a get has failed.
        self._bad: set[bytes] = set()

    # Life.

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        self._gate.check_new()
        files = self.options.l2 == "fs"
        network = files and (
            self.options.network if self.options.network is not None else is_network(self.options.root or "/")
        )
        try:
            self._connect()
            self._sing()
            if self.options.l1_bytes:
                self._memory = self._make_memory(network)
        except BaseException:
            self._give_back()
            raise
        self.capabilities = dataclasses.replace(
            self.capabilities,
            persistent=files,
            durable=files,
            # Redis tells of no change to a value: damage stays unseen while the page is in the L1.
            checksum=self.capabilities.checksum and (files or self._memory is None),
            deadline="none" if network else "bounce",
            transport="network mount" if network else "local mount" if files else "RESP over TCP",
        )
        super().open(pools)

    def _connect(self) -> None:
        namespace, timeout_s = self.config.namespace.id, self.config.timeout_s
        ledger: FolderLedger | RedisLedger
        if self.options.l2 == "fs":
            ledger = FolderLedger(self.options.root or "", namespace)
            folder = ledger.folder
        else:
            ledger, folder = RedisLedger(self.options, namespace, timeout_s), ""
        self._ledger = ledger
        make = adapter_maker(self.options, namespace, folder)
        self._adapters = Adapters(make, one_for_all=self.options.l2 == "fs")

    def _make_memory(self, network: bool) -> Memory:
        if network:
            raise BackendUnavailable(
                "opening 'lmcache' with l1_bytes",
                value=f"{self.options.root} is on a network mount, whose files' times may be another host's",
                remedy="Drop l1_bytes.",
            )
        return Memory(self.options.l1_bytes, key_maker(self.config.namespace.id))

    def _sing(self) -> None:
        """Store, find, load and remove one value: LMCache's calls and names mean what they meant."""
        digest = digest_of(f"canary-{time.monotonic_ns()}-{id(self)}")
        ledger, deadline = self._store(), self._deadline()
        storing, loading = self._adapter("store", deadline), self._adapter("load", deadline)
        said, heard = self._scratch.records(1, _CANARY_NBYTES), self._scratch.records(1, _CANARY_NBYTES)
        said[0].seal([memoryview(bytes(range(_CANARY_NBYTES)))], _CANARY_NBYTES, digest)
        stored = storing.store([digest], said, deadline)
        sizes = ledger.sizes([digest]) if stored == [True] else [None]
        loaded = next(loading.load([digest], heard, deadline)) if sizes != [None] else [False]
        ledger.remove([digest])
        if stored is None or loaded is None:
            raise BackendTimeout("opening 'lmcache'", value=f"no answer within {self.config.timeout_s:g} s")
        if not all(stored):
            raise BackendUnavailable("opening 'lmcache'", value="LMCache could not store a page")
        if sizes != [_CANARY_NBYTES + HEADER_NBYTES] or heard[0].verdict(_CANARY_NBYTES, digest) is not OK:
            raise BackendIncompatible(
                "lmcache",
                "a page that was stored did not come back the same",
                value=f"found {sizes[0]} bytes, loaded: {loaded[0]}",
                remedy="Run: pip install 'lmcache==0.5.6'",
            )

    def close(self) -> None:
        if self._drain():
            self._give_back()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._writing = threading.Lock()
        self._scratch = Scratch()
        _parents.append((self._adapters, self._ledger, self._memory))
        self._adapters = self._ledger = self._memory = None

    def _give_back(self) -> None:
        adapters, self._adapters = self._adapters, None
        if adapters is not None:
            adapters.close(self.config.timeout_s)
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    # Verbs.

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            digests = [digest_of(key) for key in keys]
            return self._answered(
                len(keys),
                lambda: [
                    _CORRUPT
                    if digest in self._bad or (size or HEADER_NBYTES) < HEADER_NBYTES
                    else _MISS
                    if size is None
                    else _SIZE_MISMATCH
                    if size == HEADER_NBYTES
                    else OK
                    for digest, size in zip(digests, self._store().sizes(digests), strict=True)
                ],
            )

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs, writes_slots=True)
            deadline = self._deadline()
            return [
                status
                for start, stop in _calls(len(keys), locs.nbytes)
                for status in self._answered(
                    stop - start,
                    lambda start=start, stop=stop: self._get(keys[start:stop], locs[start:stop], deadline),
                )
            ]

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            deadline = self._deadline()
            return [
                status
                for start, stop in _calls(len(keys), locs.nbytes)
                for status in self._answered(
                    stop - start,
                    lambda start=start, stop=stop: self._set(keys[start:stop], locs[start:stop], deadline),
                )
            ]

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            digests = [digest_of(key) for key in keys]

            def remove() -> list[Status]:
                sizes = self._store().sizes(digests)
                self._store().remove(digests)
                self._forget(digests)
                self._bad.difference_update(digests)
                gone: set[bytes] = set()
                statuses = []
                for digest, size in zip(digests, sizes, strict=True):
                    statuses.append(_MISS if size is None or digest in gone else OK)
                    gone.add(digest)
                return statuses

            return self._answered(len(keys), remove)

    def clear(self) -> int:
        with self._gate:
            self._bad.clear()
            if self._memory is not None:
                self._memory.clear()
            return self._store().clear(self._deadline())

    def usage(self) -> Usage:
        """Look at every value: LMCache keeps no account of a namespace."""
        with self._gate:
            sizes = [max(0, size - HEADER_NBYTES) for size in self._store().all_sizes(self._deadline())]
            store_bytes, capacity = self._store().store()
            return Usage(len(sizes), sum(sizes), max(store_bytes, sum(sizes)), capacity)

    # One call.

    def _answered(self, count: int, ask: Callable[[], list[Status]]) -> list[Status]:
        """Ask, and give every key the status of whatever trouble there was with the whole store (C10)."""
        if not count:
            return []
        try:
            return ask()
        except BackendTimeout:
            return [Status.TIMEOUT] * count
        except BackendUnavailable:
            return [Status.UNAVAILABLE] * count

    def _get(self, keys: Sequence[str], locs: Pages, deadline: float) -> list[Status]:
        digests = [digest_of(key) for key in keys]
        wanted = locs.nbytes + HEADER_NBYTES
        sizes, marks = self._look(digests)
        statuses = [_MISS if size is None else _SIZE_MISMATCH for size in sizes]
        there = [position for position, size in enumerate(sizes) if size == wanted]
        if self._memory is not None:
            there, asked = self._memory.fill(there, digests, marks, locs), there
            for position in set(asked).difference(there):
                statuses[position] = OK
        for part in self._load([digests[position] for position in there], locs.nbytes, deadline):
            kept = []
            for i, record in part:
                position = there[i]
                status = _MISS if record.lost else record.verdict(locs.nbytes, digests[position])
                if status is OK:
                    record.copy_out(locs.views(position))
                    kept.append((digests[position], record))
                statuses[position] = status
            if self._memory is not None:
                mark_of = self._store().mark_of
                self._memory.keep([(d, mark_of(record, marks.get(d)), record) for d, record in kept])
        for digest, status in zip(digests, statuses, strict=True):
            if status in (_CORRUPT, _SIZE_MISMATCH):
                self._bad.add(digest)
                self._forget([digest])
            elif status is OK:  # another instance may have mended it
                self._bad.discard(digest)
        return statuses

    def _look(self, digests: list[bytes]) -> tuple[list[int | None], dict[bytes, Hashable | None]]:
        """Ask the store for sizes and, where there is an L1, for marks of what is not known to be bad."""
        if self._memory is None:
            return self._store().sizes(digests), {}
        found = self._store().marks(digests)
        return [it and it[0] for it in found], {
            digest: it[1]
            for digest, it in zip(digests, found, strict=True)
            if it is not None and digest not in self._bad
        }

    def _forget(self, digests: Sequence[bytes]) -> None:
        if self._memory is not None:
            self._memory.drop(digests)

    def _load(self, digests: list[bytes], nbytes: int, deadline: float) -> Iterator[list[tuple[int, Record]]]:
        """Load values of a known size and give them as they come, with their places; one that went is lost.

        A value that goes between the question and the load leaves a RESP adapter
        waiting for ever. So an adapter gets the time that a slow one needs; then
        it is replaced, and what it did not load is asked of the store itself.
        A part's records are the caller's until it asks for the next.

        Raises: BackendTimeout, BackendUnavailable: LMCache or the store is at fault, not one value.
        """
        if not digests:
            return
        records = self._scratch.records(len(digests), nbytes)
        adapter, until = self._adapter("load", deadline), deadline
        if self.options.l2 == "resp":
            patience_s = _PATIENCE_S + len(digests) * nbytes / _SLOW_NBYTES_PER_S
            until = min(deadline, time.monotonic() + patience_s)
        left: list[int] = []
        known = 0
        for loaded in adapter.load(digests, records, until):
            if loaded is None:
                break
            yield [(known + i, records[known + i]) for i, there in enumerate(loaded) if there]
            left += [known + i for i, there in enumerate(loaded) if not there]
            known += len(loaded)
        if known < len(digests) and time.monotonic() >= deadline:
            raise BackendTimeout("'lmcache' gave no answer in time")
        left += range(known, len(digests))
        if not left:
            self._scratch.done(records)
            return
        adapter.broken = self.options.l2 == "resp"
        records = self._scratch.records(len(left), nbytes)  # LMCache may still write into the others
        self._store().read([digests[i] for i in left], records)
        yield list(zip(left, records, strict=True))

    def _set(self, keys: Sequence[str], locs: Pages, deadline: float) -> list[Status]:
        digests = [digest_of(key) for key in keys]
        if not self._writing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise BackendTimeout("'lmcache' is busy with another set")
        try:
            return self._set_alone(digests, locs, deadline)
        finally:
            self._writing.release()

    def _set_alone(self, digests: list[bytes], locs: Pages, deadline: float) -> list[Status]:
        first: dict[bytes, int] = {}
        for position, digest in enumerate(digests):
            first.setdefault(digest, position)
        present = self._good(list(first), locs.nbytes, deadline)
        wanted = [digest for digest in first if digest not in present]
        results = dict.fromkeys(present, OK)
        if wanted:
            records = self._scratch.records(len(wanted), locs.nbytes)

            def seal(start: int, stop: int) -> None:
                for digest, record in zip(wanted[start:stop], records[start:stop], strict=True):
                    record.seal(locs.views(first[digest]), locs.nbytes, digest)

            results |= self._put(wanted, records, deadline, seal)
        return [results[digest] for digest in digests]

    def _good(self, digests: list[bytes], nbytes: int, deadline: float) -> set[bytes]:
        """Tell which keys hold a value that stays (C4); what stands in a new one's way is removed."""
        sizes = self._store().sizes(digests)
        good = {
            digest
            for digest, size in zip(digests, sizes, strict=True)
            if size == nbytes + HEADER_NBYTES and digest not in self._bad
        }
        in_the_way = [
            digest
            for digest, size in zip(digests, sizes, strict=True)
            if size is not None and digest not in good
        ]
        if in_the_way:
            self._store().remove(in_the_way)
        return good

    def _put(
        self, digests: list[bytes], records: list[Record], deadline: float, seal: Callable[[int, int], None]
    ) -> dict[bytes, Status]:
        adapter = self._adapter("store", deadline)
        stored = adapter.store(digests, records, deadline, seal)
        if stored is None:
            raise BackendTimeout("'lmcache' gave no answer in time")
        if not all(stored):
            adapter.broken = self.options.l2 == "resp"
        else:
            if self._memory is not None:
                marks = [self._store().mark_of(record, None) for record in records]
                self._memory.keep(list(zip(digests, marks, records, strict=True)))
            self._scratch.done(records)
        nbytes = records[0].byte_array.nbytes
        results: dict[bytes, Status] = {}
        sizes: list[int | None] = [nbytes] * len(digests) if all(stored) else self._store().sizes(digests)
        for digest, size in zip(digests, sizes, strict=True):
            results[digest] = OK if size == nbytes else self._store().refusal(nbytes)
            if size == nbytes:
                self._bad.discard(digest)
        return results

    def _adapter(self, use: Use, deadline: float) -> Adapter:
        if self._adapters is None:
            raise BackendUnavailable("'lmcache' has no adapter", remedy="Open it again.")
        return self._adapters.sound(use, deadline)

    def _store(self) -> Ledger:
        if self._ledger is None:
            raise BackendUnavailable("'lmcache' has no store", remedy="Open it again.")
        return self._ledger

    def _deadline(self) -> float:
        return time.monotonic() + self.config.timeout_s


#: In a fork's child: the parent's adapters, kept so that no destructor ends what the parent uses.
_parents: list[object] = []


def _calls(count: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Split a batch so that its private copy stays small."""
    step = max(1, min(_CALL_PAGES, _CALL_NBYTES // max(1, nbytes)))
    for start in range(0, count, step):
        yield start, min(start + step, count)
