"""The memory backend's own parts: the store's journal and order, the harness's powers, what open narrows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_conformance.bench import Bench, Site
from hicache_conformance.harness import BaseHarness, HarnessError
from hicache_conformance.memory.harness import MemoryHarness
from hicache_conformance.memory.spec import SPEC
from hicache_conformance.memory.store import Store
from hicache_conformance.subject import find_subject
from hicache_core import Namespace, Status
from hicache_core.errors import InvalidOptions

OK, MISS, CORRUPT, NO_SPACE = Status.OK, Status.MISS, Status.CORRUPT, Status.NO_SPACE


@pytest.fixture
def served() -> Iterator[Site]:
    site = Site(find_subject("memory"), {}, seed=1)
    site.start()
    yield site
    site.stop()


def test_store_journal_brings_back_sets_and_not_what_was_removed(tmp_path: Path) -> None:
    store = Store(journal=tmp_path / "journal")
    store.set("n", ["a", "b", "c"], [b"1", b"22", b"333"])
    store.remove("n", ["b"])
    store.set("m", ["a"], [b"other"])
    store.clear("m")
    again = Store(journal=tmp_path / "journal")
    assert again.get("n", ["a", "b", "c"], 1) == [(OK, b"1"), (MISS, b""), (Status.SIZE_MISMATCH, b"")]
    assert again.usage("n").pages == 2
    assert again.usage("m").pages == 0


@pytest.mark.parametrize("cut", [1, 2, 5, 30])
def test_store_journal_cut_in_its_last_record_keeps_the_rest_and_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    Store(journal=path).set("n", ["a", "b"], [b"first", b"second"])
    path.write_bytes(path.read_bytes()[:-cut])
    store = Store(journal=path)
    assert store.contains("n", ["a", "b"]) == [OK, MISS]
    assert store.set("n", ["b"], [b"again"]) == [OK]
    assert Store(journal=path).get("n", ["a", "b"], 5) == [(OK, b"first"), (OK, b"again")]


def test_store_full_of_lru_drops_what_was_used_least_recently() -> None:
    store = Store(capacity=3)
    store.set("n", ["a", "b", "c"], [b"1", b"2", b"3"])
    store.get("n", ["a"], 1)
    store.touch("n", ["b"])
    assert store.set("n", ["d"], [b"4"]) == [OK]
    assert store.contains("n", ["a", "b", "c", "d"]) == [OK, OK, MISS, OK]
    assert store.usage("n").store_bytes == 3


def test_store_without_eviction_says_no_space_until_there_is_room() -> None:
    store = Store(capacity=2, eviction="none")
    assert store.set("n", ["a", "b", "c"], [b"1", b"2", b"3"]) == [OK, OK, NO_SPACE]
    store.remove("n", ["a"])
    assert store.set("n", ["c"], [b"3"]) == [OK]


def test_harness_damage_is_seen_by_a_get_and_peeked_round_it(served: Site) -> None:
    bench = Bench(served)
    storage, keys = bench.open(), bench.keys(1)
    bench.stored(storage, keys)
    before = bench.stored_bytes(keys[0])
    bench.damage(keys[0], "flip")
    after = bench.stored_bytes(keys[0])
    assert before == bench.page(keys[0])
    assert after == bytes([before[0] ^ 1]) + before[1:]
    assert bench.get(storage, keys)[0][0] is CORRUPT
    bench.close(failed=False)


def test_harness_refuses_to_damage_what_is_not_there(served: Site) -> None:
    with pytest.raises(HarnessError) as caught:
        served.harness.damage(Namespace("0" * 32), "absent", "flip")
    assert str(caught.value) == "no value to damage under 'absent'"


def test_harness_powers_come_back_after_kill_and_stop_is_idempotent() -> None:
    harness = MemoryHarness()
    harness.start()
    harness.kill()
    harness.restart()
    harness.pause()
    harness.resume()
    assert harness.stored_bytes(Namespace("0" * 32), "absent") is None
    harness.stop()
    harness.stop()


def test_harness_in_a_deep_temporary_folder_still_binds_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    harness = MemoryHarness()
    harness.start()
    assert harness.stored_bytes(Namespace("0" * 32), "absent") is None
    harness.stop()
    assert list(deep.iterdir()) == []


def test_harness_base_cannot_do_what_it_does_not_name() -> None:
    harness = BaseHarness({"a": 1})
    assert (harness.available(), harness.options(), harness.faults) == (None, {"a": 1}, frozenset())
    with pytest.raises(HarnessError) as caught:
        harness.pause()
    assert str(caught.value) == (
        "BaseHarness cannot 'pause'. Override the method, or leave the power out of `faults`."
    )


def test_memory_in_this_process_promises_less_than_with_a_server(served: Site) -> None:
    inside = Site(find_subject("memory"), {"store": "narrow"}, seed=1)
    names = ("shared", "persistent", "durable", "eviction", "deadline")
    assert [getattr(served.capabilities, name) for name in names] == [True, True, True, "lru", "cancel"]
    assert [getattr(inside.capabilities, name) for name in names] == [False, False, False, "lru", "cancel"]
    assert SPEC.capabilities.narrowing_violations(inside.capabilities) == []


def test_memory_capacity_beside_a_server_is_refused() -> None:
    site = Site(find_subject("memory"), {}, seed=1)
    bench_options = {"server": "/nowhere", "capacity": "1mib"}
    with pytest.raises(InvalidOptions) as caught:
        site.subject.create(None, bench_options)  # type: ignore[arg-type]
    assert "capacity is the server's own" in str(caught.value)
