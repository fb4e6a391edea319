"""LMCache's L1 in front of a store: pages that this process has loaded or stored, in memory.

It answers for a page only while the store itself still holds that very value:
each page is kept with a mark of what the store held when it came (ledger.py),
and is given out when the store, asked for this get, says the same mark. So a
page that somebody removed, cleared, replaced or damaged is none here either
(C4, C5, C6, C9), whichever process did it. That question is what an L1 hit
costs; the store's bytes are not read.

LMCache's ``L1Manager`` holds the memory and the locks. Which page goes when
there is no room is decided here, the least recently used first, since its
manager alone only says that there is none. Its locks end by themselves after a
time, and with them the promise that a page being read stays: here they do not.

Facts: lmcache 0.5.6, ``v1/distributed/{l1_manager,config}.py``.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from hicache_core.errors import BackendIncompatible, BackendUnavailable
from hicache_core.memory import Pages
from hicache_core.status import OK
from hicache_lmcache.engines import finalize
from hicache_lmcache.native import hush
from hicache_lmcache.record import Record

#: Seconds after which LMCache takes a lock for forgotten; its counters are 32 bit.
_FOR_EVER_S = 1 << 30
_TAG = "hicache"
_ALIGN_NBYTES = 1 << 12


class Memory:
    """Pages in an L1Manager of one's own; thread-safe."""

    def __init__(self, nbytes: int, object_key: Callable[[bytes], Any]) -> None:
        self.hits = 0
        self._object_key = object_key
        self._lock = threading.Lock()
        #: What is in the L1, least recently used first: digest -> the store's mark of it.
        self._marks: OrderedDict[bytes, Hashable] = OrderedDict()
        #: Removed here, and still being read.
        self._leaving: set[bytes] = set()
        api, config, manager, errors, memory, torch = (
            importlib.import_module(name)
            for name in (
                "lmcache.v1.distributed.api",
                "lmcache.v1.distributed.config",
                "lmcache.v1.distributed.l1_manager",
                "lmcache.v1.distributed.error",
                "lmcache.v1.memory_management",
                "torch",
            )
        )
        hush(manager)
        # At the end of a process that closes nothing, each page would warn on the terminal that it is lost.
        memory.TensorMemoryObj.__del__ = finalize
        if "LMCACHE_LOG_LEVEL" not in os.environ and _unless_full not in memory.logger.filters:
            memory.logger.addFilter(_unless_full)
        self._ok = errors.L1Error.SUCCESS
        self._layout = lambda size: api.MemoryLayoutDesc([torch.Size([size])], [torch.uint8])
        try:
            # Private memory, of that size from the start: a name would make it a segment of /dev/shm.
            room = config.L1MemoryManagerConfig(
                size_in_bytes=nbytes, use_lazy=False, align_bytes=_ALIGN_NBYTES, shm_name=""
            )
            self._manager = manager.L1Manager(
                config.L1ManagerConfig(room, read_ttl_seconds=_FOR_EVER_S, write_ttl_seconds=_FOR_EVER_S)
            )
        except TypeError as error:
            raise BackendIncompatible(
                "lmcache", "its L1 is made otherwise", value=str(error), remedy="Drop l1_bytes."
            ) from error
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            raise BackendUnavailable(
                "opening LMCache's L1", value=f"{nbytes} bytes: {error}", remedy="Lower l1_bytes."
            ) from error

    def fill(
        self,
        positions: Sequence[int],
        digests: Sequence[bytes],
        marks: Mapping[bytes, Hashable | None],
        locs: Pages,
    ) -> list[int]:
        """Fill the slots of pages that are here under the store's marks; give the others' positions."""
        with self._lock:
            here = [i for i in positions if self._is_here(digests[i], marks.get(digests[i]))]
            keys = [self._object_key(digests[i]) for i in here]
            found = self._manager.reserve_read(keys)
            for i in here:
                self._marks.move_to_end(digests[i])
        filled = set()
        try:
            for i, key in zip(here, keys, strict=True):
                record = Record(_bytes_of(found[key][1]))
                if record.verdict(locs.nbytes, digests[i]) is OK:
                    record.copy_out(locs.views(i))
                    filled.add(i)
        finally:
            self._manager.finish_read(keys)
        self.hits += len(filled)
        return [i for i in positions if i not in filled]

    def keep(self, pages: Sequence[tuple[bytes, Hashable | None, Record]]) -> None:
        """Take copies of pages of one size under the store's marks; those without a mark are left."""
        with self._lock:
            self._delete(self._leaving)
            fresh = {
                digest: (mark, record)
                for digest, mark, record in pages
                if mark is not None and not self._is_here(digest, mark)
            }
            self._delete([digest for digest in fresh if digest in self._marks])
            wanted = [digest for digest in fresh if digest not in self._leaving]
            if not wanted:
                return
            places = self._reserve(wanted, pages[0][2].byte_array.nbytes)
            for digest, place in places.items():
                place[:] = fresh[digest][1].byte_array
            keys = {digest: self._object_key(digest) for digest in places}
            done = self._manager.finish_write(list(keys.values()), _TAG)
            for digest, key in keys.items():
                if done[key] == self._ok:
                    self._marks[digest] = fresh[digest][0]

    def drop(self, digests: Sequence[bytes]) -> None:
        """Forget pages."""
        with self._lock:
            self._delete([digest for digest in digests if digest in self._marks])

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._delete(list(self._marks))

    def __len__(self) -> int:
        return len(self._marks)

    def used(self) -> int:
        """Give the bytes that LMCache has given out."""
        return int(self._manager.get_memory_usage()[0])

    def close(self) -> None:
        """Give the memory back; nobody reads any more."""
        with self._lock:
            self._marks.clear()
            self._manager.close()

    def _is_here(self, digest: bytes, mark: Hashable | None) -> bool:
        return mark is not None and self._marks.get(digest) == mark

    def _reserve(self, digests: list[bytes], nbytes: int) -> dict[bytes, memoryview]:
        """Reserve memory for the first of these that fit, the oldest pages making room."""
        taken = -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES
        used, total = self._manager.get_memory_usage()
        digests = digests[: total // taken]
        keys = [self._object_key(digest) for digest in digests]
        lacking = len(keys) * taken - (total - used)
        while keys:
            if lacking > 0:
                oldest = list(itertools.islice(self._marks, -(-lacking // taken)))
                self._delete(oldest)
            found = self._manager.reserve_write(keys, [False] * len(keys), self._layout(nbytes), _TAG)
            items = [found[key][1] for key in keys]
            if all(item is not None for item in items):
                return dict(zip(digests, map(_bytes_of, items), strict=True))
            if not self._marks:
                break
            lacking = len(keys) * taken  # in pieces, or of other sizes
        return {}

    def _delete(self, digests: Sequence[bytes] | set[bytes]) -> None:
        if not digests:
            return
        keys = {digest: self._object_key(digest) for digest in digests}
        gone = self._manager.delete(list(keys.values()))
        for digest, key in keys.items():
            self._marks.pop(digest, None)
            if gone[key].name == "KEY_IS_LOCKED":
                self._leaving.add(digest)
            else:
                self._leaving.discard(digest)


def _unless_full(record: logging.LogRecord) -> bool:
    """Drop what LMCache warns of each time that there is no room: here that is how room is made."""
    return not record.getMessage().startswith("Failed to batched allocate")


def _bytes_of(item: Any) -> memoryview:
    return memoryview(item.tensor.numpy())
