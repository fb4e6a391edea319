"""The file backend's index at a million pages: looking a batch up, and opening a root.

    python benchmarks/file_index.py [--num-pages 1000000] [--rounds 5] [--json]

``contains``: 128 random keys a call, against xxh3-128 of each key plus a dict
lookup in a plain loop. ``open``: a whole open of the root, against reading its
journals with struct.iter_unpack into a dict of tuples; time and resident memory,
each in a process of its own. Both take turns within a round.

What limits each: contains is hashing (a third), numpy's binary search over keys
that are not in the cache, and two system calls; opening is the check of a
million records and one sort.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

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

BATCH = 128
NBYTES = 64
HEAD_NBYTES = 128
RECORD = struct.Struct("<16sQQQQQQ")

#: What, floor and stretch; a time or a size as a part of the opponent's.
GOALS = {"contains": (2.5, 1.5), "open, time": (1.0, 0.25), "open, memory": (0.5, 0.1)}


@dataclass(frozen=True)
class Row:
    """Ours as a part of the opponent's; smaller is better."""

    what: str
    ours: str
    against: str
    median: float
    best: float
    floor: float
    stretch: float


def component() -> Component:
    return Component("kv", shard="whole", byte_order="page_first", format="bf16", page_nbytes=NBYTES)


def opened(root: str) -> HiCacheStorage:
    identity = Identity.for_tests()
    config = HiCacheStorageConfig(
        namespace=Namespace.of(identity), identity=identity, placement=Placement(), timeout_s=60.0
    )
    return StorageBackendFactory.create_backend("file", config, root=root)


def hashes(start: int, count: int) -> list[str]:
    return [xxhash.xxh3_128_hexdigest(b"%d" % n) for n in range(start, start + count)]


def fill(root: str, num_pages: int) -> None:
    """Store many tiny pages."""
    storage, kv = opened(root), component()
    pool = HostPool.from_buffer(bytearray(4096 * NBYTES), kv)
    storage.add_pool(pool)
    for start in range(0, num_pages, 4096):
        count = min(4096, num_pages - start)
        assert storage.batch_set(kv.keys(hashes(start, count)), pool.pages(range(count))).count(1) == count
    storage.close()


def as_dict(root: str) -> dict[bytes, tuple[int, int, int, int]]:
    """Read all journals the plain way."""
    table: dict[bytes, tuple[int, int, int, int]] = {}
    for number, path in enumerate(sorted(Path(root).rglob("*.idx"))):
        raw = path.read_bytes()
        (room,) = struct.unpack_from("<I", raw, 80)
        body = memoryview(raw)[HEAD_NBYTES + 2 * room :]
        for digest, _, offset, length, total, _, _ in RECORD.iter_unpack(body[: len(body) // 64 * 64]):
            table[digest] = (number, offset, length, total)
    return table


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured_open(root: str, kind: str) -> None:
    """In a process of its own: print seconds and bytes of one way to open a root."""
    import numpy

    import hicache_file.storage

    assert numpy
    assert hicache_file.storage
    opened(tempfile.mkdtemp()).close()  # imports and lazy parts
    gc.collect()
    before, began, used = resident_nbytes(), time.perf_counter(), time.process_time()
    kept = as_dict(root) if kind == "dict" else opened(root)
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    gc.collect()
    sys.stdout.write(json.dumps([seconds, cpu, resident_nbytes() - before]))
    sys.stdout.flush()
    assert kept is not None
    os._exit(0)


def open_row(root: str, rounds: int) -> list[Row]:
    taken: dict[str, list[list[float]]] = {"dict": [], "ours": []}
    for number in range(rounds):
        for kind in ("dict", "ours") if number % 2 else ("ours", "dict"):
            command = [sys.executable, __file__, "--open", kind, "--root", root]
            taken[kind].append(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    times = [ours[1] / theirs[1] for ours, theirs in zip(taken["ours"], taken["dict"], strict=True)]
    sizes = [ours[2] / theirs[2] for ours, theirs in zip(taken["ours"], taken["dict"], strict=True)]
    ours, theirs = (min(taken[kind]) for kind in ("ours", "dict"))
    return [
        row("open, time", f"{ours[1]:.3f} s", f"{theirs[1]:.3f} s", times),
        row("open, memory", f"{ours[2] / 2**20:.0f} MiB", f"{theirs[2] / 2**20:.0f} MiB", sizes),
    ]


def contains_row(root: str, num_pages: int, rounds: int) -> Row:
    storage, kv = opened(root), component()
    table = as_dict(root)
    rng = random.Random(1)
    ratios, ours_us, theirs_us = [], [], []
    digest = xxhash.xxh3_128_digest
    for number in range(rounds * 200):
        batches = []
        for _ in range(2):
            chosen = [xxhash.xxh3_128_hexdigest(b"%d" % rng.randrange(num_pages)) for _ in range(BATCH)]
            batches.append(kv.keys(chosen))

        def plain(keys: list[str]) -> float:
            began = time.perf_counter()
            found = 0
            for key in keys:
                if table.get(digest(key.encode())) is not None:
                    found += 1
            taken = time.perf_counter() - began
            assert found == BATCH
            return taken

        def ours(keys: list[str]) -> float:
            began = time.perf_counter()
            found = storage.batch_contains(keys)
            taken = time.perf_counter() - began
            assert found.count(1) == BATCH
            return taken

        if number % 2:
            a, b = ours(batches[0]), plain(batches[1])
        else:
            b, a = plain(batches[1]), ours(batches[0])
        ours_us.append(a * 1e6)
        theirs_us.append(b * 1e6)
        ratios.append(a / b)
    storage.close()
    groups = [statistics.median(ratios[n * 200 : (n + 1) * 200]) for n in range(rounds)]
    return row(
        "contains", f"{statistics.median(ours_us):.0f} us", f"{statistics.median(theirs_us):.0f} us", groups
    )


def row(what: str, ours: str, against: str, ratios: list[float]) -> Row:
    return Row(what, ours, against, round(statistics.median(ratios), 3), round(min(ratios), 3), *GOALS[what])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-pages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--open", choices=("dict", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--root", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.open:
        measured_open(given.root, given.open)
    with tempfile.TemporaryDirectory(prefix="hicache-index-") as root:
        fill(root, given.num_pages)
        rows = [contains_row(root, given.num_pages, given.rounds), *open_row(root, given.rounds)]
    if given.json:
        sys.stdout.write(json.dumps([asdict(r) for r in rows]) + "\n")
    else:
        for r in rows:
            verdict = "ok" if r.median <= r.stretch else "floor" if r.median <= r.floor else "BELOW"
            sys.stdout.write(
                f"{r.what:14} ours {r.ours:>9}  against {r.against:>9}  ratio {r.median:6} best {r.best:6} "
                f"floor {r.floor} goal {r.stretch}  {verdict}\n"
            )
    return 1 if any(r.median > r.floor for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
