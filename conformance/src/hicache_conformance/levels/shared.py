"""Level shared: other instances and other processes of the namespace see what was set (C3, C4, C9)."""

from __future__ import annotations

import random

import pytest

from hicache_conformance.bench import Bench, aligned
from hicache_conformance.calls import Call, pause_for
from hicache_core import Component, Status

OK, MISS = Status.OK, Status.MISS

#: Large enough that a kill has a fair chance to fall into a transfer.
LARGE_NBYTES = 1 << 16


class SharedLevel:
    """Cases of level shared."""

    @pytest.mark.clause("C3")
    @pytest.mark.needs("shared")
    def test_c3_another_instance_sees_each_ok_set_at_once(self, bench: Bench) -> None:
        one, two, keys = bench.open(), bench.open(), bench.keys(20)
        for key in keys:
            bench.stored(one, [key])
            assert aligned(two.batch_contains([key]), 1) == [OK]
            assert bench.versions(two, [key]) == [0]

    @pytest.mark.clause("C3")
    @pytest.mark.needs("shared")
    def test_c3_a_miss_is_not_remembered_when_another_instance_sets(self, bench: Bench) -> None:
        one, two, keys = bench.open(), bench.open(), bench.keys(5)
        assert aligned(two.batch_contains(keys), 5) == [MISS] * 5
        assert bench.versions(two, keys) == [MISS] * 5
        bench.stored(one, keys)
        assert aligned(two.batch_contains(keys), 5) == [OK] * 5
        assert bench.versions(two, keys) == [0] * 5

    @pytest.mark.clause("C3")
    @pytest.mark.needs("shared")
    def test_c3_pages_stay_when_the_instance_that_set_them_closes(self, bench: Bench) -> None:
        one, two, keys = bench.open(), bench.open(), bench.keys(5)
        bench.stored(one, keys)
        one.close()
        assert bench.versions(two, keys) == [0] * 5

    @pytest.mark.clause("C3")
    @pytest.mark.needs("shared")
    @pytest.mark.faults("second_process")
    def test_c3_a_second_process_sees_and_is_seen(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(8)
        peer = bench.peer(bench.component())
        assert peer.ask("contains", keys=keys) == ["MISS"] * 8
        bench.stored(storage, keys[:4])
        assert peer.ask("contains", keys=keys) == ["OK"] * 4 + ["MISS"] * 4
        assert peer.ask("get", keys=keys) == [["OK", 0]] * 4 + [["MISS", None]] * 4
        assert peer.ask("set", keys=keys[4:], version=1) == ["OK"] * 4
        assert bench.versions(storage, keys) == [0] * 4 + [1] * 4

    @pytest.mark.clause("C4")
    @pytest.mark.needs("shared")
    @pytest.mark.faults("second_process")
    def test_c4_a_second_process_changes_no_page(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(3)
        peer = bench.peer(bench.component())
        bench.stored(storage, keys)
        assert peer.ask("set", keys=keys, version=1) == ["OK"] * 3
        assert peer.ask("get", keys=keys) == [["OK", 0]] * 3
        assert bench.versions(storage, keys) == [0] * 3

    @pytest.mark.clause("C4", "C8")
    @pytest.mark.needs("shared")
    @pytest.mark.faults("second_process")
    def test_c4_processes_that_set_the_same_keys_agree_afterwards(self, bench: Bench) -> None:
        storage = bench.open()
        peers = bench.peers(bench.component(), 2)
        for round_ in range(10):
            keys = bench.keys(8, label=f"race-{round_}")
            for version, peer in enumerate(peers):
                peer.tell("set", keys=keys, version=version)
            assert [peer.answer() for peer in peers] == [["OK"] * 8] * 2
            seen = bench.versions(storage, keys)
            assert set(seen) <= {0, 1}
            assert [[v for _, v in peer.ask("get", keys=keys)] for peer in peers] == [seen, seen]

    @pytest.mark.clause("C4", "C2")
    @pytest.mark.needs("shared")
    @pytest.mark.faults("second_process")
    @pytest.mark.parametrize("round_", range(3))
    def test_c4_a_process_killed_in_a_set_leaves_whole_pages_or_none(self, bench: Bench, round_: int) -> None:
        component = bench.component(LARGE_NBYTES)
        storage = bench.open()
        keys = killed_in_a_set(bench, component, f"killed-{round_}-")[0]
        got = bench.get(storage, keys, LARGE_NBYTES)
        for key, (status, value) in zip(keys, got, strict=True):
            assert status in (OK, MISS)
            assert status is MISS or value == bench.page(key, LARGE_NBYTES)
        bench.stored(storage, keys, LARGE_NBYTES)
        assert bench.versions(storage, keys, LARGE_NBYTES) == [0] * len(keys)

    @pytest.mark.clause("C9")
    @pytest.mark.needs("shared", "clear")
    def test_c9_clear_holds_for_another_instance(self, bench: Bench) -> None:
        one, two, keys = bench.open(), bench.open(), bench.keys(10)
        bench.stored(one, keys[:5])
        bench.stored(two, keys[5:])
        assert bench.versions(two, keys) == [0] * 10
        assert one.clear() == 10
        assert aligned(two.batch_contains(keys), 10) == [MISS] * 10
        assert bench.versions(two, keys) == [MISS] * 10
        bench.stored(two, keys, version=1)
        assert bench.versions(one, keys) == [1] * 10

    @pytest.mark.clause("C9")
    @pytest.mark.needs("shared", "clear")
    @pytest.mark.faults("second_process")
    def test_c9_clear_by_another_process_holds_here_and_the_other_way(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(6)
        peer = bench.peer(bench.component())
        bench.stored(storage, keys[:3])
        assert peer.ask("set", keys=keys[3:]) == ["OK"] * 3
        assert peer.ask("clear") == 6
        assert bench.versions(storage, keys) == [MISS] * 6
        bench.stored(storage, keys, version=1)
        assert peer.ask("get", keys=keys) == [["OK", 1]] * 6
        assert storage.clear() == 6
        assert peer.ask("contains", keys=keys) == ["MISS"] * 6

    @pytest.mark.clause("C9", "C3")
    @pytest.mark.needs("shared", "clear")
    @pytest.mark.faults("second_process")
    def test_c9_clear_by_another_process_while_sets_run(self, bench: Bench) -> None:
        storage = bench.open()
        peer = bench.peer(bench.component())
        before, after = bench.keys(32, label="before"), bench.keys(32, label="after")
        bench.stored(storage, before)
        during = [bench.keys(8, label=f"during-{i}") for i in range(20)]
        call = Call(lambda: [bench.set(storage, keys) for keys in during])
        peer.ask("clear")
        assert set(call.result()[0]) <= {OK}
        bench.stored(storage, after)
        assert bench.versions(storage, before) == [MISS] * 32
        assert bench.versions(storage, after) == [0] * 32
        seen = [version for keys in during for version in bench.versions(storage, keys)]
        assert set(seen) <= {0, MISS}

    @pytest.mark.clause("C13", "C3")
    @pytest.mark.needs("shared", "remove")
    def test_c13_remove_holds_for_another_instance(self, bench: Bench) -> None:
        one, two, keys = bench.open(), bench.open(), bench.keys(4)
        bench.stored(one, keys)
        assert bench.versions(two, keys) == [0] * 4
        assert aligned(one.batch_remove(keys[1:3]), 2) == [OK, OK]
        assert bench.versions(two, keys) == [0, MISS, MISS, 0]
        bench.stored(two, keys[1:2], version=1)
        assert bench.versions(one, keys) == [0, 1, MISS, 0]

    @pytest.mark.clause("C13")
    @pytest.mark.needs("shared")
    def test_c13_usage_is_the_namespaces_and_not_the_instances(self, bench: Bench) -> None:
        one, two, keys = bench.open(), bench.open(), bench.keys(6)
        bench.stored(one, keys[:4])
        bench.stored(two, keys[4:])
        assert (one.usage().pages, two.usage().pages) == (6, 6)


def killed_in_a_set(bench: Bench, component: Component, prefix: str) -> tuple[list[str], list[str]]:
    """Kill a process at a random moment of setting batches of 8 for ever.

    Gives the keys of its last batches, and those that it had been told were OK.
    """
    dice = random.Random(f"{bench.seed}/{prefix}")
    peer = bench.peer(component)
    peer.tell("set_forever", prefix=prefix, batch=8, suffix=component.key)
    told = [peer.answer() for _ in range(dice.randrange(1, 6))]
    pause_for(dice.uniform(0, 0.02))
    peer.kill()
    told += peer.rest()
    begun = len(told) + 1  # the batch that the kill may have cut
    first = max(0, begun - 10)
    keys = [f"{prefix}{i}.{component.key}" for i in range(first * 8, begun * 8)]
    return keys, [key for batch in told for key in batch]
