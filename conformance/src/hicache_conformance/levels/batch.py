"""Level batch: results stay aligned whatever is missing, repeated or failing in the middle (C1, C2, C7)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from hicache_conformance.bench import PAGE_NBYTES, Bench, aligned
from hicache_core import HiCacheStorage, Status

OK, MISS, CORRUPT, SIZE_MISMATCH = Status.OK, Status.MISS, Status.CORRUPT, Status.SIZE_MISMATCH

#: Around the engines' own limit of 128 pages a call, and what an exists over a whole chain may bring.
BATCH_SIZES = [1, 2, 127, 128, 129, 1000]


class BatchLevel:
    """Cases of level batch."""

    @pytest.mark.clause("C1", "C2", "C3")
    @pytest.mark.parametrize("count", BATCH_SIZES)
    def test_c1_batch_of_any_size_comes_back_whole(self, bench: Bench, count: int) -> None:
        _allowed(bench, count)
        arena = bench.arena(count)
        storage, keys = bench.open(arena), bench.keys(count)
        assert aligned(storage.batch_contains(keys), count) == [MISS] * count
        assert storage.batch_exists(keys) == 0
        bench.stored(storage, keys)
        assert aligned(storage.batch_get(keys, arena.pages()), count) == [OK] * count
        arena.check({i: bench.page(key) for i, key in enumerate(keys)})
        assert aligned(storage.batch_contains(keys), count) == [OK] * count
        assert storage.batch_exists(keys) == count

    @pytest.mark.clause("C7", "C1")
    def test_c7_an_empty_batch_gives_an_empty_list(self, bench: Bench) -> None:
        arena = bench.arena(2)
        storage = bench.open(arena)
        none = arena.pages([])
        answers = [storage.batch_contains([]), storage.batch_get([], none), storage.batch_set([], none)]
        assert answers == [[], [], []]
        assert [type(answer) for answer in answers] == [list] * 3
        assert storage.batch_exists([]) == 0
        assert storage.touch([]) is None  # type: ignore[func-returns-value]
        arena.check()

    @pytest.mark.clause("C7")
    @pytest.mark.needs("remove")
    def test_c7_an_empty_remove_gives_an_empty_list(self, bench: Bench) -> None:
        answer = bench.open().batch_remove([])
        assert (type(answer), answer) == (list, [])

    @pytest.mark.clause("C1", "C2")
    @pytest.mark.parametrize("hole", range(8), ids=lambda i: f"hole_at_{i}")
    def test_c1_hole_leaves_every_other_page_in_its_own_slot(self, bench: Bench, hole: int) -> None:
        _allowed(bench, 8)
        arena = bench.arena(10)
        storage, keys = bench.open(arena), bench.keys(8)
        bench.stored(storage, keys[:hole] + keys[hole + 1 :])
        wanted = [MISS if i == hole else OK for i in range(8)]
        assert aligned(storage.batch_contains(keys), 8) == wanted
        assert storage.batch_exists(keys) == hole
        assert aligned(storage.batch_get(keys, arena.pages(range(8))), 8) == wanted
        arena.check({i: bench.page(keys[i]) for i in range(8) if i != hole}, undefined=[hole])

    @pytest.mark.clause("C1", "C2")
    @pytest.mark.parametrize("portion", [0.1, 0.5, 0.9], ids=["few_present", "half_present", "most_present"])
    def test_c1_many_holes_anywhere(self, bench: Bench, portion: float) -> None:
        count = _at_most(bench, 128)
        dice = random.Random(f"{bench.seed}/{portion}")
        arena = bench.arena(count)
        storage, keys = bench.open(arena), bench.keys(count)
        present = [dice.random() < portion for _ in keys]
        bench.stored(storage, [key for key, there in zip(keys, present, strict=True) if there])
        wanted = [OK if there else MISS for there in present]
        assert aligned(storage.batch_contains(keys), count) == wanted
        assert aligned(storage.batch_get(keys, arena.pages()), count) == wanted
        arena.check(
            {i: bench.page(keys[i]) for i in range(count) if present[i]},
            undefined=[i for i in range(count) if not present[i]],
        )

    @pytest.mark.clause("C1", "C2")
    def test_c1_keys_and_slots_in_any_order(self, bench: Bench) -> None:
        count = _at_most(bench, 64)
        dice = random.Random(bench.seed)
        arena = bench.arena(2 * count)
        storage, keys = bench.open(arena), bench.keys(count)
        bench.stored(storage, keys)
        dice.shuffle(keys)
        slots = dice.sample(range(2 * count), count)
        assert aligned(storage.batch_get(keys, arena.pages(slots)), count) == [OK] * count
        arena.check({slot: bench.page(key) for key, slot in zip(keys, slots, strict=True)})

    @pytest.mark.clause("C1", "C3")
    def test_c1_a_set_takes_each_page_from_its_own_slot(self, bench: Bench) -> None:
        count = _at_most(bench, 32)
        dice = random.Random(bench.seed)
        arena = bench.arena(2 * count)
        storage, keys = bench.open(arena), bench.keys(count)
        slots = dice.sample(range(2 * count), count)
        for key, slot in zip(keys, slots, strict=True):
            arena.fill(slot, bench.page(key))
        arena.freeze()
        assert aligned(storage.batch_set(keys, arena.pages(slots)), count) == [OK] * count
        arena.check()
        assert bench.versions(storage, keys) == [0] * count

    @pytest.mark.clause("C1", "C4")
    @pytest.mark.parametrize("present", ["1000", "0100", "0001", "1010", "0110"])
    def test_c1_a_set_of_present_and_absent_keys_stores_the_absent(self, bench: Bench, present: str) -> None:
        storage, keys = bench.open(), bench.keys(4)
        bench.stored(storage, [key for key, there in zip(keys, present, strict=True) if there == "1"])
        bench.stored(storage, keys, version=1)
        assert bench.versions(storage, keys) == [0 if there == "1" else 1 for there in present]

    @pytest.mark.clause("C7", "C2")
    def test_c7_repeated_keys_in_a_get_fill_each_slot(self, bench: Bench) -> None:
        arena = bench.arena(8)
        storage, keys = bench.open(arena), bench.keys(3)
        bench.stored(storage, keys[:2])
        asked = [0, 1, 0, 2, 0, 1, 2]
        wanted = [MISS if i == 2 else OK for i in asked]
        assert aligned(storage.batch_get([keys[i] for i in asked], arena.pages(range(7))), 7) == wanted
        pages = {slot: bench.page(keys[i]) for slot, i in enumerate(asked) if i != 2}
        arena.check(pages, undefined=[3, 6])
        assert aligned(storage.batch_contains([keys[i] for i in asked]), 7) == wanted

    @pytest.mark.clause("C7", "C2")
    @pytest.mark.parametrize("asked", ["00", "010", "0110", "01230123", "00000000"])
    def test_c7_repeated_keys_all_of_them_present_fill_each_slot(self, bench: Bench, asked: str) -> None:
        _allowed(bench, len(asked))
        arena = bench.arena(len(asked) + 1)
        storage, keys = bench.open(arena), bench.keys(4)
        bench.stored(storage, keys)
        batch = [keys[int(i)] for i in asked]
        statuses = aligned(storage.batch_get(batch, arena.pages(range(len(batch)))), len(batch))
        assert statuses == [OK] * len(batch)
        arena.check({slot: bench.page(key) for slot, key in enumerate(batch)})
        assert aligned(storage.batch_contains(batch), len(batch)) == [OK] * len(batch)
        assert storage.batch_exists(batch) == len(batch)

    @pytest.mark.clause("C7", "C4")
    def test_c7_a_key_repeated_in_a_set_is_stored_once_and_whole(self, bench: Bench) -> None:
        arena = bench.arena(4)
        storage, keys = bench.open(arena), bench.keys(2)
        for slot, (i, version) in enumerate([(0, 0), (1, 0), (0, 1), (0, 2)]):
            arena.fill(slot, bench.page(keys[i], version=version))
        asked = [keys[0], keys[1], keys[0], keys[0]]
        assert aligned(storage.batch_set(asked, arena.pages()), 4) == [OK] * 4
        (first, second), again = bench.versions(storage, keys), bench.versions(storage, keys)
        assert first in (0, 1, 2)
        assert second == 0
        assert again == [first, second]
        assert storage.usage().pages == 2

    @pytest.mark.clause("C7")
    @pytest.mark.needs("remove")
    def test_c7_a_key_repeated_in_a_remove_is_removed_once(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(2)
        bench.stored(storage, keys)
        assert aligned(storage.batch_remove([keys[0], keys[0]]), 2) == [OK, MISS]
        assert bench.versions(storage, keys) == [MISS, 0]

    @pytest.mark.clause("C1", "C5")
    @pytest.mark.parametrize("bad", [0, 3, 7])
    def test_c1_a_value_of_another_size_in_the_middle_spoils_no_other(self, bench: Bench, bad: int) -> None:
        arena = bench.arena(9)
        storage, keys = bench.open(arena), bench.keys(8)
        bench.stored(storage, keys[:bad] + keys[bad + 1 :])
        bench.stored(storage, [keys[bad]], PAGE_NBYTES // 2)
        wanted = [SIZE_MISMATCH if i == bad else OK for i in range(8)]
        assert aligned(storage.batch_get(keys, arena.pages(range(8))), 8) == wanted
        arena.check({i: bench.page(keys[i]) for i in range(8) if i != bad}, undefined=[bad])

    @pytest.mark.clause("C1", "C5")
    @pytest.mark.needs("checksum")
    @pytest.mark.faults("damage_flip")
    @pytest.mark.parametrize("bad", [0, 3, 7])
    def test_c1_a_damaged_value_in_the_middle_spoils_no_other(self, bench: Bench, bad: int) -> None:
        arena = bench.arena(9)
        storage, keys = bench.open(arena), bench.keys(8)
        bench.stored(storage, keys)
        bench.damage(keys[bad], "flip")
        wanted = [CORRUPT if i == bad else OK for i in range(8)]
        assert aligned(storage.batch_get(keys, arena.pages(range(8))), 8) == wanted
        arena.check({i: bench.page(keys[i]) for i in range(8) if i != bad}, undefined=[bad])

    @pytest.mark.clause("C1", "C2", "C3", "C4", "C5", "C6", "C7")
    @pytest.mark.budget(120)
    def test_c4_random_calls_agree_with_a_dictionary(self, bench: Bench) -> None:
        machine = _machine(bench, bench.open())
        seed(bench.seed)(machine)
        run_state_machine_as_test(machine, settings=_SETTINGS)


_SETTINGS = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    database=None,
    verbosity=Verbosity.quiet,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)

_batches = st.lists(st.integers(0, 11), min_size=0, max_size=10)


def _machine(bench: Bench, storage: HiCacheStorage) -> type[RuleBasedStateMachine]:
    """Make a machine whose examples share the storage and have keys of their own."""
    can_remove = bench.capabilities.remove
    can_clear = bench.capabilities.clear
    round_ = [0]

    class Model(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            round_[0] += 1
            self.keys = bench.keys(12, label=f"model-{round_[0]}")
            self.pages: dict[str, tuple[int, int]] = {}

        @rule(batch=_batches, version=st.integers(0, 3), nbytes=st.sampled_from([512, 513]))
        def set(self, batch: list[int], version: int, nbytes: int) -> None:
            keys = [self.keys[i] for i in dict.fromkeys(batch)]
            present = {key: self.pages[key] for key in keys if key in self.pages}
            statuses = bench.set(storage, keys, nbytes, version)
            for key, status in zip(keys, statuses, strict=True):
                if key not in present or present[key][0] == nbytes:
                    assert status is OK
                    self.pages.setdefault(key, (nbytes, version))
                elif status is OK:
                    self.pages[key] = (nbytes, version)

        @rule(batch=_batches, nbytes=st.sampled_from([512, 513]))
        def get(self, batch: list[int], nbytes: int) -> None:
            keys = [self.keys[i] for i in batch]
            for key, (status, value) in zip(keys, bench.get(storage, keys, nbytes), strict=True):
                stored = self.pages.get(key)
                if stored is None:
                    assert status is MISS
                elif stored[0] != nbytes:
                    assert status is SIZE_MISMATCH
                    # Known bad from now on: put it right, so that the model stays a plain dictionary.
                    bench.stored(storage, [key], nbytes, stored[1])
                    self.pages[key] = (nbytes, stored[1])
                elif status is SIZE_MISMATCH:
                    assert keys.count(key) > 1
                else:
                    assert (status, value) == (OK, bench.page(key, nbytes, stored[1]))

        @rule(batch=_batches)
        def contains(self, batch: list[int]) -> None:
            keys = [self.keys[i] for i in batch]
            wanted = [OK if key in self.pages else MISS for key in keys]
            assert aligned(storage.batch_contains(keys), len(keys)) == wanted
            assert storage.batch_exists(keys) == [*wanted, MISS].index(MISS)

        @precondition(lambda _: can_remove)
        @rule(batch=_batches)
        def remove(self, batch: list[int]) -> None:
            keys = [self.keys[i] for i in dict.fromkeys(batch)]
            wanted = [OK if self.pages.pop(key, None) else MISS for key in keys]
            assert aligned(storage.batch_remove(keys), len(keys)) == wanted

        @precondition(lambda _: can_clear)
        @rule()
        def clear(self) -> None:
            assert storage.clear() >= len(self.pages)
            self.pages.clear()

    return Model


def _allowed(bench: Bench, count: int) -> None:
    if count > _at_most(bench, count):
        pytest.skip(f"unsupported: batches above {bench.capabilities.max_batch} pages, which HiCache splits")


def _at_most(bench: Bench, count: int) -> int:
    limit: Any = bench.capabilities.max_batch
    return min(count, limit or count)
