"""Level core: what one caller with one page at a time relies on (C1 to C6, C10, C13)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hicache_conformance.bench import PAGE_NBYTES, Bench, aligned, loose
from hicache_conformance.calls import PATIENCE_S
from hicache_core import HiCacheStorage, InvalidArgument, Status

OK, MISS, SIZE_MISMATCH = Status.OK, Status.MISS, Status.SIZE_MISMATCH

#: Sizes beside 4,096: less, more, and the least that differs either way.
OTHER_SIZES = [2048, 4095, 4097, 8192]

#: What `hicache backends` does for a table; prints the modules that it should not have loaded.
_READ_SPEC = """
import sys
from hicache_core import StorageBackendFactory
spec = StorageBackendFactory.spec(sys.argv[1])
own = [target.partition(":")[0] for target in (spec.target, spec.options, spec.harness)]
required = [requirement.module for requirement in spec.requires]
print([name for name in (*own, *required, "pydantic", "torch") if name and name in sys.modules])
"""


class CoreLevel:
    """Cases of level core."""

    @pytest.mark.clause("C3", "C2")
    def test_c3_set_then_get_gives_the_page(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(1)
        bench.stored(storage, keys)
        assert bench.get(storage, keys) == [(OK, bench.page(keys[0]))]

    @pytest.mark.clause("C3")
    def test_c3_each_ok_set_can_be_got_at_once(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(40)
        for key in keys:
            bench.stored(storage, [key])
            assert bench.versions(storage, [key]) == [0], f"after an OK set of {key}"
        assert bench.versions(storage, keys) == [0] * len(keys)

    @pytest.mark.clause("C6", "C2")
    def test_c6_absent_key_is_a_miss_and_a_get_of_it_leaves_other_slots_alone(self, bench: Bench) -> None:
        arena = bench.arena(4)
        storage, keys = bench.open(arena), bench.keys(1)
        assert aligned(storage.batch_contains(keys), 1) == [MISS]
        assert aligned(storage.batch_get(keys, arena.pages([2])), 1) == [MISS]
        arena.check(undefined=[2])

    @pytest.mark.clause("C6")
    def test_c6_contains_is_ok_after_set_and_moves_no_bytes(self, bench: Bench) -> None:
        arena = bench.arena(2)
        storage, keys = bench.open(arena), bench.keys(2)
        bench.stored(storage, keys[:1])
        assert aligned(storage.batch_contains(keys), 2) == [OK, MISS]
        arena.check()

    @pytest.mark.clause("C6", "C4")
    def test_c6_contains_of_an_empty_value_is_not_ok(self, bench: Bench) -> None:
        _need(bench, "store_bytes")
        storage, keys = bench.open(), bench.keys(1)
        bench.store_bytes(keys[0], b"")
        assert aligned(storage.batch_contains(keys), 1)[0] is not OK
        assert bench.get(storage, keys)[0][0] is not OK

    @pytest.mark.clause("C3")
    @pytest.mark.faults("stored_bytes")
    def test_c3_what_an_ok_set_stored_is_the_page(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(3)
        bench.stored(storage, keys)
        assert [bench.stored_bytes(key) for key in keys] == [bench.page(key) for key in keys]

    @pytest.mark.clause("C2")
    @pytest.mark.faults("store_bytes")
    def test_c2_get_gives_what_the_store_holds(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(1)
        bench.store_bytes(keys[0], bench.page(keys[0], version=3))
        assert bench.versions(storage, keys) == [3]

    @pytest.mark.clause("C4")
    def test_c4_setting_a_present_key_is_ok_and_changes_nothing(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(2)
        bench.stored(storage, keys)
        bench.stored(storage, keys, version=1)
        assert bench.versions(storage, keys) == [0, 0]

    @pytest.mark.clause("C4")
    def test_c4_a_set_leaves_its_slots_as_they_were(self, bench: Bench) -> None:
        arena = bench.arena(3)
        storage, keys = bench.open(arena), bench.keys(3)
        assert aligned(storage.batch_set(keys, arena.pages()), 3) == [OK] * 3
        arena.check()

    @pytest.mark.clause("C4", "C3")
    def test_c4_the_slot_may_be_refilled_once_set_has_returned(self, bench: Bench) -> None:
        arena = bench.arena(1)
        storage, keys = bench.open(arena), bench.keys(1)
        arena.fill(0, bench.page(keys[0]))
        assert aligned(storage.batch_set(keys, arena.pages()), 1) == [OK]
        arena.fill(0, bench.page(keys[0], version=1))
        assert bench.versions(storage, keys) == [0]

    @pytest.mark.clause("C5", "C2")
    @pytest.mark.parametrize("nbytes", OTHER_SIZES)
    def test_c5_value_of_another_size_is_size_mismatch(self, bench: Bench, nbytes: int) -> None:
        _fits(bench, nbytes)
        arena = bench.arena(3, nbytes)
        storage, keys = bench.open(arena), bench.keys(1)
        bench.stored(storage, keys)
        assert aligned(storage.batch_get(keys, arena.pages([1])), 1) == [SIZE_MISMATCH]
        arena.check(undefined=[1])

    @pytest.mark.clause("C6", "C5")
    @pytest.mark.parametrize("nbytes", OTHER_SIZES)
    def test_c6_contains_is_not_ok_once_a_get_has_found_another_size(self, bench: Bench, nbytes: int) -> None:
        _fits(bench, nbytes)
        storage, keys = bench.open(), bench.keys(1)
        bench.stored(storage, keys)
        assert bench.get(storage, keys, nbytes)[0][0] is SIZE_MISMATCH
        assert aligned(storage.batch_contains(keys), 1)[0] is not OK
        assert storage.batch_exists(keys) == 0

    @pytest.mark.clause("C4", "C5")
    @pytest.mark.parametrize("nbytes", OTHER_SIZES)
    def test_c4_a_value_known_to_have_another_size_is_replaced(self, bench: Bench, nbytes: int) -> None:
        _fits(bench, nbytes)
        storage, keys = bench.open(), bench.keys(1)
        bench.stored(storage, keys)
        assert bench.get(storage, keys, nbytes)[0][0] is SIZE_MISMATCH
        bench.stored(storage, keys, nbytes, version=1)
        assert bench.get(storage, keys, nbytes) == [(OK, bench.page(keys[0], nbytes, 1))]
        assert aligned(storage.batch_contains(keys), 1) == [OK]

    @pytest.mark.clause("C3", "C5")
    @pytest.mark.parametrize("nbytes", OTHER_SIZES)
    def test_c3_a_set_over_another_size_is_ok_only_if_it_can_be_got(self, bench: Bench, nbytes: int) -> None:
        _fits(bench, nbytes)
        storage, keys = bench.open(), bench.keys(1)
        bench.stored(storage, keys)
        status = bench.set(storage, keys, nbytes, version=1)[0]
        got, value = bench.get(storage, keys, nbytes)[0]
        assert (got is OK) == (status is OK), f"set said {status!r}, get said {got!r}"
        assert got is not OK or value == bench.page(keys[0], nbytes, 1)

    @pytest.mark.clause("C6", "C1")
    @pytest.mark.parametrize("present", ["", "1", "0", "1101", "111", "0111", "1110001"])
    def test_c6_exists_counts_the_leading_run(self, bench: Bench, present: str) -> None:
        storage, keys = bench.open(), bench.keys(len(present))
        bench.stored(storage, [key for key, there in zip(keys, present, strict=True) if there == "1"])
        count = storage.batch_exists(keys)
        assert (type(count), count) == (int, len(present.partition("0")[0]))

    @pytest.mark.clause("C13", "C1")
    @pytest.mark.needs("remove")
    def test_c13_remove_tells_what_there_was_and_leaves_the_rest(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(4)
        bench.stored(storage, keys[:3])
        assert aligned(storage.batch_remove([keys[1], keys[3]]), 2) == [OK, MISS]
        assert bench.versions(storage, keys) == [0, MISS, 0, MISS]
        assert aligned(storage.batch_contains(keys), 4) == [OK, MISS, OK, MISS]

    @pytest.mark.clause("C13", "C4")
    @pytest.mark.needs("remove")
    def test_c13_a_removed_key_takes_a_new_page(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(1)
        bench.stored(storage, keys)
        assert aligned(storage.batch_remove(keys), 1) == [OK]
        bench.stored(storage, keys, version=1)
        assert bench.versions(storage, keys) == [1]

    @pytest.mark.clause("C9", "C13")
    @pytest.mark.needs("clear")
    def test_c9_clear_removes_every_page_and_tells_how_many(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(20)
        bench.stored(storage, keys)
        assert storage.clear() == 20
        assert aligned(storage.batch_contains(keys), 20) == [MISS] * 20
        assert bench.versions(storage, keys) == [MISS] * 20
        assert (storage.usage().pages, storage.usage().bytes, storage.clear()) == (0, 0, 0)

    @pytest.mark.clause("C9", "C3")
    @pytest.mark.needs("clear")
    def test_c9_a_cleared_namespace_takes_new_pages(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(5)
        bench.stored(storage, keys)
        storage.clear()
        bench.stored(storage, keys, version=1)
        assert bench.versions(storage, keys) == [1] * 5

    @pytest.mark.clause("C13")
    def test_c13_usage_counts_the_pages_of_the_namespace(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(6)
        bench.stored(storage, keys)
        bench.stored(storage, keys[:3])
        usage = storage.usage()
        assert (usage.pages, usage.bytes) == (6, 6 * PAGE_NBYTES)
        assert usage.store_bytes >= usage.bytes
        assert usage.capacity is None or usage.capacity >= usage.bytes

    @pytest.mark.clause("C13")
    def test_c13_touch_gives_nothing_and_changes_no_page(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(3)
        bench.stored(storage, keys[:2])
        assert storage.touch(keys) is None  # type: ignore[func-returns-value]
        assert bench.versions(storage, keys) == [0, 0, MISS]

    @pytest.mark.clause("C13")
    def test_c13_an_opened_storage_promises_no_more_than_its_spec(self, bench: Bench) -> None:
        storage = bench.open()
        assert storage.spec.capabilities.narrowing_violations(storage.capabilities) == []
        assert storage.spec.capabilities == bench.site.subject.spec.capabilities

    @pytest.mark.clause("C13")
    def test_c13_the_spec_is_read_without_loading_the_backend(self, bench: Bench) -> None:
        kind, _, name = bench.site.subject.reference.partition("=")
        if kind != "backend":
            pytest.skip("unsupported: a spec that listings read")
        command = [sys.executable, "-c", _READ_SPEC, name]
        read = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert (read.returncode, read.stdout, read.stderr) == (0, "[]\n", "")

    @pytest.mark.clause("C10")
    @pytest.mark.parametrize("verb", ["batch_get", "batch_set"])
    @pytest.mark.parametrize(("num_keys", "num_pages"), [(2, 1), (1, 2), (0, 1), (1, 0)])
    def test_c10_unequal_lengths_are_refused(
        self, bench: Bench, verb: str, num_keys: int, num_pages: int
    ) -> None:
        arena = bench.arena(2)
        storage, keys = bench.open(arena), bench.keys(num_keys)
        with pytest.raises(InvalidArgument):
            getattr(storage, verb)(keys, arena.pages(range(num_pages)))
        arena.check()
        assert aligned(storage.batch_contains(keys), num_keys) == [MISS] * num_keys

    @pytest.mark.clause("C10")
    @pytest.mark.parametrize("verb", ["batch_get", "batch_set"])
    def test_c10_pages_of_an_unknown_pool_are_refused(self, bench: Bench, verb: str) -> None:
        arena = bench.arena(2)
        storage, keys = bench.open(), bench.keys(1)
        with pytest.raises(InvalidArgument):
            getattr(storage, verb)(keys, arena.pages([0]))
        arena.check()

    @pytest.mark.clause("C10")
    def test_c10_a_get_into_memory_that_cannot_be_written_is_refused(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(1)
        with pytest.raises(InvalidArgument):
            storage.batch_get(keys, loose([bytes(PAGE_NBYTES)], bench.component()))

    @pytest.mark.clause("C2", "C3")
    def test_c3_ten_gets_of_one_page_give_it_each_time(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(1)
        bench.stored(storage, keys)
        assert [bench.versions(storage, keys) for _ in range(10)] == [[0]] * 10

    @pytest.mark.clause("C3")
    def test_c3_two_storages_of_one_test_do_not_disturb_each_other(self, bench: Bench) -> None:
        first, second, keys = bench.open(), bench.open(), bench.keys(2)
        bench.stored(first, keys[:1])
        bench.stored(second, keys[1:])
        assert (bench.versions(first, keys[:1]), bench.versions(second, keys[1:])) == ([0], [0])
        second.close()
        assert bench.versions(first, keys[:1]) == [0]


def _need(bench: Bench, power: str) -> None:
    if power not in bench.harness.faults:
        pytest.skip(f"unsupported: the harness cannot '{power}'")


def _fits(bench: Bench, nbytes: int) -> None:
    limit = bench.capabilities.max_page_nbytes
    if limit is not None and nbytes > limit:
        pytest.skip(f"unsupported: pages above {limit} bytes")


def miss_or_ok(storage: HiCacheStorage, keys: list[str]) -> list[Status]:
    """Ask contains, and require that it answers nothing but OK and MISS."""
    statuses = aligned(storage.batch_contains(keys), len(keys))
    assert set(statuses) <= {OK, MISS}
    return statuses
