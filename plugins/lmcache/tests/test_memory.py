"""Pages in LMCache's L1: they come from there only while the store still holds that very value."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hicache_core import Status
from hicache_core.errors import BackendUnavailable
from hicache_lmcache.record import HEADER_NBYTES, Record, digest_of

from .conftest import Opener, a_pool, first_bytes

OK, MISS, CORRUPT, SIZE_MISMATCH = Status.OK, Status.MISS, Status.CORRUPT, Status.SIZE_MISMATCH
KINDS = ["fs", "resp"]
ROOM = 1 << 20


def keys_of(pool: Any, *hashes: str) -> list[str]:
    made: list[str] = pool.component.keys(hashes)
    return made


def settled(storage: Any, keys: list[str]) -> None:
    """Wait until the store has a mark for each value: files have to be a few milliseconds old."""
    digests = [digest_of(key) for key in keys]
    pause = threading.Event()
    for _ in range(2000):
        if all(it is not None and it[1] is not None for it in storage._ledger.marks(digests)):
            return
        pause.wait(0.005)
    raise AssertionError("the files never got old enough")


def in_memory(
    opened: Opener, pool: Any, l2: str, hashes: str = "ab", room: int = ROOM
) -> tuple[Any, list[str]]:
    """Give a storage that has pages 0, 1, ... under these hashes, in its L1 too."""
    storage: Any = opened(pool, l2, l1_bytes=room)
    keys = keys_of(pool, *hashes)
    assert storage.batch_set(keys, pool.pages(range(len(keys)))) == [OK] * len(keys)
    settled(storage, keys)
    last = range(pool.num_pages - len(keys), pool.num_pages)
    assert storage.batch_get(keys, pool.pages(last)) == [OK] * len(keys)
    return storage, keys


def no_load(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*_: Any) -> None:
        raise AssertionError("the store's bytes were read")

    monkeypatch.setattr(storage, "_adapter", loaded)
    monkeypatch.setattr(storage._ledger, "read", loaded)


def file_of(tmp_path: Path, key: str) -> Path:
    return next((tmp_path / "store").rglob(f"*{digest_of(key).hex()}.data"))


@pytest.mark.parametrize("l2", KINDS)
def test_a_page_comes_from_memory(opened: Opener, l2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = a_pool(6)
    storage, keys = in_memory(opened, pool, l2)
    no_load(storage, monkeypatch)
    assert storage.batch_get([*keys, keys[0]], pool.pages([3, 4, 5])) == [OK, OK, OK]
    assert (first_bytes(pool, range(3, 6)), len(storage._memory)) == ([1, 2, 1], 2)
    assert storage._memory.hits >= 3


@pytest.mark.parametrize("l2", KINDS)
@pytest.mark.parametrize("how", ["remove", "clear"])
def test_c9_a_page_that_another_instance_took_away_is_a_miss(opened: Opener, l2: str, how: str) -> None:
    pool = a_pool(4)
    storage, keys = in_memory(opened, pool, l2)
    other = opened(pool, l2)
    assert other.batch_remove(keys) == [OK, OK] if how == "remove" else other.clear() == 2
    assert storage.batch_get(keys, pool.pages([2, 3])) == [MISS, MISS]
    assert storage.batch_contains(keys) == [MISS, MISS]


@pytest.mark.parametrize("l2", KINDS)
@pytest.mark.parametrize("how", ["remove", "clear"])
def test_what_is_taken_away_leaves_memory_too(opened: Opener, l2: str, how: str) -> None:
    pool = a_pool(4)
    storage, keys = in_memory(opened, pool, l2)
    assert len(storage._memory) == 2
    assert storage.batch_remove(keys) == [OK, OK] if how == "remove" else storage.clear() == 2
    assert (len(storage._memory), storage._memory.used()) == (0, 0)
    assert storage.batch_get(keys, pool.pages([2, 3])) == [MISS, MISS]


@pytest.mark.parametrize("l2", KINDS)
def test_a_page_that_another_instance_set_anew_is_the_new_one(opened: Opener, l2: str) -> None:
    """And the first one again, when that comes back: no copy is ever given out under another one's mark."""
    pool = a_pool(8)
    storage, (first, second) = in_memory(opened, pool, l2)
    keys = [first]
    other = opened(pool, l2)
    for page in (5, 0, 5, 0):
        assert other.batch_remove(keys) == [OK]
        assert other.batch_set(keys, pool.pages([page])) == [OK]
        for _ in range(3):
            assert storage.batch_get(keys, pool.pages([7])) == [OK]
            assert first_bytes(pool, range(7, 8)) == [page + 1]
        assert digest_of(second) in storage._memory._marks  # it makes room for nothing but its own old copy


@pytest.mark.parametrize("l2", KINDS)
def test_a_value_that_is_replaced_between_question_and_load_is_not_kept_as_the_old_one(
    opened: Opener, l2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = a_pool(4)
    storage, keys = in_memory(opened, pool, l2, "a")
    other = opened(pool, l2)
    storage._memory.clear()
    real = storage._ledger.marks

    def marks(digests: list[bytes]) -> Any:
        answer = real(digests)
        monkeypatch.setattr(storage._ledger, "marks", real)
        assert other.batch_remove(keys) == [OK]
        assert other.batch_set(keys, pool.pages([1])) == [OK]
        return answer

    monkeypatch.setattr(storage._ledger, "marks", marks)
    assert storage.batch_get(keys, pool.pages([3])) == [OK]
    assert first_bytes(pool, range(3, 4)) == [2]
    assert other.batch_remove(keys) == [OK]
    assert other.batch_set(keys, pool.pages([0])) == [OK]
    assert storage.batch_get(keys, pool.pages([3])) == [OK]
    assert first_bytes(pool, range(3, 4)) == [1]


def test_c5_damage_behind_a_page_in_memory_is_seen(opened: Opener, tmp_path: Path) -> None:
    pool = a_pool(8)
    storage, keys = in_memory(opened, pool, "fs", "abcd")
    flipped, short, gone = (file_of(tmp_path, key) for key in keys[:3])
    with flipped.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    os.truncate(short, 1000)
    gone.unlink()
    assert storage.batch_get(keys, pool.pages(range(4, 8))) == [CORRUPT, SIZE_MISMATCH, MISS, OK]
    assert storage.batch_contains(keys) == [CORRUPT, CORRUPT, MISS, OK]
    assert first_bytes(pool, range(7, 8)) == [4]


def test_over_redis_damage_behind_a_sound_header_is_unseen_and_so_no_checksum_is_promised(
    opened: Opener,
) -> None:
    """Redis keeps no time of a change: size and header are compared. The page is right all the same."""
    pool = a_pool(4)
    storage, keys = in_memory(opened, pool, "resp")
    ledger = storage._ledger
    for at, key in ((-1, keys[0]), (0, keys[1])):
        name = ledger.name(digest_of(key))
        ledger._client.setrange(name, at % (4096 + HEADER_NBYTES), b"\xff")
    assert storage.batch_get(keys, pool.pages([2, 3])) == [OK, CORRUPT]
    assert first_bytes(pool, range(2, 3)) == [1]
    assert (storage.capabilities.checksum, opened(pool, "resp").capabilities.checksum) == (False, True)


def test_a_file_that_is_as_young_as_its_times_are_coarse_is_not_kept(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one tick of the clock it could be replaced, and nothing that stat tells would show it."""
    pool = a_pool(2)
    storage: Any = opened(pool, "fs", l1_bytes=ROOM)
    assert 0 < storage._ledger._settled_ns <= 10e9
    monkeypatch.setattr(storage._ledger, "_settled_ns", 3600 * 10**9)
    keys = keys_of(pool, "a")
    assert storage.batch_set(keys, pool.pages([0])) == [OK]
    assert storage.batch_get(keys, pool.pages([1])) == [OK]
    assert len(storage._memory) == 0


def test_the_least_recently_used_pages_go_when_there_is_no_room(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = a_pool(16)
    storage, keys = in_memory(opened, pool, "resp", "abcdefgh", room=4 * 8192)
    assert (len(storage._memory), storage._memory.used()) == (4, 4 * 8192)
    assert storage.batch_get(keys[4:5], pool.pages([8])) == [OK]  # e is used, f is the oldest
    assert storage.batch_get(keys[:1], pool.pages([9])) == [OK]  # a comes in, f goes
    no_load(storage, monkeypatch)
    assert storage.batch_get([keys[i] for i in (0, 4, 6, 7)], pool.pages(range(8, 12))) == [OK] * 4
    assert first_bytes(pool, range(8, 12)) == [1, 5, 7, 8]


@pytest.mark.parametrize("l2", KINDS)
def test_a_memory_too_small_for_a_page_keeps_none(opened: Opener, l2: str) -> None:
    pool = a_pool(4, 1 << 16)
    storage, keys = in_memory(opened, pool, l2, room=1 << 15)
    assert storage.batch_get(keys, pool.pages([2, 3])) == [OK, OK]
    assert (len(storage._memory), first_bytes(pool, range(2, 4))) == (0, [1, 2])


def test_a_memory_too_small_for_a_batch_keeps_its_beginning(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = a_pool(16)
    storage, keys = in_memory(opened, pool, "resp", "abcdefgh", room=5 * 8192)
    storage._memory.clear()
    assert storage.batch_get(keys, pool.pages(range(8, 16))) == [OK] * 8
    assert (len(storage._memory), storage._memory.used()) == (5, 5 * 8192)
    no_load(storage, monkeypatch)
    assert storage.batch_get(keys[:5], pool.pages(range(8, 13))) == [OK] * 5
    assert first_bytes(pool, range(8, 13)) == [1, 2, 3, 4, 5]


_CROWDED = """
from hicache_lmcache.native import hush, key_maker
hush()
from hicache_lmcache.memory import Memory
from hicache_lmcache.record import Record, digest_of

memory = Memory(1 << 20, key_maker("0" * 32))
for number, nbytes in enumerate([4000, 90000, 5000, 2 << 20, 300000, 4000, 200000, 700000] * 20):
    pages = [(digest_of(f"{number}-{i}"), number, Record(memoryview(bytearray(nbytes)))) for i in range(4)]
    memory.keep(pages)
    assert memory.used() <= 1 << 20
print(len(memory))  # and no close
"""


def test_c16_a_crowded_memory_says_nothing(lmcache: Any) -> None:
    """LMCache warns on the terminal each time that there is no room."""
    run = subprocess.run([sys.executable, "-c", _CROWDED], capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout.strip().isdigit(), run.stderr) == (0, True, "")


@pytest.mark.parametrize("l2", KINDS)
def test_c8_threads_that_push_each_other_out_get_right_pages(opened: Opener, l2: str) -> None:
    pool = a_pool(48)
    storage, keys = in_memory(opened, pool, l2, "abcdefghijklmnop", room=5 * 8192)

    def one(number: int) -> None:
        slots = range(16 + 8 * number, 24 + 8 * number)
        for turn in range(40):
            chosen = [(turn * 5 + number * 3 + i) % 16 for i in range(8)]
            assert storage.batch_get([keys[i] for i in chosen], pool.pages(slots)) == [OK] * 8
            assert first_bytes(pool, slots) == [i + 1 for i in chosen]
            if turn % 10 == 9:
                storage._memory.clear()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one, range(4)))
    storage._memory.clear()
    storage._memory.keep([])
    assert (len(storage._memory), storage._memory.used(), storage._memory._leaving) == (0, 0, set())


def test_a_page_that_is_being_read_stays_where_it_is(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache's own lock ends after 300 seconds, and the memory of a slow reader is given to another page."""
    pool = a_pool(4)
    storage, keys = in_memory(opened, pool, "resp", "ab")
    reading, go, real = threading.Event(), threading.Event(), Record.copy_out

    def slow(record: Record, views: Any) -> None:
        reading.set()
        assert go.wait(10)
        real(record, views)

    monkeypatch.setattr(Record, "copy_out", slow)
    memory = storage._memory
    with ThreadPoolExecutor(1) as threads:
        got = threads.submit(storage.batch_get, keys[:1], pool.pages([3]))
        assert reading.wait(10)
        memory.drop([digest_of(keys[0])])
        held = memory.used()
        other = Record(memoryview(bytearray(b"x" * (4096 + HEADER_NBYTES))))
        memory.keep([(digest_of(keys[0]), b"another mark", other)])
        assert (held, len(memory), memory.used()) == (2 * 8192, 1, 2 * 8192)
        go.set()
        assert got.result(10) == [OK]
    assert first_bytes(pool, range(3, 4)) == [1]
    memory.keep([])
    assert memory.used() == 8192


def test_files_on_a_network_mount_are_refused(opened: Opener) -> None:
    with pytest.raises(BackendUnavailable, match="l1_bytes") as refused:
        opened(a_pool(1), "fs", l1_bytes=ROOM, network=True)
    assert refused.value.remedy == "Drop l1_bytes."
