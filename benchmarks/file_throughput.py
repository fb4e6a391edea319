"""The file backend's throughput beside one raw system call a batch, as ratios within one run.

    python benchmarks/file_throughput.py [--pages 64kib] [--rounds 3] [--lanes 1,2] [--busy | --ring] [--json]

Raw is one thread in one kernel copy: one pwritev, preadv of 128 pages on one
preallocated file. Every contestant moves the same bytes from and to the same
memory, page cache warm; their order rotates from round to round, and a ratio is
taken within a round. ``best`` is the best round, ``median`` the middle one.

``limit`` is what two threads reach with the same calls on a file each, against raw in the same rounds: no
store that copies pages can be faster, and on a virtual machine it changes from minute to minute.

With ``--busy`` another process keeps one core busy meanwhile. ``--ring`` sets
pages with eviction going on, against raw overwriting a ring of the same size.

What limits each: without checksums the two kernel copies, which share the
memory bus; with them xxh3 at 10 to 12 GB/s a core on bytes that are still in
the second-level cache, one hash a copy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

from hicache_core import (
    Component,
    HiCacheStorage,
    HiCacheStorageConfig,
    HostPool,
    Identity,
    Namespace,
    Placement,
)
from hicache_core.factory import StorageBackendFactory
from hicache_core.options import parse_size

BATCH = 128
#: Bytes moved in one measurement, at least one batch.
MOVED_NBYTES = 256 << 20

#: (verb, checksums, busy, ring) -> page size -> (floor, stretch), two lanes.
GOALS = {
    ("set", False): {"64": (1.1, 1.5), "": (1.4, 1.9)},
    ("get", False): {"64": (1.2, 1.45), "": (1.5, 1.8)},
    ("set", True): {"64": (1.0, 1.4), "": (1.25, 1.55)},
    ("get", True): {"64": (1.0, 1.25), "": (1.2, 1.45), "4096": (1.0, 1.45)},
}
ONE_LANE_GOAL = (0.85, 0.95)
BUSY_GOAL = (0.65, 0.8)
RING_GOAL = (0.65, 0.85)


Times = TypeVar("Times")


@dataclass(frozen=True)
class Row:
    """One contestant, one verb, one page size."""

    what: str
    page_kib: int
    raw_gib_s: float
    ours_gib_s: float
    best: float
    median: float
    limit: float
    floor: float
    stretch: float


class Work:
    """The memory and keys of one page size."""

    def __init__(self, nbytes: int, moved_nbytes: int = MOVED_NBYTES) -> None:
        self.nbytes = nbytes
        self.batches = max(1, moved_nbytes // (nbytes * BATCH))
        self.component = Component(
            "kv", shard="whole", byte_order="page_first", format="bf16", page_nbytes=nbytes
        )
        self.buffer = bytearray(os.urandom(1 << 20)) * max(1, (self.batches * BATCH * nbytes) >> 20)
        self.pool = HostPool.from_buffer(self.buffer, self.component)
        self.slots = [self.pool.pages(range(n * BATCH, (n + 1) * BATCH)) for n in range(self.batches)]
        self.keys = [
            self.component.keys([f"{n * BATCH + i:064x}" for i in range(BATCH)]) for n in range(self.batches)
        ]
        self.total = self.batches * BATCH * nbytes


def seconds(call: Callable[[], None]) -> float:
    """Time one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def warmed(run: Callable[[], Times]) -> Times:
    """Run twice in a row and give the second result.

    A virtual machine gives free blocks back to its host after seconds; the next
    touch of such a block costs ten times a copy. What the first run frees, the
    second one takes.
    """
    run()
    return run()


@contextmanager
def folder() -> Iterator[str]:
    """Make a scratch folder beside which nothing is measured."""
    path = tempfile.mkdtemp(prefix="hicache-bench-", dir=os.environ.get("HICACHE_BENCH_DIR"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def raw(work: Work) -> tuple[float, float]:
    """Give seconds for writing and reading everything with one call a batch."""
    with folder() as path:
        fd = os.open(f"{path}/raw", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, work.total)
        step = BATCH * work.nbytes

        def write() -> None:
            for n, slots in enumerate(work.slots):
                assert os.pwritev(fd, slots.buffers(), n * step) == step

        def read() -> None:
            for n, slots in enumerate(work.slots):
                assert os.preadv(fd, slots.buffers(), n * step) == step

        times = seconds(write), seconds(read)
        os.close(fd)
        return times


def raw_on_two(work: Work) -> tuple[float, float]:
    """Give the same for two threads, each with half of every batch and a file of its own."""
    step, half = BATCH * work.nbytes // 2, BATCH // 2
    with folder() as path:
        fds = [os.open(f"{path}/{n}", os.O_RDWR | os.O_CREAT) for n in range(2)]
        for fd in fds:
            os.posix_fallocate(fd, 0, work.total // 2)

        def run(call: Callable[..., int], side: int) -> None:
            for n, slots in enumerate(work.slots):
                views = slots.buffers()[side * half : (side + 1) * half]
                assert call(fds[side], views, n * step) == step

        def both(call: Callable[..., int]) -> None:
            threads = [threading.Thread(target=run, args=(call, side)) for side in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        times = seconds(lambda: both(os.pwritev)), seconds(lambda: both(os.preadv))
        for fd in fds:
            os.close(fd)
        return times


def ours(work: Work, **options: object) -> tuple[float, float]:
    """Give seconds for setting and getting everything."""
    with folder() as path:
        storage = opened(work, root=path, **options)

        def write() -> None:
            for keys, slots in zip(work.keys, work.slots, strict=True):
                assert storage.batch_set(keys, slots).count(1) == BATCH

        def read() -> None:
            for keys, slots in zip(work.keys, work.slots, strict=True):
                assert storage.batch_get(keys, slots).count(1) == BATCH

        times = seconds(write), seconds(read)
        storage.close()
        return times


def opened(work: Work, **options: object) -> HiCacheStorage:
    """Open the backend itself, without the layer above."""
    identity = Identity.for_tests()
    config = HiCacheStorageConfig(
        namespace=Namespace.of(identity), identity=identity, placement=Placement(), timeout_s=30.0
    )
    return StorageBackendFactory.create_backend("file", config, work.pool, **options)


def ring(work: Work, rounds: int) -> list[Row]:
    """Set four times the budget of new pages, against raw overwriting a ring of the budget's size."""
    capacity = 1 << 30
    laps = 3
    step = BATCH * work.nbytes
    count = laps * capacity // step
    keys = [
        [
            work.component.keys([f"{(r * count + n) * BATCH + i:064x}" for i in range(BATCH)])
            for n in range(count)
        ]
        for r in range(rounds)
    ]

    def raw_ring() -> float:
        with folder() as path:
            fd = os.open(f"{path}/raw", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(fd, 0, capacity)
            slots = capacity // step

            def write() -> None:
                for n in range(count):
                    os.pwritev(fd, work.slots[n % work.batches].buffers(), n % slots * step)

            taken = seconds(write)
            os.close(fd)
            return taken

    def our_ring(number: int) -> float:
        with folder() as path:
            storage = opened(work, root=path, capacity=capacity)

            def write() -> None:
                for n, batch in enumerate(keys[number]):
                    assert storage.batch_set(batch, work.slots[n % work.batches]).count(1) == BATCH

            taken = seconds(write)
            storage.close()
            return taken

    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        sides = [raw_ring, lambda number=number: our_ring(number)]
        for side in sides if number % 2 else sides[::-1]:
            taken[side is not raw_ring].append(warmed(side))
    pairs = list(zip(*taken, strict=True))
    return [row("set with eviction, checksums", work, pairs, laps * capacity, RING_GOAL)]


def measure(work: Work, rounds: int, lanes: list[int], busy: bool) -> list[Row]:
    """Let raw and ours take turns."""
    contestants: list[tuple[str, Callable[[], tuple[float, float]]]] = [
        ("raw", lambda: raw(work)),
        ("limit", lambda: raw_on_two(work)),
    ]
    for count in lanes:
        for checksum in (False, True):
            name = f"{count} lane{'s' * (count > 1)}, checksums {'on' if checksum else 'off'}"
            contestants.append((name, lambda c=count, s=checksum: ours(work, lanes=c, checksum=s)))
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name, _ in contestants}
    for number in range(rounds):
        turn = number % len(contestants)
        for name, run in contestants[turn:] + contestants[:turn]:
            taken[name].append(warmed(run))
    rows = []
    for name, _ in contestants[2:]:
        for at, verb in enumerate(("set", "get")):
            pairs = [(r[at], o[at]) for r, o in zip(taken["raw"], taken[name], strict=True)]
            limit = statistics.median(
                r[at] / o[at] for r, o in zip(taken["raw"], taken["limit"], strict=True)
            )
            goal = goal_of(verb, name, work.nbytes, busy)
            what = f"{verb}, {name}{', other core busy' if busy else ''}"
            rows.append(row(what, work, pairs, work.total, goal, limit))
    return rows


def goal_of(verb: str, name: str, nbytes: int, busy: bool) -> tuple[float, float]:
    """Give the floor and the stretch of a cell; (0, 0) where none is set."""
    checksum = name.endswith("on")
    if busy:
        return BUSY_GOAL if checksum and name.startswith("2") else (0.0, 0.0)
    if name.startswith("1"):
        return (0.0, 0.0) if checksum else ONE_LANE_GOAL
    goals = GOALS[verb, checksum]
    return goals.get(str(nbytes >> 10), goals[""])


def row(
    what: str,
    work: Work,
    pairs: list[tuple[float, float]],
    total: int,
    goal: tuple[float, float],
    limit: float = 0.0,
) -> Row:
    """Turn rounds of (raw, ours) seconds into a row."""
    ratios = [r / o for r, o in pairs]
    gib = total / (1 << 30)
    return Row(
        what,
        work.nbytes >> 10,
        round(gib / min(r for r, _ in pairs), 2),
        round(gib / min(o for _, o in pairs), 2),
        round(max(ratios), 2),
        round(statistics.median(ratios), 2),
        round(limit, 2),
        *goal,
    )


@contextmanager
def other_core_busy(wanted: bool) -> Iterator[None]:
    """Keep one core busy with an endless loop in another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if wanted else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", default="64kib,256kib,1mib,4mib")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lanes", default="1,2")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--ring", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    lanes = [int(n) for n in given.lanes.split(",")]
    rows: list[Row] = []
    with other_core_busy(given.busy):
        for text in given.pages.split(","):
            work = Work(parse_size(text))
            rows += ring(work, given.rounds) if given.ring else measure(work, given.rounds, lanes, given.busy)
            del work
    if given.json:
        sys.stdout.write(json.dumps([asdict(r) for r in rows]) + "\n")
    else:
        head = f"{'what':44} {'KiB':>5} {'raw':>6} {'ours':>6} {'best':>5} {'med.':>5} "
        head += f"{'limit':>5} {'floor':>5} {'goal':>5}"
        sys.stdout.write(head + "\n")
        for r in rows:
            mark = (
                ""
                if not r.floor
                else "  ok"
                if r.best >= r.stretch
                else "  floor"
                if r.best >= r.floor
                else "  BELOW"
            )
            sys.stdout.write(
                f"{r.what:44} {r.page_kib:5} {r.raw_gib_s:6} {r.ours_gib_s:6} {r.best:5} {r.median:5} "
                f"{r.limit or '':5} "
                f"{r.floor:5} {r.stretch:5}{mark}\n"
            )
    return 1 if any(r.best < r.floor for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
