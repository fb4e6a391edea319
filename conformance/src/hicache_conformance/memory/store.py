"""The store itself: pages by namespace and key, with checksums, a capacity and a journal.

It knows no slots, no deadlines and no sockets. A process uses it directly, or
server.py puts it behind a socket and client.py gives the same verbs over that.

Invariants: every value in the table is whole; the bytes of all values never
exceed the capacity once a verb has returned; an entry's ``verdict`` is OK until a
get has failed on it (C6), and only then may a set replace it (C4).
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from hicache_core.status import Status
from hicache_core.storage import Usage

Eviction = Literal["lru", "none"]

#: The verbs that server.py offers and client.py forwards.
VERBS = ("contains", "get", "set", "remove", "touch", "clear", "usage", "hello", "peek", "poke")


class Entry:
    """One value, its checksum at the time of the set, and what is known against it."""

    __slots__ = ("checksum", "value", "verdict")

    def __init__(self, value: bytes) -> None:
        self.value = value
        self.checksum = zlib.crc32(value)
        self.verdict = Status.OK


class Store:
    """Pages of any number of namespaces, least recently used first; thread-safe.

    Args:
        capacity: most bytes of values; None for no limit.
        eviction: ``lru``, or ``none``: a full store says NO_SPACE.
        journal: a file to which each change is appended before it is OK, and
            from which a new store starts; it is never shortened.
    """

    def __init__(
        self,
        capacity: int | None = None,
        eviction: Eviction = "lru",
        journal: Path | None = None,
    ) -> None:
        self.capacity = capacity
        self.eviction = eviction
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], Entry] = OrderedDict()
        self._nbytes = 0
        self._journal: BinaryIO | None = None
        if journal is not None:
            self._replay(journal)

    def hello(self) -> tuple[Eviction, bool]:
        """Tell a client how it evicts and whether it keeps a journal."""
        return self.eviction, self._journal is not None

    def contains(self, namespace: str, keys: Sequence[str]) -> list[Status]:
        """Tell what a get would give, as far as is known (C6); no use in the sense of eviction."""
        with self._lock:
            entries = [self._entries.get((namespace, key)) for key in keys]
            # A page has bytes, so an empty value is nobody's page.
            return [
                Status.MISS if e is None else e.verdict if e.value else Status.SIZE_MISMATCH for e in entries
            ]

    def get(self, namespace: str, keys: Sequence[str], nbytes: int) -> list[tuple[Status, bytes]]:
        """Give each key's value if it has this size and is intact."""
        with self._lock:
            return [self._get(namespace, key, nbytes) for key in keys]

    def set(self, namespace: str, keys: Sequence[str], values: Sequence[bytes]) -> list[Status]:
        """Keep each value under its key, unless a good one of the same size is there."""
        with self._lock:
            return [self._set(namespace, key, value) for key, value in zip(keys, values, strict=True)]

    def remove(self, namespace: str, keys: Sequence[str]) -> list[Status]:
        """Drop each key's value."""
        with self._lock:
            return [Status.OK if self._drop((namespace, key)) else Status.MISS for key in keys]

    def touch(self, namespace: str, keys: Sequence[str]) -> None:
        """Count as a use."""
        with self._lock:
            for key in keys:
                if (namespace, key) in self._entries:
                    self._entries.move_to_end((namespace, key))

    def clear(self, namespace: str) -> int:
        """Drop every value of a namespace."""
        with self._lock:
            doomed = [name for name in self._entries if name[0] == namespace]
            return sum(self._drop(name) for name in doomed)

    def usage(self, namespace: str) -> Usage:
        """Count."""
        with self._lock:
            sizes = [len(entry.value) for name, entry in self._entries.items() if name[0] == namespace]
            return Usage(len(sizes), sum(sizes), self._nbytes, self.capacity)

    def peek(self, namespace: str, key: str) -> bytes | None:
        """Read a value as it is, for the harness."""
        with self._lock:
            entry = self._entries.get((namespace, key))
            return entry.value if entry else None

    def poke(self, namespace: str, key: str, value: bytes | None, *, intact: bool) -> None:
        """Write or drop a value behind everybody's back, with its own checksum or the old one."""
        with self._lock:
            old = self._entries.get((namespace, key))
            self._drop((namespace, key))
            if value is not None:
                entry = Entry(value)
                if old is not None and not intact:
                    entry.checksum = old.checksum
                self._keep((namespace, key), entry)

    def _get(self, namespace: str, key: str, nbytes: int) -> tuple[Status, bytes]:
        entry = self._entries.get((namespace, key))
        if entry is None:
            return Status.MISS, b""
        if len(entry.value) != nbytes:
            entry.verdict = Status.SIZE_MISMATCH
        elif zlib.crc32(entry.value) != entry.checksum:
            entry.verdict = Status.CORRUPT
        else:
            entry.verdict = Status.OK
            self._entries.move_to_end((namespace, key))
            return Status.OK, entry.value
        return entry.verdict, b""

    def _set(self, namespace: str, key: str, value: bytes) -> Status:
        old = self._entries.get((namespace, key))
        if old is not None and old.verdict is Status.OK and len(old.value) == len(value):
            self._entries.move_to_end((namespace, key))
            return Status.OK
        self._drop((namespace, key))
        if not self._make_room(len(value)):
            return Status.NO_SPACE
        self._keep((namespace, key), Entry(value))
        self._log("set", namespace, key, value)
        return Status.OK

    def _make_room(self, nbytes: int) -> bool:
        if self.capacity is None:
            return True
        if nbytes > self.capacity:
            return False
        while self._nbytes + nbytes > self.capacity:
            if self.eviction == "none":
                return False
            self._drop(next(iter(self._entries)))
        return True

    def _keep(self, name: tuple[str, str], entry: Entry) -> None:
        self._entries[name] = entry
        self._nbytes += len(entry.value)

    def _drop(self, name: tuple[str, str]) -> bool:
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        self._nbytes -= len(entry.value)
        self._log("remove", *name, b"")
        return True

    def _log(self, verb: str, namespace: str, key: str, value: bytes) -> None:
        if self._journal is not None:
            head = [verb, namespace, key, len(value), zlib.crc32(value)]
            self._journal.write(json.dumps(head).encode() + b"\n" + value + b"\n")
            self._journal.flush()

    def _replay(self, path: Path) -> None:
        """Apply a journal up to its first bad record, cut the rest, and go on appending."""
        path.touch()
        good = 0
        with path.open("rb+") as file:
            while head := _read_head(file):
                verb, namespace, key, nbytes, checksum = head
                value = file.read(nbytes)
                if file.read(1) != b"\n" or zlib.crc32(value) != checksum:
                    break
                self._drop((namespace, key))
                if verb == "set" and self._make_room(nbytes):
                    self._keep((namespace, key), Entry(value))
                good = file.tell()
            file.truncate(good)
        self._journal = path.open("ab")


def _read_head(file: BinaryIO) -> tuple[str, str, str, int, int] | None:
    line = file.readline()
    try:
        verb, namespace, key, nbytes, checksum = json.loads(line if line.endswith(b"\n") else b"")
    except ValueError:
        return None
    return verb, namespace, key, nbytes, checksum
