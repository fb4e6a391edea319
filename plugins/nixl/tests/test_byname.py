"""Pages that are remembered are read by name: as right, and as wrong, as with a look at their files."""

from __future__ import annotations

import os
import time

import pytest
from nixl_builders import (
    NBYTES,
    an_arena,
    as_a_stranger,
    file_of,
    keys_of,
    open_descriptors,
    page_bytes,
    stored,
)

from hicache_core import Status
from hicache_nixl import byname
from hicache_nixl.byname import Remembered
from hicache_nixl.filemoves import Mover

OK, MISS, CORRUPT = Status.OK, Status.MISS, Status.CORRUPT

IO = pytest.mark.parametrize("io", ["aio", "uring"])


@pytest.fixture
def looked_at(monkeypatch) -> list[str]:
    """Collect the keys whose files are opened to be looked at."""
    keys: list[str] = []
    honest = Mover.open

    def noted(mover, batch, positions):
        keys.extend(batch.keys[position] for position in positions)
        return honest(mover, batch, positions)

    monkeypatch.setattr(Mover, "open", noted)
    return keys


@IO
@pytest.mark.parametrize("segments", [1, 2])
def test_what_was_set_or_read_here_is_read_without_a_look(opened, looked_at, io, segments):
    arena = an_arena(4, segments=segments)
    storage = opened(arena.pool, io=io)
    keys = keys_of(arena, "a", "b")
    stored(storage, arena, keys)
    expected = {2: page_bytes(keys[1], NBYTES), 3: page_bytes(keys[0], NBYTES)}
    assert storage.batch_get(keys, arena.pages([3, 2])) == [OK, OK]
    arena.check(expected)
    assert looked_at == []
    assert as_a_stranger(storage).batch_get(keys, arena.pages([2, 3])) == [OK, OK]
    assert looked_at == keys
    assert storage.batch_get(keys, arena.pages([3, 2])) == [OK, OK]
    arena.check(expected)
    assert looked_at == keys, "a page that was read well is remembered"


def test_names_are_taken_as_they_are(opened, tmp_path, looked_at):
    """NIXL parts the mode from the name at a colon, which no folder may have."""
    arena = an_arena(2)
    storage = opened(arena.pool, folders=(str(tmp_path / "a b, %s ü"),))
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    assert storage.batch_get(keys, arena.pages([1])) == [OK]
    arena.check({1: page_bytes(keys[0], NBYTES)})
    assert looked_at == []


@IO
def test_a_batch_mixes_remembered_unknown_and_missing_pages(opened, looked_at, io):
    arena = an_arena(6)
    first, second = opened(arena.pool, io=io), opened(arena.pool, io=io)
    keys = keys_of(arena, "a", "b", "c")
    stored(first, arena, keys[:1])
    arena.fill(1, page_bytes(keys[1], NBYTES))
    assert second.batch_set(keys[1:2], arena.pages([1])) == [OK]
    arena.freeze()
    asked = [keys[2], keys[0], keys[1], keys[0]]
    assert first.batch_get(asked, arena.pages([2, 3, 4, 5])) == [MISS, OK, OK, OK]
    assert looked_at == [keys[2], keys[1]]
    arena.check({n: page_bytes(asked[n - 2], NBYTES) for n in (3, 4, 5)})


@IO
@pytest.mark.parametrize("change", ["gone", "cut", "damaged", "another's", "replaced"])
def test_a_page_that_changed_behind_our_back_is_found_out(opened, tmp_path, io, change):
    """By another process: the neighbours are read, and nothing but the page that the key names is OK."""
    arena = an_arena(6)
    storage = opened(arena.pool, io=io)
    keys = keys_of(arena, "a", "b", "c")
    stored(storage, arena, keys)
    path, content, expected, now = file_of(tmp_path / "kv", storage, keys[1]), b"", CORRUPT, None
    if change == "gone":
        path.unlink()
        expected = MISS
    elif change == "cut":
        os.truncate(path, NBYTES // 2)
    elif change == "damaged":
        content = bytearray(path.read_bytes())
        content[NBYTES // 2] ^= 1
        path.write_bytes(content)
    elif change == "another's":
        path.write_bytes(file_of(tmp_path / "kv", storage, keys[0]).read_bytes())
    else:
        now = bytes(reversed(page_bytes(keys[1], NBYTES)))
        replaced_by_another(opened, keys[1], now)
        expected = OK
    assert storage.batch_get(keys, arena.pages([3, 4, 5])) == [OK, expected, OK]
    good = {3: page_bytes(keys[0], NBYTES), 5: page_bytes(keys[2], NBYTES)}
    arena.check(good | ({4: now} if now else {}), undefined=[] if now else [4])
    assert storage.batch_contains(keys) == [OK, expected, OK]


def replaced_by_another(opened, key: str, page: bytes) -> None:
    arena = an_arena(1)
    other = opened(arena.pool)
    assert other.batch_remove([key]) == [OK]
    arena.fill(0, page)
    assert other.batch_set([key], arena.pages([0])) == [OK]


@IO
def test_removed_and_cleared_pages_are_missing_at_once(opened, io, capfd):
    arena = an_arena(4)
    storage = opened(arena.pool, io=io)
    keys = keys_of(arena, "a", "b")
    stored(storage, arena, keys)
    assert storage.batch_remove(keys[:1]) == [OK]
    assert storage.batch_get(keys, arena.pages([2, 3])) == [MISS, OK]
    assert storage.clear() == 1
    assert storage.batch_get(keys, arena.pages([2, 3])) == [MISS, MISS]
    assert "open failed" not in capfd.readouterr().err, "NIXL was sent to files that are known to be gone"


def test_pages_that_were_evicted_here_are_forgotten(opened, capfd):
    nbytes, fitting = 64 << 10, 15
    arena = an_arena(2, nbytes)
    storage = opened(arena.pool, capacity=1 << 20)
    keys = keys_of(arena, *map(str, range(3 * fitting)))
    for key in keys:
        arena.fill(0, page_bytes(key, nbytes))
        assert storage.batch_set([key], arena.pages([0])) == [OK]
    arena.freeze()
    found = [storage.batch_get([key], arena.pages([1])) for key in keys]
    assert found.count([MISS]) == len(keys) - found.count([OK])
    assert 0 < found.count([OK]) <= fitting
    assert "open failed" not in capfd.readouterr().err


@pytest.mark.parametrize("option", [{"checksum": False}, {"direct_io": True}], ids=str)
def test_where_pages_cannot_be_read_by_name_every_file_is_looked_at(opened, looked_at, option):
    arena = an_arena(2)
    storage = opened(arena.pool, **option)
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    for _ in range(2):
        assert storage.batch_get(keys, arena.pages([1])) == [OK]
    assert looked_at == keys * 2
    assert len(storage._store._by_name.remembered) == 0


def test_descriptors_over_gets_by_name(opened, tmp_path):
    arena = an_arena(8)
    storage = opened(arena.pool)
    keys = keys_of(arena, "a", "b", "c", "d")
    stored(storage, arena, keys)
    assert storage.batch_get(keys, arena.pages([4, 5, 6, 7])) == [OK] * 4
    before = open_descriptors()
    for _ in range(200):
        assert storage.batch_get(keys, arena.pages([4, 5, 6, 7])) == [OK] * 4
    hidden = file_of(tmp_path / "kv", storage, keys[2])
    away = hidden.rename(tmp_path / "away")
    for _ in range(20):
        storage._store._by_name.remembered.keep(str(hidden), bytes(16))
        assert storage.batch_get(keys, arena.pages([4, 5, 6, 7])) == [OK, OK, MISS, OK]
    away.rename(hidden)
    assert open_descriptors() == before


@IO
def test_a_nixl_that_does_not_know_names_reads_no_file_of_ours(opened, tmp_path, monkeypatch, looked_at, io):
    """It would take the numbers for descriptors, an int each: here 0 is the very page, which would be OK."""
    honest = byname.transfer

    def nameless(agent, verb, batch, files, ranges):
        files = [(*numbers, name.replace("ro:", "xx:")) for *numbers, name in files]
        return honest(agent, verb, batch, files, ranges)

    monkeypatch.setattr(byname, "transfer", nameless)
    arena = an_arena(2)
    storage = opened(arena.pool, io=io)
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    kept = os.dup(0)
    try:
        with open(file_of(tmp_path / "kv", storage, keys[0]), "rb") as page:
            os.dup2(page.fileno(), 0)
        assert storage.batch_get(keys, arena.pages([1])) == [OK]
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert looked_at == keys
    arena.check({1: page_bytes(keys[0], NBYTES)})


def test_an_agent_that_refuses_files_that_are_there_is_not_used_again(opened, tmp_path, looked_at):
    """Its numbers are taken: every later get by name on it would be refused."""
    arena = an_arena(4)
    storage = opened(arena.pool)
    keys = keys_of(arena, "a", "b")
    stored(storage, arena, keys)
    agents, paths = storage._store._agents, storage._store._folders.paths(keys)
    agent = agents.take(time.monotonic() + 5)
    agent.register("FILE", [(0, NBYTES, byname._FIRST_NUMBER, f"ro:{paths[0]}")])
    agents.give(agent)
    for _ in range(3):
        assert storage.batch_get(keys, arena.pages([2, 3])) == [OK, OK]
    assert looked_at == keys
    arena.check({2: page_bytes(keys[0], NBYTES), 3: page_bytes(keys[1], NBYTES)})
    (fresh,) = agents._idle
    os.unlink(paths[1])
    assert storage.batch_get(keys, arena.pages([2, 3])) == [OK, MISS]
    assert agents._idle == [fresh], "a file that is gone says nothing against the agent"


def test_what_is_remembered_is_bounded_and_keeps_what_is_used():
    remembered = Remembered(most=8)
    remembered.keep("used", bytes(16))
    for number in range(100):
        remembered.keep(f"{number}", number.to_bytes(16, "big"))
        assert len(remembered) <= 8
        assert remembered.find(f"{number}") == number.to_bytes(16, "big")
        assert remembered.find("used") == bytes(16)
    assert remembered.find("0") is None
    remembered.forget("99")
    assert remembered.find("99") is None
    remembered.clear()
    assert len(remembered) == 0
