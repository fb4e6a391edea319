"""HiCacheNixl over real files: what the suite cannot see from outside."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from nixl_builders import NBYTES, a_config, an_arena, file_of, keys_of, page_bytes, stored

from hicache_core import Status
from hicache_core.errors import BackendIncompatible, BackendUnavailable, InvalidPages
from hicache_nixl import _native
from hicache_nixl.agents import MAX_IDLE, Agents, regions_of

OK, MISS, NO_SPACE, TIMEOUT = Status.OK, Status.MISS, Status.NO_SPACE, Status.TIMEOUT


def test_manifest_says_whose_pages_these_are(opened, tmp_path):
    storage = opened()
    manifest = json.loads((tmp_path / "kv" / storage.config.namespace.id / "manifest.json").read_text())
    assert manifest == dict(storage.config.identity.manifest())


def test_a_store_of_a_later_format_is_refused(opened, tmp_path):
    opened()
    (tmp_path / "kv" / "hicache-nixl.json").write_text('{"format": 2}')
    with pytest.raises(BackendIncompatible) as caught:
        opened()
    assert "has format 2, this version reads 1" in str(caught.value)


def test_an_unusable_folder_names_it_and_the_user(opened, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BackendUnavailable) as caught:
        opened(folders=(str(tmp_path / "file"),))
    assert f"opening the folder '{tmp_path}/file' of 'nixl' as user {os.geteuid()}" in str(caught.value)


def test_pages_spread_over_the_folders(opened, tmp_path):
    arena = an_arena(32)
    folders = tuple(str(tmp_path / name) for name in "abc")
    storage = opened(arena.pool, folders=folders)
    stored(storage, arena, keys_of(arena, *map(str, range(32))))
    held = [len(list((tmp_path / name / storage.config.namespace.id).glob("??/*"))) for name in "abc"]
    assert sum(held) == 32
    assert min(held) > 0
    assert storage.usage().pages == 32
    assert storage.clear() == 32


def test_overlapping_pools_are_both_served(opened):
    """NIXL finds the smaller of two overlapping registrations only: layer ranges of one memory would fail."""
    from hicache_core import HostPool, Segment

    whole = an_arena(8)
    part_of = an_arena(1, NBYTES // 2).component
    base = whole.pool.segments[0].address
    part = HostPool(part_of, (Segment(base + 1024, NBYTES, NBYTES // 2),), 8, owner=whole.buffer)
    storage = opened(whole.pool, part)
    keys = keys_of(whole, "a", "b")
    stored(storage, whole, keys)
    parts = part_of.keys(["a", "b"])
    assert storage.batch_set(parts, part.pages([2, 3])) == [OK, OK]
    assert storage.batch_get(keys, whole.pages([4, 5])) == [OK, OK]
    storage.drop_pool(part)
    assert storage.batch_get(keys, whole.pages([6, 7])) == [OK, OK]
    with pytest.raises(InvalidPages):
        storage.batch_get(parts, part.pages([0, 1]))


def test_regions_of_pools_never_overlap():
    a = an_arena(4)
    assert regions_of([a.pool, a.pool]) == {"DRAM": ((*a.pool.regions()[0], 0),)}


def test_c11_a_transfer_past_the_deadline_is_waited_for_and_its_agent_thrown_away(opened, monkeypatch):
    arena = an_arena(4)
    storage = opened(arena.pool, config=a_config(timeout_s=0.2))
    keys = keys_of(arena, "a", "b")
    stored(storage, arena, keys)
    release, polls = threading.Event(), []
    honest = _native.Transfer.poll

    def held_back(transfer):
        polls.append(1)
        return release.is_set() and honest(transfer)

    monkeypatch.setattr(_native.Transfer, "poll", held_back)
    before = list(storage._store._agents._idle)
    results = []
    caller = threading.Thread(target=lambda: results.append(storage.batch_get(keys, arena.pages([2, 3]))))
    caller.start()
    deadline = time.monotonic() + 0.6  # three times timeout_s
    while time.monotonic() < deadline:
        caller.join(0.05)
    assert caller.is_alive(), "hold: no slot may be given back while NIXL may write to it"
    release.set()
    caller.join(10.0)
    assert results == [[OK, OK]]
    arena.check({2: page_bytes(keys[0], NBYTES), 3: page_bytes(keys[1], NBYTES)})
    assert [agent for agent in storage._store._agents._idle if agent in before] == []


def test_agents_are_bounded_and_reused(opened):
    made = []

    class Fake:
        spent = False
        regions = None

        def __init__(self):
            made.append(self)

        def register_pools(self, kind, regions):
            pass

        def close(self):
            self.closed = True

    agents = Agents(Fake)
    deadline = time.monotonic() + 5
    lent = [agents.take(deadline) for _ in range(MAX_IDLE + 2)]
    for agent in lent:
        agents.give(agent)
    assert [agents.take(deadline) for _ in range(MAX_IDLE)] == lent[MAX_IDLE - 1 :: -1]
    assert len(made) == MAX_IDLE + 2


def test_c16_import_and_open_leave_the_process_alone(nixl, tmp_path):
    program = (
        "import logging, sys, io\n"
        "handler = logging.StreamHandler(io.StringIO()); logging.getLogger('mine').addHandler(handler)\n"
        "def seen(): return dict(logging._handlers), logging.raiseExceptions, logging.root.handlers[:]\n"
        "before = seen()\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from nixl_builders import a_storage\n"
        "s = a_storage(folders=(sys.argv[1],)); s.open(); s.close()\n"
        "assert before == seen(), (before, seen())\n"
    )
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "kv"), here],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_only_the_chosen_plugin_is_loaded(nixl, tmp_path):
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from nixl_builders import a_storage\n"
        "s = a_storage(folders=(sys.argv[1],)); s.open()\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "sys.stdout.write(' '.join(sorted({m.rpartition('/')[2] for m in maps if 'libplugin_' in m})))\n"
    )
    here = os.path.dirname(__file__)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "kv"), here],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "libplugin_POSIX.so"


def test_c15_last_use_decides_and_not_age(opened):
    nbytes = 64 << 10
    arena = an_arena(16, nbytes)
    storage = opened(arena.pool, capacity=16 * (nbytes + 64))
    keys = keys_of(arena, *(f"old{i}" for i in range(16)))
    stored(storage, arena, keys)
    assert storage.batch_get(keys[:4], arena.pages(range(4))) == [OK] * 4  # the oldest, and used
    fresh = keys_of(arena, *(f"new{i}" for i in range(8)))
    assert storage.batch_set(fresh, arena.pages(range(8))) == [OK] * 8
    assert storage.batch_contains(keys[:4]) == [OK] * 4
    assert storage.batch_contains(fresh) == [OK] * 8
    assert storage.batch_contains(keys[4:]).count(MISS) == 8
    usage = storage.usage()
    assert usage.store_bytes <= usage.capacity == 16 * (nbytes + 64)


def test_c15_eviction_touches_no_foreign_file(opened, tmp_path):
    nbytes = 256 << 10
    arena = an_arena(4, nbytes)
    storage = opened(arena.pool, capacity=4 * (nbytes + 64))
    foreign = [tmp_path / "kv" / "notes.txt", tmp_path / "kv" / "other" / "00" / "page", tmp_path / "outside"]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(nbytes))
        os.utime(path, (1, 1))
    (tmp_path / "kv" / ("f" * 32)).symlink_to(tmp_path / "kv" / "other")
    for round_ in range(4):
        stored(storage, arena, keys_of(arena, *(f"{round_}-{i}" for i in range(4))))
    assert [path.read_bytes() == bytes(nbytes) for path in foreign] == [True] * 3
    storage.clear()
    assert [path.exists() for path in foreign] == [True] * 3


def test_c15_two_processes_share_one_budget(nixl, opened, tmp_path):
    nbytes = 64 << 10
    arena = an_arena(4, nbytes)
    capacity = 32 * (nbytes + 64)
    storage = opened(arena.pool, capacity=capacity)
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from nixl_builders import *\n"
        "arena = an_arena(4, 65536); s = a_storage(folders=(sys.argv[1],)); s.open([arena.pool])\n"
        "assert s.usage().capacity == 32 * (65536 + 64)  # nobody told it: the folder did\n"
        "for i in range(30):\n"
        "    keys = keys_of(arena, *(f'{sys.argv[3]}-{i}-{n}' for n in range(4)))\n"
        "    assert s.batch_set(keys, arena.pages()) == [1] * 4\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "kv"), os.path.dirname(__file__)]
    children = [subprocess.Popen([*command, str(n)], stderr=subprocess.PIPE) for n in range(3)]
    highest = 0
    while any(child.poll() is None for child in children):
        highest = max(highest, sum(map(_size, (tmp_path / "kv").glob("*/??/*"))))
    assert [child.wait(60) or child.stderr.read() for child in children] == [b""] * 3
    batch = 4 * (nbytes + 64)
    assert highest <= capacity + 3 * batch
    assert storage.usage().store_bytes <= capacity


def _size(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_a_held_budget_is_a_timeout_and_no_hang(opened, tmp_path):
    arena = an_arena(2)
    storage = opened(arena.pool, config=a_config(timeout_s=0.3), capacity=1 << 20)
    with open(tmp_path / "kv" / "hicache-nixl.budget", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        started = time.monotonic()
        statuses = storage.batch_set(keys_of(arena, "a", "b"), arena.pages())
        took = time.monotonic() - started
    assert statuses == [TIMEOUT, TIMEOUT]
    assert took < 1.3
    assert storage.batch_set(keys_of(arena, "a", "b"), arena.pages()) == [OK, OK]


def test_c15_a_full_disk_is_no_space_and_leaves_nothing(nixl, tmp_path):
    program = (
        "import resource, sys; sys.path.insert(0, sys.argv[2])\n"
        "from nixl_builders import *\n"
        "arena = an_arena(3, 1 << 20); s = a_storage(folders=(sys.argv[1],)); s.open([arena.pool])\n"
        "small = an_arena(2, 4096); s.add_pool(small.pool)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 10, 512 << 10))\n"
        "keys = keys_of(arena, 'a', 'b', 'c')\n"
        "assert [int(x) for x in s.batch_set(keys, arena.pages())] == [5] * 3\n"
        "assert [int(x) for x in s.batch_contains(keys)] == [2] * 3\n"
        "assert s.batch_set(keys_of(small, 'd', 'e'), small.pages()) == [1, 1]\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "kv"), os.path.dirname(__file__)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    left = [path.name for path in (tmp_path / "kv").glob("*/??/*")]
    assert sorted(name[0] for name in left) == ["d", "e"]


def test_temporary_files_of_a_dead_writer_go_when_they_are_old(opened, tmp_path):
    arena = an_arena(1)
    storage = opened(arena.pool)
    keys = keys_of(arena, "a")
    stored(storage, arena, keys)
    beside = file_of(tmp_path / "kv", storage, keys[0]).parent
    old, young = beside / ".dead-0.tmp", beside / ".alive-0.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert storage.usage().pages == 1
    assert (old.exists(), young.exists()) == (False, True)


def test_fsync_reaches_file_and_folder(opened, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append("file"))
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append("folder"))
    arena = an_arena(1)
    stored(opened(arena.pool, fsync=True), arena, keys_of(arena, "a"))
    assert synced == ["file", "folder"]


def test_device_pools_are_refused_where_nixl_reaches_host_memory_only(opened):
    from hicache_core import HostPool, Segment

    pool = HostPool(an_arena(1).component, (Segment(1 << 40, NBYTES, NBYTES),), 1, device="cuda:0")
    with pytest.raises(InvalidPages) as caught:
        opened(pool, plugin="POSIX")
    assert "Set plugin to GDS_MT or GDS" in str(caught.value)
