"""The metadata server, killed in a burst of writes: no page lost, none leaked, index and file agree.

In a store with room for all, and in a full one, where each set evicts. A few rounds run with every change, 20
with `-m slow`, 100 with `-m soak`; a round counts only if every writer had stored pages when the server died.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hf3fs_builders import Opener, component
from xxhash import xxh3_64_intdigest

from hicache_conformance.builders import Arena, page_bytes
from hicache_conformance.calls import Call, until
from hicache_core import Status
from hicache_hf3fs._schema import inconsistencies
from hicache_hf3fs.harness import Hf3fsHarness
from hicache_hf3fs.storage import HiCacheHF3FS

OK, MISS = Status.OK, Status.MISS
WRITERS, BATCH, NBYTES = 3, 8, 1024
#: A round writes some hundred.
FULL_PAGES, PAGES_A_ROUND = 4096, 2048
LEASE_S, TIMEOUT_S = 2.0, 1.9

COMPONENT = component(NBYTES)


def set_pages(storage: HiCacheHF3FS, arena: Arena, keys: Sequence[str]) -> list[Status]:
    for i, key in enumerate(keys):
        arena.fill(i, page_bytes(key, NBYTES))
    return storage.batch_set(keys, arena.pages(range(len(keys))))


class Burst:
    """A thread that sets batch after batch until it is told to stop or met with trouble."""

    def __init__(self, storage: HiCacheHF3FS, arena: Arena, label: str) -> None:
        self.kept: list[str] = []
        self.hit = False
        self.stop = threading.Event()
        self._storage, self._arena, self._label = storage, arena, label
        self._call = Call(self._run)

    def end(self) -> None:
        self._call.result()

    def _run(self) -> None:
        count = 0
        while not self.hit and not self.stop.is_set():
            keys = COMPONENT.keys([f"{self._label}-{count + i}" for i in range(BATCH)])
            statuses = set_pages(self._storage, self._arena, keys)
            self.kept += [key for key, status in zip(keys, statuses, strict=True) if status is OK]
            self.hit = OK not in statuses
            count += BATCH


def wrong_pages(
    storage: HiCacheHF3FS, arena: Arena, keys: Sequence[str], *, or_gone: bool = False
) -> list[str]:
    """Give the keys whose page is not there as it was set."""
    wrong = []
    for start in range(0, len(keys), BATCH):
        part = keys[start : start + BATCH]
        statuses = storage.batch_get(part, arena.pages(range(len(part))))
        for i, (key, status) in enumerate(zip(part, statuses, strict=True)):
            there = status is OK and arena.read(i) == page_bytes(key, NBYTES)
            if not there and not (or_gone and status is MISS):
                wrong.append(f"{key}: {status.name}")
    return wrong


def rows(database: Path, select: str) -> list[tuple[int, ...]]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as base:
        return base.execute(select).fetchall()


def index_and_file_disagree(database: Path, root: Path) -> list[int]:
    """Read every page that the index names, round the backend, and give those with other bytes."""
    (path,) = root.glob("*.pages")
    with path.open("rb") as file:
        pages = [
            (index, os.pread(file.fileno(), NBYTES, index * NBYTES), checksum)
            for index, checksum in rows(database, "SELECT idx, checksum FROM page")
        ]
    return [index for index, page, checksum in pages if xxh3_64_intdigest(page) >> 1 != checksum]


def _stored_by_each(bursts: Sequence[Burst]) -> bool:
    return all(burst.kept for burst in bursts)


def _stored(bursts: Sequence[Burst]) -> int:
    return sum(len(burst.kept) for burst in bursts)


def kill_in_bursts(opener: Opener, rounds: int, full: bool) -> None:
    dice = random.Random(rounds)
    harness = Hf3fsHarness({})
    harness.terms = {"lease": LEASE_S, "hold": LEASE_S}
    harness.start()
    try:
        arenas = [Arena(COMPONENT, BATCH) for _ in range(WRITERS)]
        pages = FULL_PAGES if full else PAGES_A_ROUND * rounds
        given = {"metadata_url": harness.options()["metadata_url"], "file_size": pages * NBYTES}
        storage = opener(*arenas, timeout_s=TIMEOUT_S, **given)
        database = harness._database()
        if full:
            fillers = COMPONENT.keys([f"filler-{i}" for i in range(pages)])
            for start in range(0, pages, BATCH):
                set_pages(storage, arenas[0], fillers[start : start + BATCH])
        kept: list[str] = []
        hits = 0
        for round_ in range(rounds):
            # A server that was killed gives out no old page before its reads have ended.
            first = COMPONENT.keys([f"first-{round_}"])
            assert until(lambda: set_pages(storage, arenas[0], first) == [OK])  # noqa: B023
            bursts = [Burst(storage, arena, f"r{round_}-w{i}") for i, arena in enumerate(arenas)]
            enough = dice.randrange(PAGES_A_ROUND // 4)
            assert until(lambda: _stored_by_each(bursts) and _stored(bursts) >= enough)  # noqa: B023
            harness.kill()
            for burst in bursts:
                burst.stop.set()
                burst.end()
            hits += sum(burst.hit for burst in bursts)
            fresh = [key for burst in bursts for key in burst.kept]
            assert len(fresh) < PAGES_A_ROUND, "the store is too small for what was set"
            harness.restart()
            assert wrong_pages(storage, arenas[0], fresh) == [], f"round {round_}"
            with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as base:
                assert inconsistencies(base) == [], f"round {round_}"
            assert index_and_file_disagree(database, opener.root) == []
            kept += first + fresh
        assert hits >= rounds, "few writers were in a set when the server was killed"

        def reserved() -> int:
            set_pages(storage, arenas[0], COMPONENT.keys(["nudge"]))
            return rows(database, "SELECT COUNT(*) FROM reservation")[0][0]

        assert until(lambda: reserved() == 0, 3 * LEASE_S), "pages have leaked after the lease time"
        assert wrong_pages(storage, arenas[0], kept, or_gone=full) == []
        storage.close()
    finally:
        harness.stop()


either = pytest.mark.parametrize("full", [False, True], ids=["roomy", "full"])


@either
@pytest.mark.clause("C14", "C4")
def test_a_server_killed_in_a_burst_loses_and_leaks_nothing(opener: Opener, full: bool):
    kill_in_bursts(opener, 2, full)


@either
@pytest.mark.slow
@pytest.mark.clause("C14", "C4")
def test_a_server_killed_in_a_burst_20_times_loses_and_leaks_nothing(opener: Opener, full: bool):
    kill_in_bursts(opener, 20, full)


@either
@pytest.mark.soak
@pytest.mark.clause("C14", "C4")
@pytest.mark.timeout(1800)
def test_a_server_killed_in_a_burst_100_times_loses_and_leaks_nothing(opener: Opener, full: bool):
    kill_in_bursts(opener, 100, full)
