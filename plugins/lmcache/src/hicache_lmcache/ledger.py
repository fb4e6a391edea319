"""What is in LMCache's store, asked of the store itself: sizes, removal, listing.

LMCache answers a question about a dead server with "not there", and a load of a
value that is missing or has another size can break it (native.py). So the store
is asked first: a folder by ``stat``, Redis by STRLEN. Both name values the way
LMCache 0.5.6 does; the canary at open() proves that they still agree.

For pages that are also in memory (memory.py) the store is asked for a mark of
the value: what differs whenever the value does.
"""

from __future__ import annotations

import importlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

from hicache_core.errors import BackendDependencyMissing, BackendTimeout, BackendUnavailable
from hicache_core.status import Status
from hicache_lmcache.native import model_name
from hicache_lmcache.options import LMCacheOptions
from hicache_lmcache.record import HEADER_NBYTES, Record

_EXTENSION = ".data"
#: One command instead of one a key: a third of the time for 128 of them.
_LENGTHS = "local r={} for i,k in ipairs(KEYS) do r[i]=redis.call('STRLEN',k) end return r"
#: The same with each value's header.
_HEADS = (
    "local r={} for i,k in ipairs(KEYS) do "
    f"r[2*i-1]=redis.call('STRLEN',k) r[2*i]=redis.call('GETRANGE',k,0,{HEADER_NBYTES - 1}) end return r"
)
_SCAN = 1000
#: A file is known by its times only once these are so many ticks old that a change would show in them.
_TICKS = 5
#: The tick of a file system whose times stand still for longer than this is taken to be FAT's, two seconds.
_LONGEST_TICK_S, _COARSE_TICK_S = 0.05, 2.0


class Ledger(Protocol):
    """Questions to the store; each raises BackendUnavailable or BackendTimeout."""

    def sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        """Give the stored bytes under each key; None where there is nothing."""

    def marks(self, digests: Sequence[bytes]) -> list[tuple[int, Hashable | None] | None]:
        """Give each value's size, and its mark, or None where that could miss a change."""

    def mark_of(self, record: Record, asked: Hashable | None) -> Hashable | None:
        """Give the mark of a value that was loaded after ``asked`` was said of it; None: it was stored."""

    def read(self, digests: Sequence[bytes], records: Sequence[Record]) -> None:
        """Read values that LMCache did not load; one that is missing or has another size is lost."""

    def remove(self, digests: Sequence[bytes]) -> None:
        """Remove values; missing ones are ignored."""

    def refusal(self, nbytes: int) -> Status:
        """Guess why a store failed: NO_SPACE, DENIED or ERROR."""

    def clear(self, deadline: float) -> int:
        """Remove every value of the namespace."""

    def all_sizes(self, deadline: float) -> Iterator[int]:
        """Give the size of every value of the namespace."""

    def store(self) -> tuple[int, int | None]:
        """Give the bytes that the whole store takes, and its capacity."""

    def close(self) -> None:
        """Give everything back."""

    def abandon_in_child(self) -> None:
        """Never use the parent's connections."""


class FolderLedger:
    """Files in the namespace's folder, one a value."""

    def __init__(self, root: str, namespace: str) -> None:
        self.folder = os.path.join(root, namespace)
        self._root = root
        self._start = f"{model_name(namespace)}@0x00000000@0@"
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            problem = "" if os.access(self.folder, os.R_OK | os.W_OK | os.X_OK) else "permission denied"
        except OSError as error:
            problem = str(error)
        if problem:
            raise BackendUnavailable(
                f"opening 'lmcache' in {self.folder}",
                value=problem,
                remedy=f"Give user {os.getuid()} a folder that it can write.",
            )

    def path(self, digest: bytes) -> str:
        return f"{self.folder}/{self._start}{digest.hex()}{_EXTENSION}"

    def sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        return [self._size(self.path(digest)) for digest in digests]

    def _size(self, path: str) -> int | None:
        try:
            return os.stat(path).st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BackendUnavailable("asking 'lmcache' for a page", value=str(error)) from error

    def marks(self, digests: Sequence[bytes]) -> list[tuple[int, Hashable | None] | None]:
        """A file's mark is its inode and times; one as young as its times are coarse has none: whoever
        changes it, or makes another one with its inode, may leave them as they are.
        """
        settled_ns = self._settled_ns
        found: list[tuple[int, Hashable | None] | None] = []
        for digest in digests:
            try:
                it = os.stat(self.path(digest))
            except FileNotFoundError:
                found.append(None)
                continue
            except OSError as error:
                raise BackendUnavailable("asking 'lmcache' for a page", value=str(error)) from error
            old = time.time_ns() - it.st_ctime_ns > settled_ns
            mark = (it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns)
            found.append((it.st_size, mark if old else None))
        return found

    def mark_of(self, record: Record, asked: Hashable | None) -> Hashable | None:
        return asked  # if the file was replaced meanwhile, one that nothing has any more

    @cached_property
    def _settled_ns(self) -> int:
        """How old a file's times must be: some ticks of the folder's clock, which is looked at."""
        with tempfile.TemporaryFile(dir=self.folder) as file:
            seen: list[int] = []
            until = time.monotonic() + _LONGEST_TICK_S
            while len(seen) < 3 and time.monotonic() < until:
                os.fchmod(file.fileno(), 0o600)
                now = os.fstat(file.fileno()).st_ctime_ns
                seen += [now] if now not in seen else []
        ticks = [later - earlier for earlier, later in itertools.pairwise(seen)]
        tick = max(ticks) if len(ticks) == 2 else int(_COARSE_TICK_S * 1e9)
        return _TICKS * max(tick, 1_000_000)

    def read(self, digests: Sequence[bytes], records: Sequence[Record]) -> None:
        for digest, record in zip(digests, records, strict=True):
            try:
                with open(self.path(digest), "rb") as file:
                    record.take(file.read(record.byte_array.nbytes + 1))
            except OSError:
                record.lost = True

    def remove(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            try:
                os.unlink(self.path(digest))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise BackendUnavailable("removing a page of 'lmcache'", value=str(error)) from error

    def refusal(self, nbytes: int) -> Status:
        try:
            room = os.statvfs(self.folder)
        except OSError:
            return Status.UNAVAILABLE
        if room.f_bavail * room.f_frsize < nbytes or not room.f_favail:
            return Status.NO_SPACE
        return Status.ERROR if os.access(self.folder, os.W_OK | os.X_OK) else Status.DENIED

    def clear(self, deadline: float) -> int:
        removed = 0
        for entry in self._values(deadline):
            try:
                os.unlink(entry.path)
                removed += 1
            except FileNotFoundError:
                continue
        return removed

    def all_sizes(self, deadline: float) -> Iterator[int]:
        for entry in self._values(deadline):
            try:
                yield entry.stat().st_size
            except FileNotFoundError:
                continue

    def _values(self, deadline: float) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if entry.name.endswith(_EXTENSION):
                        _in_time(deadline)
                        yield entry
        except FileNotFoundError:
            return
        except OSError as error:
            raise BackendUnavailable("listing the pages of 'lmcache'", value=str(error)) from error

    def store(self) -> tuple[int, int | None]:
        total = 0
        for where, _, names in os.walk(self._root):
            for name in names:
                try:
                    total += os.stat(os.path.join(where, name)).st_size
                except FileNotFoundError:
                    continue
        return total, None

    def close(self) -> None:
        """Remove the folders of unfinished files that nobody uses: they are empty, or their writer was killed
        and left a file of an hour ago.
        """
        try:
            for entry in list(os.scandir(self.folder)):
                if entry.name.startswith(".unfinished-"):
                    self._tidy(entry.path)
        except OSError:
            return

    def _tidy(self, folder: str) -> None:
        for entry in list(os.scandir(folder)):
            if time.time() - entry.stat().st_mtime > 3600:
                os.unlink(entry.path)

    def abandon_in_child(self) -> None:
        return None


class RedisLedger:
    """Values in Redis or Valkey, asked over a connection of its own."""

    def __init__(self, options: LMCacheOptions, namespace: str, timeout_s: float) -> None:
        try:
            self._redis: Any = importlib.import_module("redis")
        except ModuleNotFoundError as error:
            raise BackendDependencyMissing(
                "lmcache", "redis", remedy="Run: pip install 'hicache-lmcache[lmcache]'"
            ) from error
        self._where = f"{options.host}:{options.port}"
        self._start = f"{model_name(namespace)}@00000000@0@"
        self._scripts = True
        self._client: Any = self._redis.Redis(
            host=options.host,
            port=options.port,
            username=options.username or None,
            password=options.password.get_secret_value() if options.password else None,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=None,
        )
        self._ask("opening 'lmcache'", lambda: self._client.ping())

    def name(self, digest: bytes) -> str:
        return self._start + digest.hex()

    def sizes(self, digests: Sequence[bytes]) -> list[int | None]:
        answers = self._of_each(digests, _LENGTHS, lambda pipe, name: pipe.strlen(name))
        return [size or None for size in answers]

    def marks(self, digests: Sequence[bytes]) -> list[tuple[int, Hashable | None] | None]:
        """A value's mark is its header: whose page it is, its size and its checksum. Redis knows of no change
        by itself, so bytes that are damaged behind a header that is not are not noticed.
        """

        def both(pipe: Any, name: str) -> None:
            pipe.strlen(name)
            pipe.getrange(name, 0, HEADER_NBYTES - 1)

        answers = self._of_each(digests, _HEADS, both)
        return [
            (size, bytes(head)) if size else None
            for size, head in zip(answers[::2], answers[1::2], strict=True)
        ]

    def mark_of(self, record: Record, asked: Hashable | None) -> Hashable | None:
        return bytes(record.byte_array[:HEADER_NBYTES])

    def _of_each(
        self, digests: Sequence[bytes], script: str, ask_one: Callable[[Any, str], object]
    ) -> list[Any]:
        """Ask the same of each value, with one command where scripts are allowed."""
        names = [self.name(digest) for digest in digests]

        def ask() -> list[Any]:
            if self._scripts:
                try:
                    answers: list[Any] = self._client.eval(script, len(names), *names)
                    return answers
                except (
                    self._redis.exceptions.ResponseError
                ):  # forbidden to this user, or keys of several nodes
                    self._scripts = False
            with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    ask_one(pipe, name)
                answers = pipe.execute()
                return answers

        answers: list[Any] = self._ask("asking 'lmcache' for pages", ask)
        return answers

    def read(self, digests: Sequence[bytes], records: Sequence[Record]) -> None:
        names = [self.name(digest) for digest in digests]
        values = self._ask("reading pages of 'lmcache'", lambda: self._client.mget(names))
        for record, value in zip(records, values, strict=True):
            record.take(value or b"")

    def remove(self, digests: Sequence[bytes]) -> None:
        names = [self.name(digest) for digest in digests]
        self._ask("removing pages of 'lmcache'", lambda: self._client.unlink(*names))

    def refusal(self, nbytes: int) -> Status:
        used, capacity = self.store()
        return Status.NO_SPACE if capacity is not None and used + nbytes > capacity else Status.ERROR

    def clear(self, deadline: float) -> int:
        removed = 0
        for names in self._batches(deadline):
            removed += self._ask("clearing 'lmcache'", lambda names=names: self._client.unlink(*names))
        return removed

    def all_sizes(self, deadline: float) -> Iterator[int]:
        for names in self._batches(deadline):
            with self._client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.strlen(name)
                yield from self._ask("counting the pages of 'lmcache'", pipe.execute)

    def _batches(self, deadline: float) -> Iterator[list[bytes]]:
        """Give the names of the namespace's values, each once."""
        seen: set[bytes] = set()
        cursor = 0
        while True:
            _in_time(deadline)
            cursor, names = self._ask(
                "listing the pages of 'lmcache'",
                lambda cursor=cursor: self._client.scan(cursor, match=f"{self._start}*", count=_SCAN),
            )
            fresh = [name for name in names if name not in seen]
            seen.update(fresh)
            if fresh:
                yield fresh
            if not cursor:
                return

    def store(self) -> tuple[int, int | None]:
        memory = self._ask("asking 'lmcache' for its size", lambda: self._client.info("memory"))
        return int(memory["used_memory"]), int(memory.get("maxmemory") or 0) or None

    def close(self) -> None:
        self._client.close()

    def abandon_in_child(self) -> None:
        self._client = None

    def _ask(self, what: str, question: Any) -> Any:
        try:
            return question()
        except self._redis.exceptions.TimeoutError as error:
            raise BackendTimeout(
                what, value=f"{self._where} gave no answer in time", remedy="Look at it, or raise timeout_s."
            ) from error
        except self._redis.exceptions.RedisError as error:
            raise BackendUnavailable(
                what, value=f"{self._where}: {error}", remedy="Start it, or correct host, port and password."
            ) from error
        except OSError as error:
            raise BackendUnavailable(what, value=f"{self._where}: {error}") from error


def _in_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise BackendTimeout(
            "going through the pages of 'lmcache'", remedy="Raise timeout_s: every value is looked at."
        )
