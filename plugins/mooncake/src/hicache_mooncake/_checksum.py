"""The checksum of a page: 16 bytes stored behind it, in memory of our own.

The page's bytes are neither copied nor changed: the trailer is one more buffer
of the object. Its digest is seeded with the object's name, so that the bytes of
another page, read from memory that was given away meanwhile, do not pass either.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hicache_core import Component, HostPool, Pages
from hicache_core.errors import BackendDependencyMissing

TRAILER_NBYTES = 16
#: Objects with a trailer have names of their own: the size would not fit the other kind's slots.
NAME_SUFFIX = "+xxh3"

_TRAILER = struct.Struct("<8sQ")
_MAGIC = b"hicache1"
#: Trailers of one lease; longer batches get a lease of their own size.
_LEASE_TRAILERS = 1024
_COMPONENT = Component(
    "trailer", shard="whole", byte_order="little", format="xxh3", page_nbytes=TRAILER_NBYTES
)


def load_hash() -> Any:
    """Import xxhash.

    Raises: BackendDependencyMissing, with what to type.
    """
    try:
        import xxhash
    except ModuleNotFoundError as error:
        remedy = "Run: pip install 'hicache-mooncake[checksum]', or leave the option checksum off."
        raise BackendDependencyMissing("mooncake", "xxhash", remedy=remedy) from error
    return xxhash


class Trailers:
    """Registered private memory for trailers, lent to one call at a time; thread-safe."""

    def __init__(self, allocate: Callable[[int], Any], register: Callable[[HostPool], None]) -> None:
        self._hash = load_hash()
        self._allocate = allocate
        self._register = register
        self._lock = threading.Lock()
        self._idle: list[HostPool] = []

    @contextmanager
    def lent(self, count: int) -> Iterator[Pages]:
        """Lend ``count`` trailers to one call."""
        pool = self._take(count)
        try:
            yield pool.pages(range(count))
        finally:
            with self._lock:
                self._idle.append(pool)

    def seal(self, names: Sequence[str], locs: Pages, trailers: Pages) -> None:
        """Write the trailer of each page."""
        for position, name in enumerate(names):
            (slot,) = trailers.views(position)
            _TRAILER.pack_into(slot, 0, _MAGIC, self._digest(name, locs.views(position)))

    def fits(self, position: int, name: str, locs: Pages, trailers: Pages) -> bool:
        """Tell whether a trailer fits the page's bytes."""
        (slot,) = trailers.views(position)
        magic, digest = _TRAILER.unpack_from(slot, 0)
        return bool(magic == _MAGIC and digest == self._digest(name, locs.views(position)))

    def trailer(self, name: str, page: bytes) -> bytes:
        """Make the trailer of a page in one piece: for tests that write values themselves."""
        return _TRAILER.pack(_MAGIC, self._digest(name, (memoryview(page),)))

    def _take(self, count: int) -> HostPool:
        with self._lock:
            for position, pool in enumerate(self._idle):
                if pool.num_pages >= count:
                    return self._idle.pop(position)
        memory = self._allocate(max(count, _LEASE_TRAILERS) * TRAILER_NBYTES)
        pool = HostPool.from_buffer(memory, _COMPONENT)
        self._register(pool)
        return pool

    def _digest(self, name: str, segments: Iterable[memoryview]) -> int:
        digest = self._hash.xxh3_64(seed=self._hash.xxh3_64_intdigest(name.encode()))
        for segment in segments:
            digest.update(segment)
        return int(digest.intdigest())
