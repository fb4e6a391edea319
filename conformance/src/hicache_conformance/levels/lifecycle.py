"""Level lifecycle: before open, after close, over and over, across a fork (C12, C16)."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from hicache_conformance.bench import Bench, aligned
from hicache_conformance.builders import Arena
from hicache_conformance.calls import PATIENCE_S, Call
from hicache_conformance.held import Held, SharedMemory, held
from hicache_conformance.peer import Peer
from hicache_core import HiCacheStorage, InvalidArgument, Status, StorageClosed, StorageNotOpened

OK, MISS = Status.OK, Status.MISS

#: What a hundred open storages may leave in the pockets of allocators.
RSS_SLACK_NBYTES = 8 << 20
#: Rounds before anything is counted: what a library makes once, on first use, is there by then.
WARM_UPS = 10
#: Descriptors, threads, names that a library may still add to what it keeps for good (a pool that fills up as
#: it is used); one left behind by each open, or by each tenth, is more.
KEPT_AT_MOST = 8

#: A verb, called with one key on an arena that the storage may or may not know.
VERBS: dict[str, Callable[[HiCacheStorage, list[str], Arena], Any]] = {
    "batch_contains": lambda storage, keys, arena: storage.batch_contains(keys),
    "batch_exists": lambda storage, keys, arena: storage.batch_exists(keys),
    "batch_get": lambda storage, keys, arena: storage.batch_get(keys, arena.pages([0])),
    "batch_set": lambda storage, keys, arena: storage.batch_set(keys, arena.pages([0])),
    "batch_remove": lambda storage, keys, arena: storage.batch_remove(keys),
    "touch": lambda storage, keys, arena: storage.touch(keys),
    "clear": lambda storage, keys, arena: storage.clear(),
    "usage": lambda storage, keys, arena: storage.usage(),
    "add_pool": lambda storage, keys, arena: storage.add_pool(arena.pool),
    "drop_pool": lambda storage, keys, arena: storage.drop_pool(arena.pool),
}


class LifecycleLevel:
    """Cases of level lifecycle."""

    @pytest.mark.clause("C10", "C12")
    @pytest.mark.parametrize("verb", VERBS)
    def test_c10_verb_before_open_is_refused(self, bench: Bench, verb: str) -> None:
        storage, arena = bench.create(), bench.arena(1)
        with pytest.raises(StorageNotOpened):
            VERBS[verb](storage, bench.keys(1), arena)
        arena.check()

    @pytest.mark.clause("C12")
    @pytest.mark.parametrize("verb", VERBS)
    def test_c12_verb_after_close_is_refused(self, bench: Bench, verb: str) -> None:
        arena = bench.arena(1)
        storage = bench.open(arena)
        storage.close()
        with pytest.raises(StorageClosed):
            VERBS[verb](storage, bench.keys(1), arena)
        arena.check()

    @pytest.mark.clause("C12")
    def test_c12_close_may_be_called_again_and_before_open(self, bench: Bench) -> None:
        storage, unopened = bench.open(), bench.create()
        for _ in range(3):
            storage.close()
            unopened.close()
        assert not storage.is_open

    @pytest.mark.clause("C12")
    def test_c12_a_closed_storage_stays_closed(self, bench: Bench) -> None:
        storage = bench.open()
        storage.close()
        with pytest.raises(StorageClosed):
            storage.open()

    @pytest.mark.clause("C12")
    def test_c12_a_new_storage_works_after_the_old_one_was_closed(self, bench: Bench) -> None:
        keys = bench.keys(2)
        bench.open().close()
        storage = bench.open()
        bench.stored(storage, keys, version=1)
        assert bench.versions(storage, keys) == [1, 1]

    @pytest.mark.clause("C12")
    @pytest.mark.budget(180)
    def test_c12_a_hundred_opens_leave_nothing_behind(self, bench: Bench) -> None:
        arena, keys, shared = bench.arena(4), bench.keys(5), SharedMemory()

        def cycle() -> None:
            storage = bench.create()
            storage.open([arena.pool])
            storage.batch_set(keys[:4], arena.pages())
            storage.batch_get(keys[1:], arena.pages())
            shared.look()
            storage.close()

        for _ in range(WARM_UPS):
            cycle()
        before, names = held(), shared.left()
        rounds = _rounds(cycle, 50, 60.0)
        middle = held()
        rounds += _rounds(cycle, 50, 60.0)
        end = held()
        more = sorted(shared.left() - names)
        assert rounds > 2 * KEPT_AT_MOST, f"only {rounds} opens in 120 s"
        assert len(more) <= KEPT_AT_MOST, f"{rounds} opens leave in /dev/shm: {more}"
        _little_is_left(before, middle, end, f"{rounds} opens")

    @pytest.mark.clause("C12", "C2")
    def test_c12_gets_with_holes_leave_nothing_behind(self, bench: Bench) -> None:
        nbytes = min(1 << 17, bench.capabilities.max_page_nbytes or 1 << 17)
        arena = bench.arena(8, nbytes)
        storage, keys = bench.open(arena), bench.keys(8, arena.component)
        present = [i % 3 == 0 for i in range(8)]
        bench.stored(storage, [key for key, there in zip(keys, present, strict=True) if there], nbytes)
        wanted = [OK if there else MISS for there in present]
        for _ in range(2 * WARM_UPS):
            storage.batch_get(keys, arena.pages())
        before = held()
        answers = [storage.batch_get(keys, arena.pages()) for _ in range(100)]
        middle = held()
        answers += [storage.batch_get(keys, arena.pages()) for _ in range(100)]
        end = held()
        assert answers == [wanted] * 200
        _little_is_left(before, middle, end, "200 gets with holes")

    @pytest.mark.clause("C12", "C8")
    @pytest.mark.parametrize("round_", range(3))
    def test_c12_close_while_verbs_run(self, bench: Bench, round_: int) -> None:
        arenas = [bench.arena(16) for _ in range(4)]
        storage, keys = bench.open(*arenas, timeout_s=5.0), bench.keys(16)
        bench.stored(storage, keys[:8])
        counts = [0] * len(arenas)

        def work(which: int) -> str:
            arena, fresh = arenas[which], bench.keys(16, label=f"close-{round_}-{which}")
            try:
                while True:
                    aligned(storage.batch_get(keys, arena.pages()), 16)
                    aligned(storage.batch_set(fresh, arena.pages()), 16)
                    aligned(storage.batch_contains(keys), 16)
                    counts[which] += 1
            except StorageClosed:
                return "refused"

        calls = [Call(partial(work, which)) for which in range(len(arenas))]
        _spin(lambda: min(counts) > 2)
        closing = Call(storage.close)
        closing.result(5.0 + 1.0 + bench.site.slack_s)
        for arena in arenas:
            arena.freeze()
        assert [call.result() for call in calls] == ["refused"] * len(calls)
        for arena in arenas:
            arena.check()

    @pytest.mark.clause("C12")
    def test_c12_the_child_of_a_fork_finds_it_closed_and_the_parent_goes_on(self, bench: Bench) -> None:
        arena = bench.arena(2)
        storage, keys = bench.open(arena), bench.keys(2)
        bench.stored(storage, keys[:1])
        answers = _in_fork(lambda: _refusals(storage, keys[:1], arena))
        assert answers == ["StorageClosed"] * len(answers)
        assert bench.versions(storage, keys) == [0, MISS]
        bench.stored(storage, keys[1:])
        assert bench.versions(storage, keys) == [0, 0]

    @pytest.mark.clause("C12", "C8")
    def test_c12_forks_while_other_threads_are_in_verbs(self, bench: Bench) -> None:
        arenas = [bench.arena(8) for _ in range(3)]
        storage, keys = bench.open(*arenas), bench.keys(8)
        stop = threading.Event()
        counts = [0] * len(arenas)

        def work(which: int) -> int:
            while not stop.is_set():
                aligned(storage.batch_set(keys, arenas[which].pages()), 8)
                aligned(storage.batch_get(keys, arenas[which].pages()), 8)
                counts[which] += 1
            return counts[which]

        calls = [Call(partial(work, which)) for which in range(len(arenas))]
        try:
            _spin(lambda: min(counts) > 0)
            for _ in range(8):
                answers = _in_fork(lambda: _refusals(storage, keys[:1], arenas[0]))
                assert answers == ["StorageClosed"] * len(answers)
        finally:
            stop.set()
        assert all(call.result() for call in calls)

    @pytest.mark.clause("C12", "C3")
    @pytest.mark.faults("second_process")
    def test_c12_a_spawned_process_opens_and_closes_without_disturbing_this_one(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.keys(2)
        bench.stored(storage, keys)
        peer = bench.peer(bench.component())
        other = bench.keys(2, label="of-the-peer")
        assert peer.ask("set", keys=other) == ["OK", "OK"]
        assert peer.ask("get", keys=other) == [["OK", 0], ["OK", 0]]
        peer.close()
        assert peer.process.returncode == 0
        assert bench.versions(storage, keys) == [0, 0]

    @pytest.mark.clause("C10", "C12")
    def test_c10_a_dropped_pool_is_unknown_and_the_same_pool_twice_is_one(self, bench: Bench) -> None:
        arena = bench.arena(2)
        storage, keys = bench.open(), bench.keys(1)
        storage.add_pool(arena.pool)
        storage.add_pool(arena.pool)
        assert aligned(storage.batch_set(keys, arena.pages([0])), 1) == [OK]
        storage.drop_pool(arena.pool)
        with pytest.raises(InvalidArgument):
            storage.batch_get(keys, arena.pages([1]))
        storage.drop_pool(arena.pool)
        arena.check()

    @pytest.mark.clause("C8", "C12")
    def test_c8_pools_come_and_go_while_others_are_in_use(self, bench: Bench) -> None:
        arena = bench.arena(8)
        storage, keys = bench.open(arena), bench.keys(4)
        bench.stored(storage, keys)
        stop = threading.Event()

        def work() -> int:
            rounds = 0
            while not stop.is_set():
                assert aligned(storage.batch_get(keys, arena.pages(range(4))), 4) == [OK] * 4
                rounds += 1
            return rounds

        call = Call(work)
        try:
            for i in range(50):
                guest = Arena(bench.component(1024, "guest"), 4)
                guest_keys = bench.keys(4, guest.component, f"guest-{i}")
                storage.add_pool(guest.pool)
                assert aligned(storage.batch_set(guest_keys, guest.pages()), 4) == [OK] * 4
                storage.drop_pool(guest.pool)
        finally:
            stop.set()
        assert call.result() > 0
        arena.check({i: bench.page(key) for i, key in enumerate(keys)})

    @pytest.mark.clause("C16")
    def test_c16_no_process_state_is_changed_and_nothing_is_printed(self, bench: Bench) -> None:
        if not bench.site.subject.reference:
            pytest.skip("not-run: no other process can find this subject")
        command = [sys.executable, "-m", "hicache_conformance.state", bench.setup(bench.component())]
        peer = Peer(bench.harness.second_process(command))
        try:
            assert peer.answer(2 * PATIENCE_S) == []
        finally:
            peer.close()


def _refusals(storage: HiCacheStorage, keys: list[str], arena: Arena) -> list[str]:
    """Tell how each verb ends in a fork's child."""
    answers = []
    for verb in ("batch_contains", "batch_exists", "batch_get", "batch_set", "touch", "usage"):
        try:
            answers.append(repr(VERBS[verb](storage, keys, arena)))
        except Exception as error:  # noqa: BLE001 - its name is the answer
            answers.append(type(error).__name__)
    storage.close()
    return answers


def _in_fork(function: Callable[[], list[str]]) -> list[str]:
    """Run a function in a forked child and give its result; a child that hangs is killed."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of forks with threads: they are what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], PATIENCE_S)
        if not ready:
            os.kill(child, signal.SIGKILL)
            raise AssertionError("C12: a verb hangs in the child of a fork")
        answer = os.read(reader, 1 << 16)
        assert answer, "C12: the child of a fork crashed"
        result: list[str] = json.loads(answer)
        return result
    finally:
        os.close(reader)
        os.waitpid(child, 0)


def _rounds(function: Callable[[], None], most: int, limit_s: float) -> int:
    """Call it so often, or for so long; give how often."""
    count, deadline = 0, time.monotonic() + limit_s
    while count < most and time.monotonic() < deadline:
        function()
        count += 1
    return count


def _little_is_left(before: Held, middle: Held, end: Held, what: str) -> None:
    """Require that of many rounds nothing is left but what a library keeps for good.

    Memory that it fills once may come at any time, so what a leak leaves must show in both halves.
    """
    grown, later = end.since(before), end.since(middle)
    assert grown.descriptors <= KEPT_AT_MOST, f"{what} leave {grown.descriptors} descriptors"
    assert grown.threads <= KEPT_AT_MOST, f"{what} leave {grown.threads} threads"
    leaks = grown.rss_nbytes >= RSS_SLACK_NBYTES and later.rss_nbytes >= RSS_SLACK_NBYTES // 2
    assert not leaks, (
        f"{what} leave {grown.rss_nbytes >> 10} KiB, {later.rss_nbytes >> 10} of them in the second half"
    )


def _spin(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the other threads get nothing done"
        threading.Event().wait(0.001)
