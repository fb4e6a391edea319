"""VerbGate under threads, close with its deadline, and what a fork does to instances."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from core_caches import WAIT_S, in_child

from hicache_core import lifecycle
from hicache_core.errors import StorageClosed, StorageNotOpened
from hicache_core.lifecycle import VerbGate, close_in_child


def an_open_gate() -> VerbGate:
    gate = VerbGate("acme")
    gate.open()
    return gate


@contextmanager
def running_verbs(gate: VerbGate, count: int = 1) -> Iterator[threading.Event]:
    """Hold verbs inside the gate until the event is set, or the block ends."""
    leave, inside = threading.Event(), threading.Semaphore(0)

    def verb() -> None:
        with gate:
            inside.release()
            leave.wait(WAIT_S)

    threads = [threading.Thread(target=verb) for _ in range(count)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert inside.acquire(timeout=WAIT_S)
    try:
        yield leave
    finally:
        leave.set()
        for thread in threads:
            thread.join(WAIT_S)


# Before, during, after.


@pytest.mark.clause("C10")
def test_c10_a_verb_before_open_is_refused() -> None:
    gate = VerbGate("acme")
    for enter in (gate.__enter__, gate.check):
        with pytest.raises(StorageNotOpened, match=r"^'acme' is not open"):
            enter()
    assert not gate.enter()
    assert (gate.is_open, gate.is_closed, gate.running) == (False, False, 0)


@pytest.mark.clause("C12")
def test_c12_a_verb_after_close_is_refused() -> None:
    gate = an_open_gate()
    assert gate.close(1.0)
    for enter in (gate.__enter__, gate.check, gate.check_new, gate.open):
        with pytest.raises(StorageClosed, match=r"^'acme' is closed"):
            enter()
    assert not gate.enter()
    assert (gate.is_open, gate.is_closed, gate.running) == (False, True, 0)


def test_verbs_are_counted_even_if_they_raise() -> None:
    gate = an_open_gate()
    counted = []

    def verb() -> None:
        with gate:
            counted.append(gate.running)
            raise KeyError

    with pytest.raises(KeyError):
        verb()
    assert (counted, gate.running) == ([1], 0)


@pytest.mark.clause("C12")
def test_c12_close_is_idempotent() -> None:
    gate = an_open_gate()
    assert [gate.close(1.0), gate.close(1.0)] == [True, True]


@pytest.mark.clause("C12")
def test_c12_a_gate_that_was_never_open_can_be_closed() -> None:
    gate = VerbGate("acme")
    assert gate.close(1.0)
    with pytest.raises(StorageClosed):
        gate.open()


# Under threads.


def test_the_count_is_right_under_threads() -> None:
    gate = an_open_gate()

    def work() -> None:
        for _ in range(2000):
            with gate:
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert gate.running == 0
    assert gate.close(1.0)


@pytest.mark.clause("C12")
def test_c12_close_waits_for_running_verbs_and_refuses_new_ones() -> None:
    gate = an_open_gate()
    closed: list[bool] = []
    with running_verbs(gate, 3) as leave:
        closer = threading.Thread(target=lambda: closed.append(gate.close(10 * WAIT_S)))
        closer.start()
        while not gate.is_closed:
            pass
        assert not gate.enter()
        assert closed == []
        leave.set()
        closer.join(WAIT_S)
    assert closed == [True]


@pytest.mark.clause("C12")
def test_c12_close_abandons_at_the_deadline() -> None:
    gate = an_open_gate()
    with running_verbs(gate):
        started = time.monotonic()
        drained = gate.close(0.05)
        took = time.monotonic() - started
    assert not drained
    assert 0.05 <= took < 1.0
    assert gate.close(WAIT_S)


def test_a_verb_that_ends_after_its_gate_was_abandoned_does_no_harm() -> None:
    gate = an_open_gate()
    with running_verbs(gate) as leave:
        assert not gate.close(0.0)
        leave.set()
        assert gate.close(WAIT_S)
    assert gate.running == 0


def test_several_may_close_at_once() -> None:
    gate = an_open_gate()
    closed: list[bool] = []
    with running_verbs(gate) as leave:
        closers = [threading.Thread(target=lambda: closed.append(gate.close(WAIT_S))) for _ in range(4)]
        for closer in closers:
            closer.start()
        leave.set()
        for closer in closers:
            closer.join(WAIT_S)
    assert closed == [True] * 4


# Forks.


class Instance:
    """Something with a gate that a fork must close."""

    def __init__(self) -> None:
        self.gate = an_open_gate()
        self.told = 0
        close_in_child(self)

    def after_fork_in_child(self) -> None:
        self.told += 1
        self.gate.abandon_in_child()


class Raising(Instance):
    def after_fork_in_child(self) -> None:
        raise OSError("a descriptor is gone")


@pytest.mark.clause("C12")
def test_c12_the_child_is_closed_and_the_parent_is_not() -> None:
    instance = Instance()
    assert in_child(lambda: instance.gate.is_closed and not instance.gate.enter()) == "ok"
    assert instance.gate.is_open
    assert instance.told == 0


@pytest.mark.clause("C12")
def test_c12_the_child_does_not_wait_for_a_lock_that_a_thread_of_the_parent_held() -> None:
    instance = Instance()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with instance.gate._idle:
            held.set()
            release.wait(WAIT_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(WAIT_S)
    try:
        assert in_child(lambda: instance.gate.close(5.0) and not instance.gate.enter()) == "ok"
    finally:
        release.set()
        thread.join(WAIT_S)


@pytest.mark.clause("C12")
def test_c12_verbs_of_the_parent_are_not_waited_for_in_the_child() -> None:
    instance = Instance()
    with running_verbs(instance.gate, 2):
        assert in_child(lambda: instance.gate.running == 0 and instance.gate.close(5.0)) == "ok"


@pytest.mark.clause("C12")
def test_c12_a_fork_inside_a_verb_leaves_a_child_that_closes_at_once() -> None:
    instance = Instance()

    def leave_and_close() -> bool:
        instance.gate.leave()
        started = time.monotonic()
        return instance.gate.close(5.0) and time.monotonic() - started < 1.0

    with instance.gate:
        assert in_child(leave_and_close) == "ok"


@pytest.mark.clause("C12")
def test_c12_one_instance_that_raises_does_not_keep_the_others_open() -> None:
    first, raising, last = Instance(), Raising(), Instance()
    assert in_child(lambda: first.gate.is_closed and last.gate.is_closed) == "ok"
    assert raising.gate.is_open


@pytest.mark.clause("C12")
def test_c12_grandchildren_are_closed_too() -> None:
    def fork_again() -> bool:
        instance = Instance()
        return in_child(lambda: instance.gate.is_closed) == "ok" and instance.gate.is_open

    assert in_child(fork_again) == "ok"


def test_an_instance_is_not_kept_alive_for_the_sake_of_a_fork() -> None:
    instance = Instance()
    key = id(instance)
    assert key in lifecycle._watched
    del instance
    assert key not in lifecycle._watched
