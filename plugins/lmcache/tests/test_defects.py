"""What LMCache gets wrong for a page store, shown on the library, and that it is right here.

Sources: lmcache 0.5.6, ``v1/distributed``; its reports #1690 (exists, and cannot be loaded), #4759 (a
silent hang), #2269 (telemetry), #2400 (nothing stored, nobody told), #562 (a disk cache lost on restart).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_core import Shard, Status
from hicache_lmcache.native import adapter_maker
from hicache_lmcache.options import LMCacheOptions
from hicache_lmcache.record import HEADER_NBYTES, Record, digest_of
from hicache_lmcache.redis_server import RedisServer

from .conftest import Opener, a_pool, first_bytes, needed

OK, MISS, CORRUPT, SIZE_MISMATCH = Status.OK, Status.MISS, Status.CORRUPT, Status.SIZE_MISMATCH
KINDS = ["fs", "resp"]


def keys_of(pool: Any, *hashes: str) -> list[str]:
    made: list[str] = pool.component.keys(hashes)
    return made


@pytest.mark.parametrize("l2", KINDS)
def test_a_hole_in_the_middle_is_one_miss_and_shifts_nothing(opened: Opener, l2: str) -> None:
    """A load of a missing key never ends over RESP, and the connection is lost with it."""
    pool = a_pool(10)
    storage = opened(pool, l2)
    keys = keys_of(pool, "k0", "k1", "absent", "k3", "k4")
    there = [keys[0], keys[1], keys[3], keys[4]]
    assert storage.batch_set(there, pool.pages(range(4))) == [OK] * 4
    assert storage.batch_get(keys, pool.pages(range(5, 10))) == [OK, OK, MISS, OK, OK]
    assert first_bytes(pool, range(5, 10)) == [1, 2, 8, 3, 4]
    assert (storage.batch_contains(keys), storage.batch_exists(keys)) == ([OK, OK, MISS, OK, OK], 2)


def test_the_library_still_hangs_on_a_missing_key(redis: RedisServer) -> None:
    """Fails on the day on which a load of a missing key ends, and then ledger.py may be asked less."""
    needed("lmcache")
    options = LMCacheOptions(l2="resp", port=redis.port, workers=1)
    adapter = adapter_maker(options, "0" * 32, "")()
    try:
        records = [Record(memoryview(bytearray(4096))) for _ in range(2)]
        digests = [digest_of("there"), digest_of("absent")]
        assert adapter.store(digests[:1], records[:1], time.monotonic() + 5) == [True]
        assert list(adapter.load(digests, records, time.monotonic() + 0.5)) in ([None], [[True, False]])
        assert list(adapter.load(digests[:1], records[:1], time.monotonic() + 0.5)) != [[True]]
    finally:
        adapter.close()


def test_truncated_files_are_no_hits(opened: Opener, tmp_path: Path) -> None:
    """LMCache's local disk returns a truncated file as a hit, and contains stays true for a deleted one."""
    pool = a_pool(6)
    storage = opened(pool, "fs")
    keys = keys_of(pool, "short", "gone", "good")
    assert storage.batch_set(keys, pool.pages(range(3))) == [OK] * 3
    files = {key: next((tmp_path / "store").rglob(f"*{digest_of(key).hex()}.data")) for key in keys}
    os.truncate(files[keys[0]], 1000)
    files[keys[1]].unlink()
    assert storage.batch_get(keys, pool.pages(range(3, 6))) == [SIZE_MISMATCH, MISS, OK]
    assert storage.batch_contains(keys) == [CORRUPT, MISS, OK]
    assert first_bytes(pool, range(3, 6)) == [4, 5, 3]


def test_a_longer_file_is_no_hit(opened: Opener, tmp_path: Path) -> None:
    """The file adapter reads as many bytes as it was asked for, and calls that a hit."""
    pool, larger = a_pool(2, 4096), a_pool(2, 8192)
    keys = keys_of(pool, "k")
    assert opened(larger, "fs").batch_set(keys, larger.pages([0])) == [OK]
    assert opened(pool, "fs").batch_get(keys, pool.pages([1])) == [SIZE_MISMATCH]


@pytest.mark.parametrize("l2", KINDS)
@pytest.mark.parametrize("change", [{"kv_dtype": "fp16"}, {"model": "another"}, {"lora": "a"}], ids=str)
def test_c9_another_dtype_model_or_adapter_never_hits(
    opened: Opener, l2: str, change: dict[str, str]
) -> None:
    pool = a_pool(2)
    one, other = opened(pool, l2), opened(pool, l2, **change)
    keys = keys_of(pool, "k")
    assert one.batch_set(keys, pool.pages([0])) == [OK]
    assert (other.batch_get(keys, pool.pages([1])), one.batch_get(keys, pool.pages([1]))) == ([MISS], [OK])


@pytest.mark.parametrize("l2", KINDS)
def test_c3_what_was_ok_is_there_although_the_instance_is_closed_at_once(opened: Opener, l2: str) -> None:
    """The storage manager stores in the background and drops at close what is under way."""
    pool = a_pool(64, 1 << 16)
    storage = opened(pool, l2)
    keys = keys_of(pool, *(f"k{i}" for i in range(64)))
    assert storage.batch_set(keys, pool.pages(range(64))) == [OK] * 64
    storage.close()
    assert opened(pool, l2).batch_contains(keys) == [OK] * 64


@pytest.mark.parametrize("l2", KINDS)
def test_an_mla_page_goes_and_comes_back(opened: Opener, l2: str) -> None:
    shard = Shard(layers=(0, 3, 3), heads="replicated")
    pool = a_pool(2, 3 * 64 * 576 * 2, shard=shard, byte_order="mla_page_first")
    storage = opened(pool, l2)
    keys = keys_of(pool, "k")
    assert storage.batch_set(keys, pool.pages([0])) == [OK]
    assert storage.batch_get(keys, pool.pages([1])) == [OK]
    assert bytes(pool.pages([1]).views(0)[0]) == bytes(pool.pages([0]).views(0)[0])


def test_a_value_that_vanishes_between_question_and_load_costs_one_adapter(
    opened: Opener, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = a_pool(4)
    storage: Any = opened(pool, "resp", timeout_s=1.0)
    keys = keys_of(pool, "a", "b")
    storage.batch_set(keys, pool.pages([0, 1]))
    real, lied = storage._ledger.sizes, []

    def sizes(digests: list[bytes]) -> list[int | None]:
        answer = real(digests)
        if not lied:
            lied.append(storage._ledger.remove(digests[1:]))
        return answer

    monkeypatch.setattr(storage._ledger, "sizes", sizes)
    started = time.monotonic()
    first = storage.batch_get(keys, pool.pages([2, 3]))
    assert time.monotonic() - started < 2.0
    assert first[1] is not OK
    assert storage.batch_get(keys, pool.pages([2, 3])) == [OK, MISS]
    assert storage.batch_set(keys, pool.pages([0, 1])) == [OK, OK]


@pytest.mark.parametrize("l2", KINDS)
@pytest.mark.parametrize("gone", [0, 17, 39])
def test_a_value_that_vanishes_in_one_part_of_a_batch_spoils_no_other(
    opened: Opener, l2: str, gone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came in the parts before the fault stays, the rest is read from the store itself."""
    pool = a_pool(80)
    storage: Any = opened(pool, l2)
    keys = keys_of(pool, *(f"k{i}" for i in range(40)))
    assert storage.batch_set(keys, pool.pages(range(40))) == [OK] * 40
    real, lied = storage._ledger.sizes, []

    def sizes(digests: list[bytes]) -> list[int | None]:
        answer = real(digests)
        if not lied:
            lied.append(storage._ledger.remove([digests[gone]]))
        return answer

    monkeypatch.setattr(storage._ledger, "sizes", sizes)
    statuses = storage.batch_get(keys, pool.pages(range(40, 80)))
    assert statuses == [MISS if i == gone else OK for i in range(40)]
    right = [41 + gone if i == gone else i + 1 for i in range(40)]
    assert first_bytes(pool, range(40, 80)) == right


def test_c15_a_full_redis_is_no_space_and_later_sets_work(opened: Opener) -> None:
    """LMCache writes a line into its log, and tells nobody."""
    pool = a_pool(8, 1 << 18)
    storage: Any = opened(pool, "resp")
    client, keys = storage._ledger._client, keys_of(pool, *"abcdefgh")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 19))
    try:
        statuses = storage.batch_set(keys, pool.pages(range(8)))
        assert set(statuses) <= {OK, Status.NO_SPACE}
        assert Status.NO_SPACE in statuses
        assert storage.batch_contains(keys) == [OK if status is OK else MISS for status in statuses]
    finally:
        client.config_set("maxmemory", 0)
    assert storage.batch_set(keys, pool.pages(range(8))) == [OK] * 8
    assert storage.batch_get(keys, pool.pages(range(8))) == [OK] * 8
    assert first_bytes(pool, range(8)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_c6_sizes_are_found_where_scripts_are_forbidden(opened: Opener, redis: RedisServer) -> None:
    pool = a_pool(3)
    storage: Any = opened(pool, "resp")
    keys = keys_of(pool, "a", "absent", "c")
    assert storage.batch_set([keys[0], keys[2]], pool.pages([0, 2])) == [OK, OK]
    client = storage._ledger._client
    client.execute_command("ACL", "SETUSER", "default", "-eval")
    try:
        assert storage.batch_contains(keys) == [OK, MISS, OK]
        assert not storage._ledger._scripts
    finally:
        client.execute_command("ACL", "SETUSER", "default", "+eval")


@pytest.mark.parametrize("l2", KINDS)
def test_memory_of_earlier_calls_is_never_taken_for_a_page(
    opened: Opener, l2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Private memory is used again: what LMCache calls loaded, and did not write, is no page."""
    pool = a_pool(4)
    storage: Any = opened(pool, l2)
    keys = keys_of(pool, "a", "b")
    assert storage.batch_set(keys, pool.pages([0, 1])) == [OK, OK]
    assert storage.batch_get(keys, pool.pages([2, 3])) == [OK, OK]
    adapter = storage._adapter("load", time.monotonic() + 5)
    monkeypatch.setattr(adapter, "load", lambda digests, records, deadline: iter([[True] * len(digests)]))
    assert storage.batch_get(keys, pool.pages([2, 3])) == [CORRUPT, CORRUPT]


@pytest.mark.parametrize("l2", KINDS)
def test_c11_memory_of_a_call_that_was_left_behind_is_not_used_again(
    opened: Opener, l2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = a_pool(2)
    storage: Any = opened(pool, l2, timeout_s=0.2)
    keys = keys_of(pool, "a")
    assert storage.batch_set(keys, pool.pages([0])) == [OK]
    adapter, kept = storage._adapter("load", time.monotonic() + 5), storage._scratch._free.copy()
    left: list[Any] = []

    def load(_: Any, records: Any, deadline: float) -> Iterator[None]:
        left.append(records)
        return iter([None])

    monkeypatch.setattr(adapter, "load", load)
    storage.batch_get(keys, pool.pages([1]))
    (records,) = left
    assert records[0].byte_array.obj is kept[0]
    assert not [buffer for buffer in storage._scratch._free if buffer is kept[0]]


def test_no_telemetry_and_no_engine_is_started(opened: Opener, tmp_path: Path) -> None:
    """lmcache#2269: usage is sent unless LMCACHE_TRACK_USAGE=false; here nothing that sends is started."""
    before = dict(os.environ)
    opened(a_pool(1), "fs")
    names = [thread.name for thread in threading.enumerate()]
    assert dict(os.environ) == before
    assert not [name for name in names if "usage" in name.lower() or "telemetry" in name.lower()]


def test_unfinished_files_have_a_folder_of_their_own_for_each_writer(opened: Opener, tmp_path: Path) -> None:
    """LMCache gives two writers of a key one temporary file: each could rename the other's half."""
    opened(a_pool(1), "fs")
    opened(a_pool(1), "fs")
    assert len(list((tmp_path / "store").rglob(".unfinished-*"))) == 2


def test_a_record_is_larger_than_its_page_by_its_header(opened: Opener, tmp_path: Path) -> None:
    pool = a_pool(1)
    storage = opened(pool, "fs")
    storage.batch_set(keys_of(pool, "k"), pool.pages([0]))
    (stored,) = list((tmp_path / "store").rglob("*.data"))
    assert stored.stat().st_size == 4096 + HEADER_NBYTES
