"""The breaker: a state machine over an injected clock, against a model."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hicache_core.breaker import FAILURES_TO_OPEN, PROBE_LEASE_S, Breaker, BreakerState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(failures_to_open=3, first_pause_s=1.0, longest_pause_s=4.0, clock=clock)


def opened(breaker: Breaker) -> Breaker:
    for _ in range(3):
        breaker.fail()
    return breaker


def test_it_begins_closed_and_lets_everybody_through(breaker: Breaker) -> None:
    assert breaker.state is BreakerState.CLOSED
    assert [breaker.allow() for _ in range(5)] == [True] * 5


def test_failures_in_a_row_open_it(breaker: Breaker) -> None:
    assert [breaker.fail(), breaker.fail(), breaker.fail()] == [False, False, True]
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allow()


def test_an_answer_between_failures_starts_the_count_anew(breaker: Breaker) -> None:
    breaker.fail()
    breaker.fail()
    assert not breaker.succeed()
    assert [breaker.fail(), breaker.fail()] == [False, False]
    assert breaker.state is BreakerState.CLOSED


def test_a_trip_opens_it_at_once(breaker: Breaker) -> None:
    assert breaker.trip()
    assert not breaker.trip()
    assert breaker.state is BreakerState.OPEN


def test_after_the_pause_one_caller_probes(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 0.99
    assert not breaker.allow()
    clock.now += 0.01
    assert [breaker.allow(), breaker.allow(), breaker.allow()] == [True, False, False]
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_probe_that_is_answered_closes_it(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 1
    breaker.allow()
    assert breaker.succeed()
    assert breaker.state is BreakerState.CLOSED
    assert [breaker.fail(), breaker.fail()] == [False, False]


def test_a_probe_that_fails_doubles_the_pause_up_to_the_longest(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    pauses = []
    for _ in range(5):
        start = clock.now
        while not breaker.allow():
            clock.now += 0.25
        pauses.append(clock.now - start)
        assert not breaker.fail()
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_closing_takes_the_pause_back(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 1
    breaker.allow()
    breaker.fail()
    clock.now += 2
    breaker.allow()
    breaker.succeed()
    opened(breaker)
    clock.now += 1
    assert breaker.allow()


def test_a_probe_that_never_reports_lets_another_one_through(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += 1
    assert breaker.allow()
    clock.now += PROBE_LEASE_S
    assert breaker.allow()


def test_failures_of_calls_that_were_under_way_do_not_lengthen_the_pause(
    breaker: Breaker, clock: Clock
) -> None:
    opened(breaker)
    for _ in range(10):
        breaker.fail()
    clock.now += 1
    assert breaker.allow()


def test_of_many_threads_one_probes(clock: Clock) -> None:
    breaker = Breaker(failures_to_open=1, clock=clock)
    breaker.fail()
    clock.now += 100
    barrier, let = threading.Barrier(8), []

    def ask() -> None:
        barrier.wait()
        if breaker.allow():
            let.append(1)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(let) == 1


def test_the_defaults_are_those_that_are_documented() -> None:
    breaker = Breaker()
    assert [breaker.fail() for _ in range(FAILURES_TO_OPEN)] == [False] * (FAILURES_TO_OPEN - 1) + [True]


class AgainstModel(RuleBasedStateMachine):
    """The breaker beside a model that keeps plain numbers and no states."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.breaker = Breaker(failures_to_open=2, first_pause_s=1.0, longest_pause_s=4.0, clock=self.clock)
        self.failures = 0
        self.open_until: float | None = None
        self.probing = False
        self.pause = 1.0

    def _opens(self) -> None:
        first = self.open_until is None
        self.pause = 1.0 if first else min(self.pause * 2, 4.0)
        self.open_until = self.clock.now + self.pause
        self.probing = False

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def ask(self) -> None:
        if self.open_until is None:
            wanted = True
        elif self.clock.now < self.open_until:
            wanted = False
        else:
            wanted = self.probing = True
            self.open_until = self.clock.now + PROBE_LEASE_S
        assert self.breaker.allow() == wanted

    @rule()
    def succeed(self) -> None:
        assert self.breaker.succeed() == (self.open_until is not None)
        self.failures, self.open_until, self.probing, self.pause = 0, None, False, 1.0

    @rule()
    def fail(self) -> None:
        self.failures += 1
        opens = self.probing or (self.open_until is None and self.failures >= 2)
        newly = opens and self.open_until is None
        if opens:
            self._opens()
        assert self.breaker.fail() == newly

    @rule()
    def trip(self) -> None:
        newly = self.open_until is None
        if newly or self.probing:
            self._opens()
        assert self.breaker.trip() == newly

    @invariant()
    def the_states_agree(self) -> None:
        wanted = BreakerState.CLOSED if self.open_until is None else BreakerState.OPEN
        assert self.breaker.state is (BreakerState.HALF_OPEN if self.probing else wanted)


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
