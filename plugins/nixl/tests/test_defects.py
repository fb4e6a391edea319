"""Defects seen elsewhere, each shown not to be here; facts and places are in docs/nixl.md.

SGLang's are of 0.5.23, ``sglang/srt/mem_cache/storage/nixl``; NIXL's of nixl-cu12 1.5.1 and 1.4.1.
"""

from __future__ import annotations

import os
import threading
import time

import pytest
from nixl_builders import (
    NBYTES,
    Slots,
    a_component,
    a_config,
    an_arena,
    as_a_stranger,
    file_of,
    keys_of,
    open_descriptors,
    page_bytes,
    stored,
)

from hicache_core import Placement, Shard, Status
from hicache_nixl._native import Transfer

OK, MISS, CORRUPT, SIZE_MISMATCH = Status.OK, Status.MISS, Status.CORRUPT, Status.SIZE_MISMATCH
UNAVAILABLE, TIMEOUT = Status.UNAVAILABLE, Status.TIMEOUT


def test_one_missing_page_spoils_no_other(opened):
    """hicache_nixl.py, _batch_transfer: one bool for a batch, [False, False] where one of two is missing."""
    arena = an_arena(6)
    storage = opened(arena.pool)
    keys = keys_of(arena, "a", "b", "c")
    stored(storage, arena, [keys[0], keys[2]])
    assert storage.batch_get(keys, arena.pages([3, 4, 5])) == [OK, MISS, OK]
    arena.check({3: page_bytes(keys[0], NBYTES), 5: page_bytes(keys[2], NBYTES)}, undefined=[4])


def test_one_missing_object_spoils_no_other(objects, seaweed):
    """The same over OBJ; NIXL tells of the failure while the other gets still write into their memory."""
    arena = an_arena(6, 1 << 20)
    storage = objects(seaweed, arena.pool)
    keys = keys_of(arena, "a", "b", "c")
    stored(storage, arena, [keys[0], keys[2]])
    assert storage.batch_get(keys, arena.pages([3, 4, 5])) == [OK, MISS, OK]
    arena.check({3: page_bytes(keys[0], 1 << 20), 5: page_bytes(keys[2], 1 << 20)}, undefined=[4])


@pytest.mark.parametrize("left", [0, 1, 63, 64, NBYTES, NBYTES + 63], ids=lambda n: f"{n} bytes")
@pytest.mark.parametrize("io", ["aio", "uring"])
def test_truncated_and_empty_files_are_no_hits(opened, tmp_path, left, io):
    """nixl_utils.py counts any file as a page; nixl 1.4.1 says DONE for a short read, with stale bytes."""
    arena = an_arena(3)
    storage = opened(arena.pool, io=io)
    keys = keys_of(arena, "a", "b")
    stored(storage, arena, keys)
    os.truncate(file_of(tmp_path / "kv", storage, keys[0]), left)
    assert storage.batch_contains(keys) == [CORRUPT, OK]
    assert storage.batch_get(keys, arena.pages([2, 1])) == [CORRUPT, OK]
    arena.check(undefined=[2])
    assert storage.batch_set(keys, arena.pages([0, 1])) == [OK, OK]
    assert storage.batch_get(keys[:1], arena.pages([2])) == [OK]
    arena.check({2: page_bytes(keys[0], NBYTES)})


@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
@pytest.mark.parametrize("at", [0, NBYTES - 1, NBYTES + 10, "another's"], ids=str)
def test_damaged_and_exchanged_files_are_no_hits(opened, tmp_path, at, direct):
    """hicache_nixl.py, batch_get_v1: whatever has a page's name is the page."""
    arena = an_arena(4)
    storage = opened(arena.pool, direct_io=direct)
    keys = keys_of(arena, "a", "b")
    stored(storage, arena, keys)
    path = file_of(tmp_path / "kv", storage, keys[0])
    if at == "another's":
        path.write_bytes(file_of(tmp_path / "kv", storage, keys[1]).read_bytes())
    else:
        content = bytearray(path.read_bytes())
        content[at if at < NBYTES else at - NBYTES - 64] ^= 1  # the trailer is what a file ends with
        path.write_bytes(content)
    assert as_a_stranger(storage).batch_get(keys, arena.pages([2, 3])) == [CORRUPT, OK]
    arena.check({3: page_bytes(keys[1], NBYTES)}, undefined=[2])
    assert storage.batch_set(keys, arena.pages([0, 1])) == [OK, OK]
    assert storage.batch_get(keys, arena.pages([2, 3])) == [OK, OK]
    arena.check({2: page_bytes(keys[0], NBYTES), 3: page_bytes(keys[1], NBYTES)})


@pytest.mark.parametrize("io", ["aio", "uring"])
def test_a_file_cut_between_look_and_read_fails_alone_and_the_agent_goes_on(
    opened, tmp_path, monkeypatch, io
):
    """nixl 1.4.1 is dead for ever after one failed read; 1.5.1 tells of it for the whole transfer."""
    from hicache_nixl.filemoves import Mover

    arena = an_arena(8)
    storage = opened(arena.pool, io=io)
    keys = keys_of(arena, "a", "b", "c", "d")
    stored(storage, arena, keys)
    honest = Mover.open

    def cut_after_opening(mover, batch, positions):
        pages = honest(mover, batch, positions)
        os.truncate(file_of(tmp_path / "kv", storage, keys[1]), 100)
        return pages

    monkeypatch.setattr(Mover, "open", cut_after_opening)
    statuses = as_a_stranger(storage).batch_get(keys, arena.pages([4, 5, 6, 7]))
    assert statuses == [OK, Status.ERROR, OK, OK]
    arena.check({i + 4: page_bytes(keys[i], NBYTES) for i in (0, 2, 3)}, undefined=[5])
    monkeypatch.undo()
    assert storage.batch_get(keys, arena.pages([4, 5, 6, 7])) == [OK, CORRUPT, OK, OK]


@pytest.mark.parametrize("size", ["shorter", "one byte less", "longer"])
def test_objects_of_another_size_are_no_hits(objects, seaweed, size):
    """nixl 1.5.1, OBJ: a get of 256 KiB from an object of 128 KiB is DONE, with a stale tail."""
    arena = an_arena(2, 128 << 10)
    storage = objects(seaweed, arena.pool)
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    name = f"{storage.config.namespace.id}/{keys[0]}"
    value = seaweed.read(name)
    changed = {"shorter": value[: 64 << 10], "one byte less": value[:-1], "longer": bytes(64 << 10) + value}
    seaweed.write(name, changed[size])
    assert storage.batch_get(keys, arena.pages([1])) == [SIZE_MISMATCH]
    assert storage.batch_contains(keys) == [SIZE_MISMATCH]
    assert storage.batch_set(keys, arena.pages([0])) == [OK]
    assert storage.batch_get(keys, arena.pages([1])) == [OK]


def test_a_stale_tail_is_never_believed(objects, seaweed):
    """The same, with staging memory that still holds this very object's trailer from the get before."""
    arena = an_arena(2, 128 << 10)
    storage = objects(seaweed, arena.pool)
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    assert storage.batch_get(keys, arena.pages([1])) == [OK]
    name = f"{storage.config.namespace.id}/{keys[0]}"
    seaweed.write(name, seaweed.read(name)[: 64 << 10])
    assert storage.batch_get(keys, arena.pages([1])) == [SIZE_MISMATCH]


@pytest.mark.parametrize("io", ["aio", "uring"])
@pytest.mark.parametrize("nbytes", [1, 511, 4096, 5000, 12345])
@pytest.mark.parametrize("segments", [1, 3])
def test_o_direct_takes_odd_sizes_and_places(opened, io, nbytes, segments):
    """SGLang under O_DIRECT: copies unless base and stride are multiples of 4 KiB; NIXL says EINVAL."""
    if nbytes < segments:
        segments = 1
    arena = an_arena(6, nbytes, segments)
    direct = opened(arena.pool, io=io, direct_io=True)
    keys = keys_of(arena, "a", "b", "c")
    stored(direct, arena, keys)
    assert direct.batch_get(keys, arena.pages([3, 4, 5])) == [OK] * 3
    arena.check({i + 3: page_bytes(key, nbytes) for i, key in enumerate(keys)})
    other = an_arena(3, nbytes)
    plain = opened(other.pool)
    assert plain.batch_contains(keys) == [OK] * 3
    assert plain.batch_get(keys, other.pages()) == [OK] * 3
    other.check({i: page_bytes(key, nbytes) for i, key in enumerate(keys)})


@pytest.mark.parametrize("io", ["aio", "uring"])
@pytest.mark.parametrize(
    ("nbytes", "segments", "stride", "staged"),
    [
        (8192, 1, 8192, False),
        (8192, 2, 12288, False),  # a gap behind each segment, all of it aligned
        (8192, 2, 4104, True),  # the first slot is aligned, the others are not
        (8200, 1, 12288, True),  # an odd size in aligned slots
    ],
    ids=["aligned", "aligned, gaps", "odd stride", "odd size"],
)
def test_o_direct_copies_only_what_it_cannot_reach(opened, monkeypatch, io, nbytes, segments, stride, staged):
    from hicache_nixl.places import Moving

    copies = []
    honest = Moving.copy_out
    monkeypatch.setattr(Moving, "copy_out", lambda *a: (copies.append(1), honest(*a))[1])
    slots = Slots(6, nbytes, segments, stride)
    storage = opened(slots.pool, io=io, direct_io=True)
    keys = slots.stored(storage, "a", "b", "c")
    assert storage.batch_get(keys, slots.pool.pages([3, 4, 5])) == [OK] * 3
    assert [slots[i + 3] == page_bytes(key, nbytes) for i, key in enumerate(keys)] == [True] * 3
    assert len(copies) == (3 if staged else 0)


def test_descriptors_over_a_thousand_batches(opened):
    """sglang#21078: registrations, and the descriptors in them, were not given back."""
    arena = an_arena(4)
    storage = opened(arena.pool)
    keys = keys_of(arena, "a", "b", "c", "d")
    stored(storage, arena, keys[:2])
    storage.batch_get(keys, arena.pages())
    before, threads = open_descriptors(), threading.active_count()
    for i in range(500):
        assert storage.batch_get(keys, arena.pages()) == [OK, OK, MISS, MISS]
        fresh = keys_of(arena, f"{i}x", f"{i}y")
        assert storage.batch_set(fresh, arena.pages([0, 1])) == [OK, OK]
    assert (open_descriptors(), threading.active_count()) == (before, threads)


@pytest.mark.parametrize("io", ["aio", "uring"])
def test_descriptors_over_failures(opened, tmp_path, monkeypatch, io):
    """LMCache#2936: a transfer that fails leaves its files open; each costs us an agent, too."""
    from hicache_nixl.filemoves import Mover

    arena = an_arena(4)
    storage = opened(arena.pool, io=io)
    keys = keys_of(arena, "a", "b", "c", "d")
    stored(storage, arena, keys)
    honest_open, honest_seal = Mover.open, Mover._seal

    def cut(mover, batch, positions):
        pages = honest_open(mover, batch, positions)
        os.truncate(batch.paths[0], 100)
        return pages

    def read_only(mover, batch, positions):
        honest_seal(mover, batch, positions)
        with open(os.devnull, "rb") as nothing:
            for position in positions[:1]:
                os.dup2(nothing.fileno(), batch.descriptors[position], inheritable=False)

    def fail_twice(number: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Mover, "open", cut)
            assert as_a_stranger(storage).batch_get(keys, arena.pages()) == [Status.ERROR, OK, OK, OK]
            patch.setattr(Mover, "_seal", read_only)
            fresh = keys_of(arena, f"{number}x", f"{number}y")
            assert storage.batch_set(fresh, arena.pages([1, 2])) == [Status.ERROR, OK]
        assert storage.batch_set(keys[:1], arena.pages([0])) == [OK]

    fail_twice(0)
    before = open_descriptors()
    for number in range(1, 25):
        fail_twice(number)
    assert open_descriptors() == before
    assert list((tmp_path / "kv").glob("*/??/.*.tmp")) == []


def test_every_rank_writes_what_it_is_asked_to(opened):
    """hicache_nixl.py, backup_skip: an MLA rank above 0 says True and writes nothing."""
    arena = an_arena(2)
    rank1 = opened(arena.pool, config=a_config(placement=Placement(tp_rank=1, tp_size=2)))
    rank0 = opened(arena.pool, config=a_config(placement=Placement(tp_rank=0, tp_size=2)))
    keys = keys_of(arena, "a")
    stored(rank1, arena, keys)
    assert rank0.batch_get(keys, arena.pages([1])) == [OK]
    arena.check({1: page_bytes(keys[0], NBYTES)})


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (Shard(pp=(0, 2)), Shard(pp=(1, 2))),
        (Shard(cp=(0, 2)), Shard(cp=(1, 2))),
        (Shard(tp=(0, 2)), Shard(tp=(1, 2))),
    ],
    ids=["pp", "cp", "tp"],
)
def test_parts_of_a_model_never_share_a_page(opened, mine, theirs):
    """hicache_nixl.py, config_suffix: PP and CP are not in the key, so a rank got another's layers."""
    a = an_arena(1, component=a_component(shard=mine))
    b = an_arena(1, component=a_component(shard=theirs))
    storage = opened(a.pool, b.pool)
    stored(storage, a, keys_of(a, "page"))
    assert storage.batch_contains(keys_of(b, "page")) == [MISS]
    assert storage.batch_get(keys_of(b, "page"), b.pages()) == [MISS]


def test_nothing_to_do_is_done_without_nixl(opened, monkeypatch):
    """nixl 1.5.1: an empty list of descriptors is IndexError."""
    arena = an_arena(1)
    storage = opened(arena.pool)
    monkeypatch.setattr(Transfer, "begin", None)
    nothing = arena.pages([])
    assert (storage.batch_get([], nothing), storage.batch_set([], nothing)) == ([], [])
    assert storage.batch_get(keys_of(arena, "a"), arena.pages()) == [MISS]


def test_clear_leaves_other_tenants_alone(opened):
    """hicache_nixl.py, clear: every file of the folder was removed."""
    arena = an_arena(2)
    mine, theirs = opened(arena.pool), opened(arena.pool, config=a_config(tenant="theirs"))
    keys = keys_of(arena, "a", "b")
    stored(mine, arena, keys)
    stored(theirs, arena, keys)
    assert mine.clear() == 2
    assert mine.batch_contains(keys) == [MISS, MISS]
    assert theirs.batch_get(keys, arena.pages()) == [OK, OK]


def test_clear_of_objects_works_and_leaves_other_tenants_alone(objects, seaweed, opened):
    """hicache_nixl.py, clear: on OBJ it did nothing."""
    arena = an_arena(2)
    mine = objects(seaweed, arena.pool)
    theirs = opened(arena.pool, config=a_config(tenant="theirs"), **seaweed.options())
    keys = keys_of(arena, "a", "b")
    stored(mine, arena, keys)
    stored(theirs, arena, keys)
    assert mine.clear() == 2
    assert mine.batch_contains(keys) == [MISS, MISS]
    assert theirs.batch_get(keys, arena.pages()) == [OK, OK]
    assert theirs.clear() == 2


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["get", "set", "contains"])
def test_a_dead_server_is_an_answer_within_the_deadline(objects, own_seaweed, verb):
    """nixl 1.5.1, OBJ: the AWS SDK retries refused connections for 25.6 s."""
    arena = an_arena(4)
    storage = objects(own_seaweed, arena.pool, timeout_s=3.0)
    keys = keys_of(arena, "a", "b", "c", "d")
    stored(storage, arena, keys[:2])
    own_seaweed.kill()
    started = time.monotonic()
    statuses = {
        "get": lambda: storage.batch_get(keys, arena.pages()),
        "set": lambda: storage.batch_set(keys, arena.pages()),
        "contains": lambda: storage.batch_contains(keys),
    }[verb]()
    assert time.monotonic() - started < 2.0
    assert statuses == [UNAVAILABLE] * 4


@pytest.mark.slow
def test_a_silent_server_is_a_timeout_and_later_the_memory_is_given_back(objects, own_seaweed):
    """hicache_nixl.py, _xfer_and_wait: no clock, and a handle released in flight still writes."""
    arena = an_arena(4)
    storage = objects(own_seaweed, arena.pool, timeout_s=1.0)
    keys = keys_of(arena, "a", "b")
    stored(storage, arena, keys)
    own_seaweed.pause()
    started = time.monotonic()
    assert storage.batch_get(keys, arena.pages([2, 3])) == [TIMEOUT, TIMEOUT]
    assert time.monotonic() - started < 2.0
    arena.check(undefined=[2, 3])
    agents = storage._store._agents
    assert agents.abandoned == 1
    arena.freeze()
    own_seaweed.resume()
    deadline = time.monotonic() + 60.0
    while agents.abandoned and time.monotonic() < deadline:
        assert storage.batch_contains(keys) == [OK, OK]
    assert agents.abandoned == 0
    arena.check()  # whatever came late went into private memory
    assert storage.batch_get(keys, arena.pages([2, 3])) == [OK, OK]


@pytest.mark.slow
def test_abandoned_calls_are_bounded(objects, own_seaweed):
    arena = an_arena(1)
    storage = objects(own_seaweed, arena.pool, timeout_s=0.3)
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    own_seaweed.pause()
    assert [storage.batch_get(keys, arena.pages())[0] for _ in range(4)] == [TIMEOUT] * 4
    started = time.monotonic()
    assert storage.batch_get(keys, arena.pages()) == [UNAVAILABLE]
    assert time.monotonic() - started < 1.0
    own_seaweed.resume()


def test_a_released_handle_is_out_of_reach(opened):
    """nixl 1.5.1: check_xfer_state or transfer on a released handle is SIGSEGV."""
    arena = an_arena(1)
    storage = opened(arena.pool)
    agents = storage._store._agents
    agent = agents.take(time.monotonic() + 5)
    descriptor = os.memfd_create("page")
    os.ftruncate(descriptor, NBYTES)
    files = agent.register("FILE", [(0, NBYTES, descriptor, "")])
    address = arena.pool.segments[0].address
    transfer = agent.start("READ", ("DRAM", [(address, NBYTES, 0)]), ("FILE", [(0, NBYTES, descriptor)]))
    assert transfer.wait(time.monotonic() + 5, hold=True)
    assert [transfer.poll() for _ in range(3)] == [True] * 3
    agent.forget(files)
    os.close(descriptor)
    agents.give(agent)


def test_threads_on_one_storage_do_not_corrupt_the_heap(opened):
    """nixl's default sync mode NONE: double free with four threads on one agent."""
    arenas = [an_arena(8) for _ in range(4)]
    storage = opened(*(arena.pool for arena in arenas))
    failures = []

    def work(number, arena):
        keys = keys_of(arena, *(f"{number}-{i}" for i in range(4)))
        stored(storage, arena, keys)
        for _ in range(100):
            if storage.batch_get(keys, arena.pages([4, 5, 6, 7])) != [OK] * 4:
                failures.append(number)

    threads = [threading.Thread(target=work, args=each) for each in enumerate(arenas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert failures == []


def test_private_memory_is_lent_again_only_when_it_has_been_judged(objects, seaweed, monkeypatch):
    """An agent given back first would let another get write over pages that are not yet copied out."""
    from hicache_nixl.agents import Agents
    from hicache_nixl.objects import ObjectStore

    arena = an_arena(2)
    storage = objects(seaweed, arena.pool)
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    steps = []
    give, judged = Agents.give, ObjectStore._judged
    monkeypatch.setattr(Agents, "give", lambda *a: (steps.append("given"), give(*a))[1])
    monkeypatch.setattr(ObjectStore, "_judged", lambda *a: (steps.append("judged"), judged(*a))[1])
    assert storage.batch_get(keys, arena.pages([1])) == [OK]
    assert steps == ["judged", "given"]
