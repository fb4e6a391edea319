"""Reserving and confirming at 1, 5 and 10 million pages: flat, however many pages the metadata holds.

    python benchmarks/hf3fs_reserve.py [--pages 1000000,5000000,10000000] [--calls 100] [--json]

A page table is filled to its last page, its database as large as it gets; then batches of 128 new keys, by
their digests, are reserved, each by evicting 128 others, and confirmed. Also on an empty file, where pages
were never used. Best of three medians; the floor is that the largest takes at most twice the smallest.

What limits it: each new and each evicted key dirties a page of sqlite's B-tree, and the B-trees grow a
level at a time. SGLang's mini server holds free pages in a list and keys in a dictionary, in memory, saved
each 60 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import closing

from hicache_hf3fs._pagetable import PageTable
from hicache_hf3fs.metadata import PageFileLabel, Terms, new_ticket

BATCH = 128
NBYTES = 65536
FLOOR = 2.0
TERMS = Terms(60.0, 15.0)


def fill(path: str, pages: int) -> None:
    """Write rows for every page straight into the database, keys in order, for speed."""
    with closing(sqlite3.connect(path, isolation_level=None)) as base:
        base.execute("PRAGMA synchronous=OFF")
        base.execute("DROP INDEX page_place")
        base.execute("BEGIN")
        base.execute("UPDATE rank SET fresh=num_pages")
        base.execute(
            "INSERT INTO space (namespace, pages, nbytes) VALUES ('n', ?, ?)", (pages, pages * NBYTES)
        )
        places = list(range(pages))
        random.Random(pages).shuffle(places)
        step = 2**128 // (pages + 1)
        rows = ((1, (i * step).to_bytes(16, "big"), 1, place, NBYTES, i, 0) for i, place in enumerate(places))
        base.executemany("INSERT INTO page VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        base.execute("CREATE UNIQUE INDEX page_place ON page (rank, idx)")
        base.execute("COMMIT")


def run(table: PageTable, calls: int) -> tuple[float, float]:
    """Give the median milliseconds of a reservation and of a confirmation."""
    reserve, confirm = [], []
    for _ in range(calls):
        keys, lease = [os.urandom(16) for _ in range(BATCH)], new_ticket()
        started = time.perf_counter()
        taken = table.reserve("kv", "n", keys, lease, time.monotonic())
        between = time.perf_counter()
        written = [(key, r.page, NBYTES, 1) for key, r in zip(keys, taken, strict=True)]
        assert all(r.page >= 0 for r in taken)
        middle = time.perf_counter()
        table.confirm("kv", "n", written, [], lease)
        confirm.append((time.perf_counter() - middle) * 1e3)
        reserve.append((between - started) * 1e3)
    return statistics.median(reserve), statistics.median(confirm)


def measure(pages: int, calls: int, *, full: bool) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as folder:
        path = f"{folder}/metadata.sqlite"
        table = PageTable(path, TERMS, now=time.monotonic(), after_crash=False)
        table.initialize("kv", PageFileLabel("0" * 32, NBYTES, pages))
        if full:
            table.close()
            fill(path, pages)
            table = PageTable(path, TERMS, now=time.monotonic(), after_crash=False)
        results = [run(table, calls) for _ in range(3)]
        table.close()
    return min(r for r, _ in results), min(c for _, c in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pages", default="1000000,5000000,10000000")
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    sizes = [int(text) for text in given.pages.split(",")]
    rows = {
        (full, pages): measure(pages, given.calls, full=full) for full in (False, True) for pages in sizes
    }
    if given.json:
        sys.stdout.write(json.dumps([[*where, *ms] for where, ms in rows.items()]) + "\n")
    for (full, pages), (reserve, confirm) in rows.items():
        state = "full, evicting" if full else "empty"
        sys.stdout.write(
            f"{pages:>10,} pages, {state:14}  reserve {reserve:6.3f} ms  confirm {confirm:6.3f} ms\n"
        )
    steep = [full for full in (False, True) if rows[full, sizes[-1]][0] > FLOOR * rows[full, sizes[0]][0]]
    sys.stdout.write(f"flat within a factor of {FLOOR:g}: {'no' if steep else 'yes'}\n")
    return 1 if steep else 0


if __name__ == "__main__":
    sys.exit(main())
