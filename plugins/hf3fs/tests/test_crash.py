"""The metadata server, killed in a burst of writes: no page lost, none leaked, index and file agree.

A few rounds run with every change, 20 with `-m slow`, 100 with `-m soak`.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hf3fs_builders import NBYTES, Opener, an_arena, component
from xxhash import xxh3_64_intdigest

from hicache_conformance.builders import page_bytes
from hicache_conformance.calls import Call, pause_for, until
from hicache_core import Status
from hicache_hf3fs._schema import inconsistencies
from hicache_hf3fs.harness import Hf3fsHarness
from hicache_hf3fs.pagefile import HEADER_NBYTES

OK = Status.OK
WRITERS, BATCH, PAGES = 3, 8, 4096
LEASE_S = 3.0


def burst(storage, arena, label: str, stop: threading.Event) -> list[str]:
    """Set batch after batch until told to stop or met with trouble; give the keys that were OK."""
    kept: list[str] = []
    count = 0
    while not stop.is_set():
        keys = component().keys([f"{label}-{count + i}" for i in range(BATCH)])
        for i, key in enumerate(keys):
            arena.fill(i, page_bytes(key, NBYTES))
        statuses = storage.batch_set(keys, arena.pages(range(BATCH)))
        kept += [key for key, status in zip(keys, statuses, strict=True) if status is OK]
        count += BATCH
        if OK not in statuses:
            break
    return kept


def lost_pages(storage, arena, keys: list[str]) -> list[str]:
    """Give the keys whose page is not there as it was set."""
    lost = []
    for start in range(0, len(keys), BATCH):
        part = keys[start : start + BATCH]
        statuses = storage.batch_get(part, arena.pages(range(len(part))))
        for i, (key, status) in enumerate(zip(part, statuses, strict=True)):
            if status is not OK or arena.read(i) != page_bytes(key, NBYTES):
                lost.append(f"{key}: {status.name}")
    return lost


def index_and_file_disagree(database: Path, root: Path) -> list[int]:
    """Read every page that the index names, round the backend, and give those with other bytes."""
    (path,) = root.glob("*.pages")
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as base, path.open("rb") as file:
        rows = base.execute("SELECT idx, checksum FROM page").fetchall()
        pages = [
            (index, os.pread(file.fileno(), NBYTES, HEADER_NBYTES + index * NBYTES), c) for index, c in rows
        ]
    return [index for index, page, checksum in pages if xxh3_64_intdigest(page) >> 1 != checksum]


def kill_in_bursts(opener: Opener, rounds: int) -> None:
    dice = random.Random(rounds)
    harness = Hf3fsHarness({})
    harness.terms = {"lease": LEASE_S, "hold": LEASE_S}
    harness.start()
    try:
        arenas = [an_arena(BATCH) for _ in range(WRITERS)]
        given = {"metadata_url": harness.options()["metadata_url"], "file_size": PAGES * NBYTES}
        storage = opener(*arenas, timeout_s=2.9, **given)
        kept: list[str] = []
        for round_ in range(rounds):
            stop = threading.Event()
            calls = [
                Call(lambda arena=arena, i=i: burst(storage, arena, f"r{round_}-w{i}", stop))  # noqa: B023
                for i, arena in enumerate(arenas)
            ]
            pause_for(dice.uniform(0.02, 0.15))
            harness.kill()
            stop.set()
            fresh = [key for call in calls for key in call.result()]
            harness.restart()
            assert lost_pages(storage, arenas[0], fresh) == [], f"round {round_}"
            with closing(sqlite3.connect(f"file:{harness._database()}?mode=ro", uri=True)) as base:
                assert inconsistencies(base) == [], f"round {round_}"
            assert index_and_file_disagree(harness._database(), opener.root) == []
            kept += fresh
        assert kept, "no page was ever stored"

        def reserved() -> int:
            storage.batch_set(component().keys(["nudge"]), arenas[0].pages([0]))
            with closing(sqlite3.connect(f"file:{harness._database()}?mode=ro", uri=True)) as base:
                return int(base.execute("SELECT COUNT(*) FROM reservation").fetchone()[0])

        assert until(lambda: reserved() == 0, 3 * LEASE_S), "pages have leaked after the lease time"
        newest = kept[-PAGES // 2 :]
        assert lost_pages(storage, arenas[0], newest) == []
        storage.close()
    finally:
        harness.stop()


@pytest.mark.clause("C14", "C4")
def test_a_server_killed_in_a_burst_loses_and_leaks_nothing(opener: Opener):
    kill_in_bursts(opener, 4)


@pytest.mark.slow
@pytest.mark.clause("C14", "C4")
def test_a_server_killed_in_a_burst_20_times_loses_and_leaks_nothing(opener: Opener):
    kill_in_bursts(opener, 20)


@pytest.mark.soak
@pytest.mark.clause("C14", "C4")
@pytest.mark.timeout(1800)
def test_a_server_killed_in_a_burst_100_times_loses_and_leaks_nothing(opener: Opener):
    kill_in_bursts(opener, 100)
