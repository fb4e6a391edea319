"""Level fault: values damaged, the server paused, killed and restarted (C5, C10, C11)."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hicache_conformance.bench import PAGE_NBYTES, Bench, aligned
from hicache_conformance.calls import PATIENCE_S, Call, pause_for
from hicache_conformance.harness import Damage
from hicache_conformance.stopped import (
    COUNT,
    NBYTES,
    TIMEOUT_S,
    call_verb,
    limit_s,
    met_a_stop,
    pause_at_some_moment,
    ready,
    recovers,
    returned,
    until_trouble,
)
from hicache_core import BackendUnavailable, HiCacheStorage, Status, StorageClosed, Verified

OK, MISS, CORRUPT, SIZE_MISMATCH = Status.OK, Status.MISS, Status.CORRUPT, Status.SIZE_MISMATCH
TROUBLE = {Status.UNAVAILABLE, Status.TIMEOUT}

#: How long a late write is waited for.
LATE_S = 0.3

VERBS = ["get", "set", "contains"]


class FaultLevel:
    """Cases of level fault."""

    # Damaged values.

    @pytest.mark.clause("C5", "C6", "C2")
    @pytest.mark.needs("checksum")
    @pytest.mark.parametrize("how", ["flip", "zero"])
    def test_c5_damaged_bytes_are_corrupt_and_then_not_contained(self, bench: Bench, how: Damage) -> None:
        _can_damage(bench, how)
        arena = bench.arena(3)
        storage, keys = bench.open(arena), bench.keys(3)
        bench.stored(storage, keys)
        bench.damage(keys[1], how)
        assert aligned(storage.batch_get(keys, arena.pages()), 3) == [OK, CORRUPT, OK]
        arena.check({0: bench.page(keys[0]), 2: bench.page(keys[2])}, undefined=[1])
        contains = aligned(storage.batch_contains(keys), 3)
        assert (contains[0], contains[2], contains[1] is OK) == (OK, OK, False)
        assert storage.batch_exists(keys) == 1

    @pytest.mark.clause("C5", "C6")
    @pytest.mark.faults("damage_truncate")
    def test_c5_a_value_that_lost_bytes_is_never_ok(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(2)
        bench.stored(storage, keys)
        bench.damage(keys[1], "truncate")
        statuses = [status for status, _ in bench.get(storage, keys)]
        assert statuses[0] is OK
        assert statuses[1] in (SIZE_MISMATCH, CORRUPT, MISS)
        assert aligned(storage.batch_contains(keys[1:]), 1)[0] is not OK

    @pytest.mark.clause("C6", "C2")
    @pytest.mark.faults("damage_lose")
    def test_c6_a_value_that_was_lost_is_never_ok(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(3)
        bench.stored(storage, keys)
        bench.damage(keys[1], "lose")
        statuses = [status for status, _ in bench.get(storage, keys)]
        assert (statuses[0], statuses[2]) == (OK, OK)
        assert statuses[1] in (MISS, CORRUPT, SIZE_MISMATCH)
        assert aligned(storage.batch_contains(keys[1:2]), 1)[0] is not OK

    @pytest.mark.clause("C4", "C5")
    @pytest.mark.parametrize("how", ["flip", "zero", "truncate", "lose"])
    def test_c4_a_value_known_to_be_bad_is_replaced(self, bench: Bench, how: Damage) -> None:
        _can_damage(bench, how)
        storage, keys = bench.open(), bench.keys(2)
        bench.stored(storage, keys)
        bench.damage(keys[0], how)
        assert bench.get(storage, keys)[0][0] is not OK
        bench.stored(storage, keys, version=1)
        assert bench.versions(storage, keys) == [1, 0]
        assert aligned(storage.batch_contains(keys), 2) == [OK, OK]
        assert bench.versions(storage, keys) == [1, 0]

    @pytest.mark.clause("C5", "C4")
    @pytest.mark.needs("checksum", "shared")
    @pytest.mark.faults("damage_flip")
    def test_c5_damage_is_seen_by_every_instance_and_repaired_for_every_instance(self, bench: Bench) -> None:
        one, two, keys = bench.open(), bench.open(), bench.keys(1)
        bench.stored(one, keys)
        bench.damage(keys[0], "flip")
        assert [bench.get(storage, keys)[0][0] for storage in (one, two)] == [CORRUPT, CORRUPT]
        bench.stored(one, keys, version=1)
        assert bench.versions(one, keys) == [1]
        assert bench.versions(two, keys) == [1]

    @pytest.mark.clause("C5", "C13")
    @pytest.mark.needs("verify", "remove")
    @pytest.mark.faults("damage_flip")
    def test_c5_verify_finds_all_damage_and_removes_it_when_asked(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(6)
        neighbour = bench.open(identity=dataclasses.replace(bench.identity, model="a neighbour's"))
        bench.stored(neighbour, keys)
        bench.stored(storage, keys)
        whole = Verified(pages=6, bytes=6 * PAGE_NBYTES)
        assert sum(storage.verify(), Verified()) == whole
        for key in (keys[1], keys[4]):
            bench.damage(key, "flip")
        bad = dataclasses.replace(whole, damaged=2)
        assert sum(storage.verify(), Verified()) == bad
        assert sum(storage.verify(remove=True), Verified()) == dataclasses.replace(bad, removed=2)
        good = [True, False, True, True, False, True]
        for each in (storage, bench.open()) if bench.capabilities.shared else (storage,):
            assert [status is OK for status in aligned(each.batch_contains(keys), 6)] == good
        assert sum(storage.verify(remove=True), Verified()) == Verified(pages=4, bytes=4 * PAGE_NBYTES)
        bench.stored(storage, keys, version=1)
        assert bench.versions(storage, keys) == [0, 1, 0, 0, 1, 0]
        assert bench.versions(neighbour, keys) == [0] * 6

    # A server that is gone.

    @pytest.mark.clause("C10", "C11", "C3")
    @pytest.mark.faults("kill", "restart")
    @pytest.mark.parametrize("verb", VERBS)
    def test_c10_a_dead_server_is_a_status_for_each_key_in_time(self, bench: Bench, verb: str) -> None:
        arena = bench.arena(COUNT, NBYTES)
        storage, keys = bench.open(arena, timeout_s=TIMEOUT_S), bench.keys(COUNT, arena.component)
        bench.stored(storage, keys[:4], NBYTES)
        bench.kill()
        arena.freeze()
        call = Call(lambda: call_verb(verb, storage, keys, arena))
        statuses = aligned(call.result(limit_s(bench)), COUNT)
        assert set(statuses) <= TROUBLE
        arena.check(undefined=range(COUNT) if verb == "get" else ())
        bench.restart()
        assert recovers(bench, storage), "C10: the storage does not come back with its server"

    @pytest.mark.clause("C10", "C11")
    @pytest.mark.faults("kill", "restart")
    def test_c10_counting_verbs_raise_unavailable_when_the_server_is_dead(self, bench: Bench) -> None:
        storage, keys = bench.open(timeout_s=TIMEOUT_S), bench.keys(2)
        bench.stored(storage, keys)
        bench.kill()
        verbs: list[Callable[[], Any]] = [storage.usage]
        verbs += [storage.clear] if bench.capabilities.clear else []
        for verb in verbs:
            with pytest.raises(BackendUnavailable):
                Call(verb).result(limit_s(bench))
        try:
            assert Call(lambda: storage.batch_exists(keys)).result(limit_s(bench)) == 0
        except BackendUnavailable:
            pass  # the other answer that the contract allows
        storage.touch(keys)
        bench.restart()

    @pytest.mark.clause("C7", "C10")
    @pytest.mark.faults("kill", "restart")
    def test_c7_an_empty_batch_reaches_no_server(self, bench: Bench) -> None:
        arena = bench.arena(1)
        storage = bench.open(arena, timeout_s=TIMEOUT_S)
        bench.kill()
        none = arena.pages([])
        answers = [storage.batch_contains([]), storage.batch_get([], none), storage.batch_set([], none)]
        assert answers == [[], [], []]
        bench.restart()

    @pytest.mark.clause("C10", "C11")
    @pytest.mark.faults("kill", "restart")
    def test_c10_opening_on_a_dead_server_raises_in_time(self, bench: Bench) -> None:
        bench.kill()
        storage = bench.create(timeout_s=TIMEOUT_S)
        with pytest.raises(BackendUnavailable):
            Call(storage.open).result(limit_s(bench))
        storage.close()
        bench.restart()

    @pytest.mark.clause("C4", "C10", "C11")
    @pytest.mark.faults("kill", "restart")
    @pytest.mark.parametrize("verb", VERBS)
    @pytest.mark.parametrize("round_", range(2))
    def test_c10_a_server_killed_in_the_middle(self, bench: Bench, verb: str, round_: int) -> None:
        arena = bench.arena(COUNT, NBYTES)
        storage = bench.open(arena, timeout_s=TIMEOUT_S)
        keys = ready(bench, storage, arena, verb, f"middle-{verb}-{round_}")
        call = Call(lambda: until_trouble(verb, storage, keys, arena))
        pause_for(random.Random(f"{bench.seed}/{verb}/{round_}").uniform(0.0, 0.05))
        bench.kill()
        done, statuses = call.result(limit_s(bench))
        assert set(aligned(statuses, COUNT)) <= {OK, *TROUBLE}
        if verb == "get":
            whole = {i: bench.page(key, NBYTES) for i, key in enumerate(keys) if statuses[i] is OK}
            arena.check(whole, undefined=[i for i in range(COUNT) if i not in whole])
        bench.restart()
        assert recovers(bench, storage)
        seen = bench.versions(storage, keys, NBYTES)
        assert set(seen) <= {0, MISS}, f"after {done} calls and a kill: {seen}"

    # A server that does not answer.

    @pytest.mark.clause("C11", "C10", "C2")
    @pytest.mark.faults("pause")
    @pytest.mark.parametrize("verb", VERBS)
    def test_c11_a_paused_server_costs_no_more_than_the_deadline(self, bench: Bench, verb: str) -> None:
        arena = bench.arena(COUNT, NBYTES)
        storage = bench.open(arena, timeout_s=TIMEOUT_S)
        keys = ready(bench, storage, arena, verb, f"paused-{verb}")
        arena.freeze()
        bench.pause()
        statuses = returned(bench, Call(lambda: call_verb(verb, storage, keys, arena)))
        assert set(statuses) <= TROUBLE or bench.capabilities.deadline in ("hold", "none")
        if verb != "get":
            arena.check()
        bench.resume()
        assert recovers(bench, storage)

    @pytest.mark.clause("C11", "C10")
    @pytest.mark.faults("pause")
    @pytest.mark.parametrize("verb", ["batch_exists", "usage", "touch"])
    def test_c11_a_paused_server_holds_no_other_verb_either(self, bench: Bench, verb: str) -> None:
        storage = bench.open(timeout_s=TIMEOUT_S)
        _paused_verb(bench, storage, verb)

    @pytest.mark.clause("C11", "C10")
    @pytest.mark.faults("pause")
    @pytest.mark.needs("clear")
    def test_c11_a_paused_server_does_not_hold_clear(self, bench: Bench) -> None:
        storage = bench.open(timeout_s=TIMEOUT_S)
        _paused_verb(bench, storage, "clear")

    @pytest.mark.clause("C11", "C10")
    @pytest.mark.faults("pause")
    @pytest.mark.needs("remove")
    def test_c11_a_paused_server_does_not_hold_remove(self, bench: Bench) -> None:
        storage, keys = bench.open(timeout_s=TIMEOUT_S), bench.keys(3)
        bench.stored(storage, keys)
        bench.pause()
        statuses = returned(bench, Call(lambda: storage.batch_remove(keys)))
        assert set(aligned(statuses, 3)) <= TROUBLE or bench.capabilities.deadline in ("hold", "none")
        bench.resume()
        assert recovers(bench, storage)
        assert set(bench.versions(storage, keys)) <= {0, MISS}

    @pytest.mark.clause("C11", "C2")
    @pytest.mark.faults("pause")
    @pytest.mark.budget(120)
    @pytest.mark.parametrize("round_", range(3))
    def test_c11_no_slot_is_written_once_a_get_has_returned(self, bench: Bench, round_: int) -> None:
        arena = bench.arena(COUNT, NBYTES)
        storage = bench.open(arena, timeout_s=TIMEOUT_S)
        keys = ready(bench, storage, arena, "get", f"late-write-{round_}")
        call = Call(lambda: until_trouble("get", storage, keys, arena))
        pause_at_some_moment(bench, f"late-write-{round_}")
        _, statuses = returned(bench, call)
        for index in range(COUNT):
            arena.fill(index, bench.page(f"refill-{index}", NBYTES))
        arena.freeze()
        bench.resume()
        assert recovers(bench, storage)
        pause_for(LATE_S)
        arena.check()
        assert set(statuses) <= {OK, *TROUBLE}

    @pytest.mark.clause("C11", "C4", "C3")
    @pytest.mark.faults("pause")
    @pytest.mark.budget(120)
    @pytest.mark.parametrize("round_", range(3))
    def test_c11_no_slot_is_read_once_a_set_has_returned(self, bench: Bench, round_: int) -> None:
        arena = bench.arena(COUNT, NBYTES)
        storage = bench.open(arena, timeout_s=TIMEOUT_S)
        batches = [bench.keys(COUNT, arena.component, f"late-read-{round_}-{i}") for i in range(400)]
        sent: list[list[str]] = []

        def set_all() -> list[Status]:
            for keys in batches:
                for index, key in enumerate(keys):
                    arena.fill(index, bench.page(key, NBYTES))
                sent.append(keys)
                started = time.monotonic()
                statuses = aligned(storage.batch_set(keys, arena.pages()), COUNT)
                if set(statuses) != {OK} or met_a_stop(started):
                    return statuses
            return []

        call = Call(set_all)
        pause_at_some_moment(bench, f"late-read-{round_}")
        statuses = returned(bench, call)
        for index in range(COUNT):
            arena.fill(index, bench.page(f"refill-{index}", NBYTES))
        bench.resume()
        assert recovers(bench, storage)
        pause_for(LATE_S)
        keys = sent[-1]
        seen = bench.versions(storage, keys, NBYTES)
        allowed = [{0} if status is OK else {0, MISS} for status in statuses]
        assert all(v in a for v, a in zip(seen, allowed, strict=True)), (
            f"set said {statuses}, stored is {seen}"
        )
        bench.stored(storage, keys, NBYTES)
        assert bench.versions(storage, keys, NBYTES) == [0] * COUNT

    @pytest.mark.clause("C11", "C2")
    @pytest.mark.faults("pause")
    def test_c11_an_answer_that_comes_too_late_is_given_to_nobody(self, bench: Bench) -> None:
        storage = bench.open(timeout_s=TIMEOUT_S)
        first, second = bench.keys(4, label="first"), bench.keys(4, label="second")
        bench.stored(storage, first + second)
        bench.pause()
        returned(bench, Call(lambda: [status for status, _ in bench.get(storage, first)]))
        bench.resume()
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            seen = bench.versions(storage, second)
            assert set(seen) <= {0, *TROUBLE}, f"a get gave {seen} after another one had timed out"
            if seen == [0] * 4:
                break
        assert bench.versions(storage, second) == [0] * 4
        assert bench.versions(storage, first) == [0] * 4

    @pytest.mark.clause("C11", "C12")
    @pytest.mark.faults("pause")
    def test_c11_many_calls_on_a_paused_server_pile_up_nothing(self, bench: Bench) -> None:
        if bench.capabilities.deadline not in ("cancel", "bounce"):
            pytest.skip("unsupported: a means to leave calls behind")
        arenas = [bench.arena(2) for _ in range(12)]
        storage, keys = bench.open(*arenas, timeout_s=TIMEOUT_S / 2), bench.keys(2)
        bench.stored(storage, keys)
        bench.pause()
        for half in (arenas[:6], arenas[6:]):
            calls = [Call(partial(storage.batch_get, keys, arena.pages())) for arena in half]
            for call in calls:
                assert set(aligned(call.result(limit_s(bench)), 2)) <= TROUBLE
        bench.resume()
        assert recovers(bench, storage)
        for arena in arenas:
            arena.check(undefined=[0, 1])

    @pytest.mark.clause("C12", "C11", "C2")
    @pytest.mark.faults("pause")
    def test_c12_close_during_a_call_that_hangs(self, bench: Bench) -> None:
        arena = bench.arena(COUNT, NBYTES)
        storage = bench.open(arena, timeout_s=TIMEOUT_S)
        keys = ready(bench, storage, arena, "get", "closing")
        bench.pause()
        call = Call(lambda: storage.batch_get(keys, arena.pages()))
        pause_for(0.1)
        closing = Call(storage.close)
        closing.result(limit_s(bench))
        with pytest.raises(StorageClosed):
            storage.batch_contains(keys)
        statuses = returned(bench, call)
        arena.freeze()
        bench.resume()
        pause_for(LATE_S)
        arena.check()
        assert set(statuses) <= {OK, *TROUBLE}

    @pytest.mark.clause("C10", "C11")
    @pytest.mark.faults("pause")
    def test_c11_opening_on_a_paused_server_raises_in_time(self, bench: Bench) -> None:
        bench.pause()
        storage = bench.create(timeout_s=TIMEOUT_S)
        try:
            with pytest.raises(BackendUnavailable):
                Call(storage.open).result(limit_s(bench))
        finally:
            storage.close()
            bench.resume()

    @pytest.mark.clause("C10", "C14")
    @pytest.mark.faults("restart")
    @pytest.mark.parametrize("verb", VERBS)
    def test_c10_a_server_restarted_in_the_middle(self, bench: Bench, verb: str) -> None:
        arena = bench.arena(COUNT, NBYTES)
        storage = bench.open(arena)
        keys = ready(bench, storage, arena, verb, f"restarted-{verb}")
        call = Call(lambda: [call_verb(verb, storage, keys, arena) for _ in range(20)])
        bench.restart()
        for statuses in call.result(PATIENCE_S * 2):
            assert set(aligned(statuses, COUNT)) <= {OK, MISS, *TROUBLE}
        assert recovers(bench, storage)
        assert set(bench.versions(storage, keys, NBYTES)) <= {0, MISS}


def _paused_verb(bench: Bench, storage: HiCacheStorage, verb: str) -> None:
    """Call a verb that gives no statuses on a paused server: in time it raises, or says nothing false."""
    keys = bench.keys(2)
    bench.stored(storage, keys)
    calls: dict[str, Callable[[], Any]] = {
        "batch_exists": lambda: storage.batch_exists(keys),
        "usage": storage.usage,
        "touch": lambda: storage.touch(keys),
        "clear": storage.clear,
    }
    bench.pause()
    try:
        answer = returned(bench, Call(calls[verb]))
    except BackendUnavailable:
        assert verb != "touch", "C10: touch raises nothing"
    else:
        late = bench.capabilities.deadline in ("hold", "none")
        assert verb == "touch" or late or (verb == "batch_exists" and answer == 0), f"it answered {answer!r}"
    bench.resume()
    assert recovers(bench, storage)


def _can_damage(bench: Bench, how: Damage) -> None:
    if f"damage_{how}" not in bench.harness.faults:
        pytest.skip(f"unsupported: the harness cannot 'damage_{how}'")
    if how in ("flip", "zero") and not bench.capabilities.checksum:
        pytest.skip("unsupported: 'checksum' is not declared")
