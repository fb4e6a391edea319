"""Who takes part in a benchmark: backends through HiCache, one memcpy a batch, one system call a batch.

A contestant moves whole batches between the slots of a thread and its own place.
``set`` and ``get`` are what is timed; the rest is not. Threads of one process
share a contestant, each with its own number and slots.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hicache_cli.player import Slots, private_memory
from hicache_cli.workers import Job, open_cache
from hicache_core.cache import HiCache
from hicache_core.errors import HiCacheError, UnsupportedOperation
from hicache_core.memory import Pages
from hicache_core.status import OK, Status

#: Most buffers of one preadv or pwritev. Source: IOV_MAX of Linux.
_IOV_MAX = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """The shape of one benchmark: what every thread of every process does in a round."""

    page_nbytes: int
    batch: int
    """Pages a call."""
    batches: int
    """Calls of each verb a thread and round."""
    threads: int
    processes: int
    rounds: int
    """Rounds that count; one more goes before them to warm up and to verify."""

    @property
    def batch_nbytes(self) -> int:
        """Bytes of one call."""
        return self.page_nbytes * self.batch

    @property
    def thread_nbytes(self) -> int:
        """Bytes that one thread sets, and gets, in a round."""
        return self.batch_nbytes * self.batches


class Contestant(Protocol):
    """What a benchmark drives."""

    name: str
    troubles: Counter[str]
    """Pages by a status other than OK, per verb."""

    def open(self, plan: Plan, slots: Sequence[Slots]) -> None:
        """Get ready for one plan; ``slots`` holds each thread's."""

    def set(self, thread: int, number: int, hashes: Sequence[str], locs: Pages) -> None:
        """Store batch ``number`` of a thread."""

    def get(self, thread: int, number: int, hashes: Sequence[str], locs: Pages) -> None:
        """Read it back."""

    def forget(self) -> None:
        """Drop what was stored in a round; called in one process while no other is at work."""

    def close(self) -> None:
        """Give everything back."""


class Backend:
    """A backend as an engine meets it, behind HiCache."""

    def __init__(self, name: str, job: Job) -> None:
        self.name = name
        self.troubles: Counter[str] = Counter()
        self._job = job
        self._cache: HiCache | None = None

    def open(self, plan: Plan, slots: Sequence[Slots]) -> None:
        self._cache = open_cache(self._job, [each.pool for each in slots])

    def set(self, thread: int, number: int, hashes: Sequence[str], locs: Pages) -> None:
        self._count("set", self._opened.set(hashes, locs))

    def get(self, thread: int, number: int, hashes: Sequence[str], locs: Pages) -> None:
        self._count("get", self._opened.get(hashes, locs))

    def forget(self) -> None:
        try:
            self._opened.clear()
        except UnsupportedOperation:
            pass  # its pages stay, under names that no later round uses

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()

    @property
    def _opened(self) -> HiCache:
        if self._cache is None:
            raise HiCacheError(f"'{self.name}' takes part before it is open")
        return self._cache

    def _count(self, verb: str, statuses: Sequence[Status]) -> None:
        if statuses.count(OK) != len(statuses):
            self.troubles.update(f"{verb} {status.name}" for status in statuses if status is not OK)


class Memcpy:
    """One memcpy a batch, to and from memory of this process: what no store can beat with one thread."""

    name = "memcpy"

    def __init__(self) -> None:
        self.troubles: Counter[str] = Counter()
        self._slots: Sequence[Slots] = ()
        self._places: list[memoryview] = []
        self._batch_nbytes = 0

    def open(self, plan: Plan, slots: Sequence[Slots]) -> None:
        self._slots, self._batch_nbytes = slots, plan.batch_nbytes
        self._places = [private_memory(plan.thread_nbytes) for _ in range(plan.threads)]

    def set(self, thread: int, number: int, hashes: Sequence[str], locs: Pages) -> None:
        start = number * self._batch_nbytes
        self._places[thread][start : start + self._batch_nbytes] = self._slots[thread].memory

    def get(self, thread: int, number: int, hashes: Sequence[str], locs: Pages) -> None:
        start = number * self._batch_nbytes
        self._slots[thread].memory[:] = self._places[thread][start : start + self._batch_nbytes]

    def forget(self) -> None:
        pass

    def close(self) -> None:
        self._places = []


class RawFile:
    """One pwritev or preadv a batch on one preallocated file: the system calls without a store."""

    name = "raw"

    def __init__(self, folder: str) -> None:
        self.troubles: Counter[str] = Counter()
        self._path = Path(folder) / f"raw-{os.getpid()}"
        self._fd = -1
        self._plan: Plan | None = None

    def open(self, plan: Plan, slots: Sequence[Slots]) -> None:
        self._plan = plan
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.posix_fallocate(self._fd, 0, plan.thread_nbytes * plan.threads)

    def set(self, thread: int, number: int, hashes: Sequence[str], locs: Pages) -> None:
        self._move(os.pwritev, thread, number, locs)

    def get(self, thread: int, number: int, hashes: Sequence[str], locs: Pages) -> None:
        self._move(os.preadv, thread, number, locs)

    def forget(self) -> None:
        pass

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._path.unlink(missing_ok=True)

    def _move(self, call: Any, thread: int, number: int, locs: Pages) -> None:
        plan = self._plan
        if plan is None:
            raise HiCacheError("the raw file takes part before it is open")
        offset = thread * plan.thread_nbytes + number * plan.batch_nbytes
        for start in range(0, len(locs), _IOV_MAX):
            buffers = locs.buffers(start, start + _IOV_MAX)
            wanted = len(buffers) * plan.page_nbytes
            while (done := call(self._fd, buffers, offset)) < wanted:
                buffers, offset, wanted = _rest(buffers, done), offset + done, wanted - done
            offset += wanted


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Give what is left after a short transfer: Linux moves at most 2 GiB a call."""
    if done == 0:
        raise HiCacheError("the raw file ended early", remedy="See that the disk has room.")
    left = list(buffers)
    while done >= len(left[0]):
        done -= len(left.pop(0))
    left[0] = left[0][done:]
    return left


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant's description; picklable, made into the contestant in each process."""

    name: str
    job: Job | None = None
    raw_folder: str | None = None

    def make(self) -> Contestant:
        """Construct the contestant."""
        if self.job is not None:
            return Backend(self.name, self.job)
        return RawFile(self.raw_folder) if self.raw_folder is not None else Memcpy()


def options_of(name: str, given: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Pick a backend's options: ``k=v`` goes to every backend, ``NAME.k=v`` to one."""
    chosen: dict[str, str] = {}
    for key, value in given.items():
        owner, dot, field = key.partition(".")
        if not dot:
            chosen.setdefault(key, value)
        elif owner == name:
            chosen[field] = value
        elif owner not in names:
            raise HiCacheError(
                f"option '{key}' is for a backend that takes no part",
                value=owner,
                remedy=f"Name one of: {', '.join(names)}.",
            )
    return chosen
