"""What the Prometheus observer costs a call: HiCache with it and without it, in turns, in one run.

    python benchmarks/prometheus_cost.py [--rounds 7] [--json]

- ``null``: HiCache.get of 128 pages over a backend that does nothing, so that
  nothing hides the cost; printed in microseconds a call.
- ``file``: the same of 128 pages of 64 KiB over the file backend, in memory
  (/dev/shm where there is one), against the same call unobserved.

Each round opens a cache with observers and one without, and takes the shortest
of many calls of each; printed is the median over the rounds. ``file`` over its
floor of unobserved/observed time 0.97 is the goal: what cannot be seen beside
the fastest store that there is costs nobody anything.

What limits it: the event (a frozen dataclass and a dictionary of statuses) is
about half; the rest is pluggy's list of hooks and twenty additions.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core_facade import BATCH, PAGE_NBYTES, NullStorage

from hicache_core import (
    Component,
    HiCache,
    HostPool,
    Identity,
    Placement,
    StorageBackendFactory,
    observers,
)
from hicache_prometheus.recorder import Recorder, recorder

CALLS = 400
FLOOR = 0.97


def shortest_us(work: Callable[[], Any]) -> float:
    """Give the shortest of many calls: what it costs when nobody else wants the core."""
    best = float("inf")
    for _ in range(CALLS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best * 1e6


def call_us(backend: str, options: dict[str, Any], pool: HostPool, *, observed: bool, folder: Path) -> float:
    """Time a get of stored pages, with an observer that counts into a shared file or with none."""
    observers.unregister(recorder)
    watching = Recorder(folder) if observed else None
    if watching:
        observers.register(watching)
    try:
        pages, hashes = pool.pages(range(BATCH)), [f"page-{n}" for n in range(BATCH)]
        with HiCache.open(
            backend, identity=Identity.for_tests(), placement=Placement(), pools=[pool], options=options
        ) as cache:
            assert all(cache.set(hashes, pages))
            return shortest_us(lambda: cache.get(hashes, pages))
    finally:
        observers.unregister(watching)


def main() -> int:
    """Measure, print, and compare with the floor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    StorageBackendFactory.register_backend("null", NullStorage.__module__, "NullStorage")
    component = Component("kv", shard="whole", byte_order="opaque", format="bytes", page_nbytes=PAGE_NBYTES)
    pool = HostPool.from_buffer(bytearray(BATCH * PAGE_NBYTES), component)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    place = Path(tempfile.mkdtemp(prefix="hicache-cost-", dir=memory))
    try:
        rows = {}
        for name, options in (("null", {}), ("file", {"root": str(place / "kv"), "capacity": "1gib"})):
            taken: dict[bool, list[float]] = {True: [], False: []}
            for number in range(arguments.rounds):
                for observed in (True, False) if number % 2 else (False, True):
                    taken[observed].append(call_us(name, options, pool, observed=observed, folder=place))
            ratios = [off / on for off, on in zip(taken[False], taken[True], strict=True)]
            rows[name] = {
                "observed_us": statistics.median(taken[True]),
                "unobserved_us": statistics.median(taken[False]),
                "added_us": statistics.median(taken[True]) - statistics.median(taken[False]),
                "ratio": statistics.median(ratios),
                "ratios": ratios,
            }
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if arguments.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    for name, row in {} if arguments.json else rows.items():
        sys.stdout.write(
            f"{name}: {row['observed_us']:.1f} us observed, {row['unobserved_us']:.1f} us not; "
            f"{row['added_us']:+.2f} us a call, ratio {row['ratio']:.3f}\n"
        )
    return 0 if rows["file"]["ratio"] >= FLOOR else 1


if __name__ == "__main__":
    sys.exit(main())
