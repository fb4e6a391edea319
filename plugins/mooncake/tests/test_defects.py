"""What the library, or another backend on it, does wrong, and this one must not.

Each test names the defect; the facts are those of mooncake-transfer-engine-non-cuda
0.3.13.post1, and of SGLang 0.5.23's ``mooncake_store.py`` where it is named.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from mooncake_builders import NBYTES, a_component, a_pool, a_store, content, fill, keys_of, until

from hicache_core import (
    BackendTimeout,
    BackendUnavailable,
    HostPool,
    Status,
    StorageClosed,
    StorageNotOpened,
)
from hicache_core.errors import InvalidOptions, InvalidPages
from hicache_mooncake._remover import TOMBSTONES
from hicache_mooncake._servers import Holder, Master

OK, MISS, ERROR, SIZE_MISMATCH = Status.OK, Status.MISS, Status.ERROR, Status.SIZE_MISMATCH
VERBS = {
    "contains": lambda s, k, p: s.batch_contains(k),
    "exists": lambda s, k, p: s.batch_exists(k),
    "get": lambda s, k, p: s.batch_get(k, p.pages([0])),
    "set": lambda s, k, p: s.batch_set(k, p.pages([0])),
    "remove": lambda s, k, p: s.batch_remove(k),
    "touch": lambda s, k, p: s.touch(k),
    "clear": lambda s, k, p: s.clear(),
    "add_pool": lambda s, k, p: s.add_pool(a_pool()),
    "drop_pool": lambda s, k, p: s.drop_pool(p),
}


# Calls that crash the process.


@pytest.mark.parametrize("verb", VERBS)
def test_a_call_before_setup_is_refused_instead_of_a_crash(verb):
    storage = a_store(master="127.0.0.1:1")
    with pytest.raises(StorageNotOpened):
        VERBS[verb](storage, keys_of("a"), a_pool())


@pytest.mark.parametrize("verb", VERBS)
def test_a_call_after_close_is_refused_instead_of_a_crash(master, opened, verb):
    pool = a_pool()
    storage = opened(master, pool)
    storage.close()
    with pytest.raises(StorageClosed):
        VERBS[verb](storage, keys_of("a"), pool)


def test_close_while_calls_run_waits_for_them_instead_of_a_crash(master, holder, opened):
    pools = [a_pool(pages=32, nbytes=65536) for _ in range(4)]
    storage = opened(master, *pools)
    keys = keys_of(*(f"{i}-" for i in range(32)), nbytes=65536)
    odd: list[object] = []

    def work(pool):
        try:
            while True:
                statuses = set(storage.batch_set(keys, pool.pages(range(32))))
                statuses |= set(storage.batch_get(keys, pool.pages(range(32))))
                if statuses != {OK}:
                    odd.append(statuses)
        except StorageClosed:
            pass

    threads = [threading.Thread(target=work, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    storage.close()
    for thread in threads:
        thread.join(20)
    assert (odd, [thread.is_alive() for thread in threads]) == ([], [False] * 4)


def test_a_forked_child_is_refused_and_ends_without_a_crash(master, holder, opened):
    pool = a_pool()
    storage = opened(master, pool)
    keys = keys_of("a")
    assert storage.batch_set(keys, pool.pages([0])) == [OK]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            storage.batch_contains(keys)
        except StorageClosed:
            storage.close()
            del storage
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.batch_get(keys, pool.pages([1])) == [OK]


def test_memory_that_was_never_registered_is_refused_instead_of_a_crash(master, holder, opened):
    """TCP takes any address, RDMA rejects it, and a pointer past its mapping ends the process."""
    storage, stranger = opened(master, a_pool()), a_pool()
    with pytest.raises(InvalidPages):
        storage.batch_get(keys_of("a"), stranger.pages([0]))


# Set-up that hangs or lies.


def test_a_dead_master_costs_no_90_seconds(real):
    started = time.monotonic()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BackendUnavailable) as raised:
            a_store(master=address, segment_size=0).open()
    assert time.monotonic() - started < 5
    assert str(raised.value) == (
        f"opening 'mooncake': master {address} cannot be reached: Connection refused. "
        "Start mooncake_master there, or correct the option master."
    )


def test_a_master_that_takes_connections_and_is_silent_costs_no_more_than_the_deadline(real):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        started = time.monotonic()
        with pytest.raises(BackendUnavailable):
            a_store(master=f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=2.0, segment_size=0).open()
    assert time.monotonic() - started < 3


def test_a_paused_master_is_a_timeout_on_opening(own_master):
    own_master.pause()
    started = time.monotonic()
    with pytest.raises(BackendUnavailable) as raised:
        a_store(master=own_master.address, timeout_s=2.0, segment_size=0).open()
    own_master.resume()
    assert time.monotonic() - started < 3
    assert isinstance(raised.value, BackendTimeout) or "master" in str(raised.value)


@pytest.mark.parametrize("server", ["http://127.0.0.1:1/metadata", "etcd://127.0.0.1:1"])
def test_a_dead_metadata_server_is_told_before_two_minutes_are_lost(master, server):
    started = time.monotonic()
    with pytest.raises(BackendUnavailable) as raised:
        a_store(master=master.address, metadata_server=server, segment_size=0).open()
    assert f"metadata server {server} cannot be reached" in str(raised.value)
    assert time.monotonic() - started < 2


def test_rdma_without_a_device_is_an_error_instead_of_tcp(master, monkeypatch, tmp_path):
    monkeypatch.setattr("hicache_mooncake._preflight.INFINIBAND", tmp_path / "none")
    with pytest.raises(InvalidOptions) as raised:
        a_store(master=master.address, protocol="rdma").open()
    assert "this machine has no RDMA device (write protocol='tcp')" in str(raised.value)


def test_a_named_device_that_is_absent_is_an_error(master, monkeypatch, tmp_path):
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr("hicache_mooncake._preflight.INFINIBAND", tmp_path)
    with pytest.raises(InvalidOptions) as raised:
        a_store(master=master.address, protocol="rdma", device="mlx5_0,mlx5_7").open()
    assert "device='mlx5_7' is not in this machine (there are: mlx5_0)" in str(raised.value)


def test_opening_leaves_no_warm_up_key_behind(master, holder, opened):
    """SGLang's class puts a key at each start and never removes it."""
    before = master.admin._get("/get_all_keys")
    opened(master, a_pool()).close()
    assert master.admin._get("/get_all_keys") == before


# Codes that mean something else.


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("stored", [NBYTES // 2, NBYTES - 1, NBYTES + 1, 2 * NBYTES])
def test_an_object_of_another_size_is_no_hit(master, holder, opened, segments, stored):
    """SGLang's class takes any positive count; the multi-buffer call says -800 as for a dead owner."""
    pool = a_pool(segments=segments)
    storage = opened(master, pool)
    keys = keys_of("good", "odd", "none")
    assert storage.batch_set(keys[:1], pool.pages([0])) == [OK]
    holder.put(storage.config.namespace.qualify(keys[1]), b"x" * stored)
    assert storage.batch_get(keys, pool.pages([1, 2, 3])) == [OK, SIZE_MISMATCH, MISS]
    assert storage.batch_contains(keys) == [OK, SIZE_MISMATCH, MISS]


@pytest.mark.parametrize("known", [False, True], ids=["unseen", "seen_by_a_get"])
def test_a_put_over_an_object_of_another_size_is_no_empty_ok(master, holder, opened, known):
    """The library answers 0 and keeps the old bytes."""
    pool = a_pool()
    storage = opened(master, pool)
    keys = keys_of("a")
    holder.put(storage.config.namespace.qualify(keys[0]), b"x" * 100)
    if known:
        assert storage.batch_get(keys, pool.pages([1])) == [SIZE_MISMATCH]
    fill(pool, 0, b"\x07" * NBYTES)
    assert storage.batch_set(keys, pool.pages([0])) == [OK]
    assert storage.batch_contains(keys) == [OK]
    assert storage.batch_get(keys, pool.pages([1])) == [OK]
    assert content(pool, 1) == b"\x07" * NBYTES


def test_a_put_that_somebody_never_finished_is_taken_over(master, holder, opened):
    """The library answers 0 to every put of such a key for 30 s, and stores nothing."""
    pool = a_pool()
    storage = opened(master, pool)
    keys = keys_of("a")
    assert holder.begin(storage.config.namespace.qualify(keys[0]), NBYTES) == 0
    assert storage.batch_get(keys, pool.pages([1])) == [MISS]
    fill(pool, 0, b"\x08" * NBYTES)
    assert storage.batch_set(keys, pool.pages([0])) == [OK]
    assert storage.batch_get(keys, pool.pages([1])) == [OK]
    assert content(pool, 1) == b"\x08" * NBYTES


def test_a_page_that_is_just_being_written_is_waited_for(master, holder, opened):
    pool = a_pool()
    storage = opened(master, pool)
    keys = keys_of("a")
    name = storage.config.namespace.qualify(keys[0])
    assert holder.begin(name, NBYTES) == 0
    found: list[object] = []
    reader = threading.Thread(target=lambda: found.append(storage.batch_get(keys, pool.pages([1]))))
    reader.start()
    assert reader.is_alive()
    assert holder.finish(name, b"\x09" * NBYTES) == 0
    reader.join(10)
    assert (found, content(pool, 1)) == ([[OK]], b"\x09" * NBYTES)


@pytest.mark.parametrize("segments", [1, 4])
def test_repeated_keys_of_a_get_fill_every_slot(master, holder, opened, segments):
    """The library fills one of them, the last, and reports all as read."""
    pool = a_pool(segments=segments)
    storage = opened(master, pool)
    a, b = keys_of("a", "b")
    fill(pool, 0, b"\x01" * NBYTES)
    fill(pool, 1, b"\x02" * NBYTES)
    assert storage.batch_set([a, b], pool.pages([0, 1])) == [OK, OK]
    assert storage.batch_get([a, b, a, a], pool.pages([4, 5, 6, 7])) == [OK] * 4
    assert [content(pool, page)[:1] for page in (4, 5, 6, 7)] == [b"\x01", b"\x02", b"\x01", b"\x01"]


def test_pools_that_overlap_are_served(master, holder, opened):
    """The library refuses the second registration with -600."""
    first = a_pool()
    storage = opened(master, first)
    storage.add_pool(first)
    whole = type(first)(first.component, first.segments, first.num_pages, owner=first)
    storage.add_pool(whole)
    keys = keys_of("a")
    assert storage.batch_set(keys, whole.pages([0])) == [OK]
    storage.drop_pool(first)
    assert storage.batch_get(keys, whole.pages([1])) == [OK]


def test_a_batch_larger_than_the_librarys_queue_arrives(master, holder, opened):
    """Its default, 1,024 buffers a peer, fails most of such a batch with -800."""
    pool = a_pool(pages=256, segments=16)
    storage = opened(master, pool)
    keys = keys_of(*(f"{i}-" for i in range(256)))
    assert storage.batch_set(keys, pool.pages(range(256))) == [OK] * 256
    assert storage.batch_get(keys, pool.pages(range(256))) == [OK] * 256


def test_a_page_without_bytes_is_never_ok(master, holder, opened):
    """The library takes it with 0 and stores nothing."""
    anchor = HostPool(a_component(0), (), 4)
    storage = opened(master, anchor)
    keys = keys_of("a", "b", nbytes=0)
    assert storage.batch_set(keys, anchor.pages([0, 1])) == [ERROR, ERROR]
    assert storage.batch_get(keys, anchor.pages([0, 1])) == [MISS, MISS]
    assert storage.batch_contains(keys) == [MISS, MISS]


@pytest.mark.parametrize("length", [1, 128])
def test_keys_of_any_length_and_many_at_once_are_kept_apart(master, holder, opened, length):
    pool = a_pool(pages=36)
    storage = opened(master, pool)
    keys = a_component().keys([f"{letter:-<{length}}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789"])
    for page in range(36):
        fill(pool, page, bytes([page + 1]) * NBYTES)
    assert storage.batch_set(keys, pool.pages(range(36))) == [OK] * 36
    assert storage.batch_get(keys[::-1], pool.pages(range(36))) == [OK] * 36
    assert [content(pool, page)[0] for page in range(36)] == list(range(36, 0, -1))


# Room.


def test_a_store_to_which_nobody_gives_memory_has_no_space(own_master, opened):
    pool = a_pool()
    storage = opened(own_master, pool)
    started = time.monotonic()
    assert storage.batch_set(keys_of("a", "b"), pool.pages([0, 1])) == [Status.NO_SPACE] * 2
    assert time.monotonic() - started < 2
    assert storage.batch_contains(keys_of("a", "b")) == [MISS, MISS]


@pytest.mark.clause("C15")
def test_c15_a_store_full_of_hard_pins_says_so_and_keeps_them(own_master, opened):
    nbytes = 1 << 20
    holder = Holder(own_master, 16 << 20)
    try:
        pool = a_pool(pages=2, nbytes=nbytes)
        storage = opened(own_master, pool, hard_pin=True)
        keys = keys_of(*(f"{i}-" for i in range(20)), nbytes=nbytes)
        statuses = [storage.batch_set([key], pool.pages([0]))[0] for key in keys]
        assert statuses == [OK] * 16 + [Status.NO_SPACE] * 4
        got = [storage.batch_get([key], pool.pages([1]))[0] for key in keys]
        assert got == [OK] * 16 + [MISS] * 4
        assert storage.clear() == 16
    finally:
        holder.stop()


# Leases.


def test_clear_removes_leased_pages_and_no_neighbours(master, holder, opened):
    """Unforced, the library leaves what was read within 10 s; SGLang's class removes everybody's."""
    pool = a_pool()
    storage, neighbour = opened(master, pool), opened(master, pool, tenant_name="neighbour")
    keys = keys_of("a", "b")
    fill(pool, 1, b"\x03" * NBYTES)
    assert storage.batch_set(keys, pool.pages([0, 1])) == [OK, OK]
    assert neighbour.batch_set(keys[1:], pool.pages([1])) == [OK]
    assert storage.batch_get(keys, pool.pages([2, 3])) == [OK, OK]
    assert storage.clear() == 2
    assert storage.batch_contains(keys) == [MISS, MISS]
    assert neighbour.batch_get(keys[1:], pool.pages([4])) == [OK]
    assert content(pool, 4) == b"\x03" * NBYTES


def test_a_leased_page_can_be_removed(master, holder, opened):
    pool = a_pool()
    storage = opened(master, pool)
    keys = keys_of("a", "none")
    assert storage.batch_set(keys[:1], pool.pages([0])) == [OK]
    assert storage.batch_get(keys[:1], pool.pages([1])) == [OK]
    assert storage.batch_remove(keys) == [OK, MISS]


REMOVALS = {
    "removed": lambda storage, keys, pool: storage.batch_remove(keys) == [OK],
    "cleared": lambda storage, keys, pool: storage.clear() == 1,
    "replaced": lambda storage, keys, pool: replaced(storage, keys, pool),
}


def replaced(storage, keys, pool) -> bool:
    """As after a get that found its owner silent."""
    storage._known.note_bad(keys[0], ERROR)
    return storage.batch_set(keys, pool.pages([0])) == [OK]


@pytest.mark.clause("C2")
@pytest.mark.parametrize("how", REMOVALS)
def test_c2_a_page_taken_away_while_it_is_read_keeps_its_bytes(real, how):
    """A forced removal frees the memory at once, and the next page's bytes are read with success."""
    nbytes = 1 << 20
    master = Master(lease_ms=30_000).start()
    holder = Holder(master, 16 << 20)
    storage = a_store(master=master.address, metrics=master.metrics, segment_size=0)
    pool = a_pool(pages=2, nbytes=nbytes)
    storage.open([pool])
    try:
        key, *others = keys_of(*(f"{i}-" for i in range(20)), nbytes=nbytes)
        fill(pool, 0, b"\x01" * nbytes)
        fill(pool, 1, b"\xee" * nbytes)
        assert storage.batch_set([key], pool.pages([0])) == [OK]
        name = storage.config.namespace.qualify(key)
        assert holder.look_up(name) == 0
        assert REMOVALS[how](storage, [key], pool)
        # One after another: the store is filled more than once.
        assert {storage.batch_set([other], pool.pages([1]))[0] for other in others} == {OK}
        assert holder.read_looked_up(name, nbytes) == (nbytes, b"\x01" * nbytes)
    finally:
        storage.close()
        holder.stop()
        master.stop()


def test_a_removal_that_was_met_half_way_is_a_miss_and_a_set_ends_it(master, holder, opened):
    """As one leaves it whose process died between its two steps."""
    pool = a_pool()
    storage = opened(master, pool)
    keys = keys_of("a", "b")
    for key, nbytes in zip(keys, TOMBSTONES, strict=True):
        holder.put(storage.config.namespace.qualify(key), bytes(nbytes))
    assert storage.batch_get(keys, pool.pages([1, 2])) == [MISS, MISS]
    assert storage.batch_contains(keys) == [MISS, MISS]
    assert storage.batch_set(keys, pool.pages([0, 0])) == [OK, OK]
    assert storage.batch_get(keys, pool.pages([1, 2])) == [OK, OK]


def test_clear_says_what_it_could_not_find_without_the_metrics(master, holder, opened):
    pool = a_pool()
    storage = opened(master, pool, metrics="127.0.0.1:1")
    keys = keys_of("idle", "read")
    assert storage.batch_set(keys, pool.pages([0, 1])) == [OK, OK]
    assert storage.batch_get(keys[1:], pool.pages([2])) == [OK]
    with pytest.raises(BackendUnavailable) as raised:
        storage.clear()
    assert "has cleared the namespace except for what was asked for lately" in str(raised.value)
    assert raised.value.remedy == "Correct the option metrics (HOST:PORT, as its --metrics_port says)."
    assert storage.batch_contains(keys) == [MISS, OK]


# Owners and masters that stop.


def test_pages_of_a_dead_owner_are_asked_for_once(own_master, opened):
    """Each get of them costs up to a second while the master still lists them."""
    holder = Holder(own_master, 64 << 20)
    pool = a_pool()
    storage = opened(own_master, pool)
    keys = keys_of("a", "b")
    assert storage.batch_set(keys, pool.pages([0, 1])) == [OK, OK]
    holder.kill()
    assert storage.batch_contains(keys) == [OK, OK]
    assert storage.batch_get(keys, pool.pages([2, 3])) == [ERROR, ERROR]
    started = time.monotonic()
    assert storage.batch_get(keys, pool.pages([2, 3])) == [ERROR, ERROR]
    assert time.monotonic() - started < 0.1
    assert OK not in storage.batch_contains(keys)
    fresh = Holder(own_master, 64 << 20)
    try:
        assert until(lambda: storage.batch_set(keys, pool.pages([0, 1])) == [OK, OK])
        assert storage.batch_get(keys, pool.pages([2, 3])) == [OK, OK]
    finally:
        fresh.stop()


def test_a_stopped_owner_holds_no_get_for_a_minute_and_writes_nothing_afterwards(own_master, opened):
    """By default the library gives up after 60 s, and the bytes arrive when the owner goes on."""
    holder = Holder(own_master, 64 << 20)
    try:
        pool = a_pool(pages=16, nbytes=1 << 20)
        storage = opened(own_master, pool)
        keys = keys_of(*"abcdefgh", nbytes=1 << 20)
        assert storage.batch_set(keys, pool.pages(range(8))) == [OK] * 8
        holder.signal(signal.SIGSTOP)
        started = time.monotonic()
        assert storage.batch_get(keys, pool.pages(range(8, 16))) == [ERROR] * 8
        assert time.monotonic() - started < 6
        for page in range(8, 16):
            fill(pool, page, b"\xee" * (1 << 20))
        holder.signal(signal.SIGCONT)
        assert until(lambda: storage.batch_set(keys_of("x", nbytes=1 << 20), pool.pages([0])) == [OK])
        threading.Event().wait(0.3)
        assert [content(pool, page) == b"\xee" * (1 << 20) for page in range(8, 16)] == [True] * 8
    finally:
        holder.stop()


def test_a_dead_master_is_known_in_no_time(own_master, opened):
    """The library needs 4.3 s for each call."""
    pool = a_pool()
    storage = opened(own_master, pool)
    own_master.kill()
    started = time.monotonic()
    for verb in ("contains", "get", "set", "remove"):
        assert VERBS[verb](storage, keys_of("a"), pool) == [Status.UNAVAILABLE]
    assert time.monotonic() - started < 2
    with pytest.raises(BackendUnavailable):
        storage.clear()
    with pytest.raises(BackendUnavailable):
        storage.usage()


def test_a_restarted_master_is_used_again(own_master, opened):
    holder = Holder(own_master, 64 << 20)
    try:
        pool = a_pool()
        storage = opened(own_master, pool)
        keys = keys_of("a")
        assert storage.batch_set(keys, pool.pages([0])) == [OK]
        own_master.kill()
        assert storage.batch_get(keys, pool.pages([1])) == [Status.UNAVAILABLE]
        own_master.start()
        assert until(lambda: storage.batch_set(keys, pool.pages([0])) == [OK])
        assert storage.batch_get(keys, pool.pages([1])) == [OK]
    finally:
        holder.stop()


def test_a_paused_master_is_a_timeout_after_two_fifths_of_the_deadline(own_master, opened):
    """Without MC_RPC_TIMEOUT_MS it is 30 s a call, and that must be set before the client is."""
    pool = a_pool()
    storage = opened(own_master, pool, timeout_s=2.0)
    own_master.pause()
    started = time.monotonic()
    assert storage.batch_contains(keys_of("a")) == [Status.TIMEOUT]
    assert 0.5 < time.monotonic() - started < 2
    own_master.resume()


def test_close_on_a_dead_master_costs_no_12_seconds(own_master, opened):
    storage = opened(own_master, a_pool(), timeout_s=2.0)
    own_master.kill()
    started = time.monotonic()
    storage.close()
    assert time.monotonic() - started < 3


# Segments left behind.


def test_close_takes_the_segment_out_of_the_master(own_master, opened):
    """SGLang's class leaves that to a destructor."""
    storage = opened(own_master, segment_size="16mib")
    assert len(own_master.admin.segments()) == 1
    storage.close()
    assert own_master.admin.segments() == []


def test_a_process_that_ends_without_close_takes_its_segment_out(own_master):
    program = (
        "import sys; sys.path.insert(0, sys.argv[2]); from mooncake_builders import a_store;"
        "storage = a_store(master=sys.argv[1], segment_size='16mib'); storage.open()"
    )
    folder = os.path.dirname(__file__)
    command = [sys.executable, "-c", program, own_master.address, folder]
    done = subprocess.run(command, timeout=60, check=False)
    assert (done.returncode, own_master.admin.segments()) == (0, [])


def test_rebind_keeps_the_segment_with_everybodys_pages(own_master, opened):
    pool = a_pool()
    storage = opened(own_master, pool, segment_size="32mib")
    keys = keys_of("a")
    assert storage.batch_set(keys, pool.pages([0])) == [OK]
    other = storage.rebind(a_store("another", master=own_master.address).config, [pool])
    back = other.rebind(storage.config, [pool])
    try:
        assert (other.is_open, back.batch_get(keys, pool.pages([1]))) == (False, [OK])
        assert len(own_master.admin.segments()) == 1
    finally:
        back.close()
    assert own_master.admin.segments() == []
