"""Counters and histograms: right under threads, bounded, and read as a snapshot."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_core.counters import LATENCY_BUCKETS, VERBS, Counters, VerbStats
from hicache_core.status import Status

OK, MISS = Status.OK, Status.MISS


def test_it_begins_at_nothing_for_every_verb() -> None:
    assert dict(Counters().snapshot()) == {
        verb: VerbStats(0, 0, 0, 0.0, {}, (0,) * LATENCY_BUCKETS) for verb in VERBS
    }


def test_a_call_is_counted_by_pages_bytes_statuses_and_time() -> None:
    counters = Counters()
    counters.record("get", [OK, MISS, OK, Status.CORRUPT], 100, 0.003)
    counters.record("get", [MISS], 100, 0.001)
    got = counters.snapshot()["get"]
    assert (got.calls, got.pages, got.nbytes, round(got.seconds, 9)) == (2, 5, 200, 0.004)
    assert got.statuses == {OK: 2, MISS: 2, Status.CORRUPT: 1}
    assert {bucket: count for bucket, count in enumerate(got.latency) if count} == {10: 1, 12: 1}
    assert counters.snapshot()["set"].calls == 0


def test_a_snapshot_does_not_change_afterwards() -> None:
    counters = Counters()
    before = counters.snapshot()
    counters.record("get", [OK], 1, 0.0)
    assert before["get"].calls == 0
    with pytest.raises(TypeError):
        before["get"] = None  # type: ignore[index]
    with pytest.raises(TypeError):
        before["get"].statuses[OK] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        (0.0, 0),
        (1e-7, 0),
        (1e-6, 1),
        (1.9e-6, 1),
        (2e-6, 2),
        (1e-3, 10),
        (1.0, 20),
        (1e9, LATENCY_BUCKETS - 1),
    ],
)
def test_a_duration_falls_into_its_bucket(seconds: float, bucket: int) -> None:
    counters = Counters()
    counters.record("get", [OK], 1, seconds)
    assert counters.snapshot()["get"].latency[bucket] == 1


@given(
    st.lists(st.floats(2e-6, 1000.0), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_a_quantile_is_an_upper_bound_within_twice_the_true_one(seconds: list[float], share: float) -> None:
    counters = Counters()
    for each in seconds:
        counters.record("get", [OK], 1, each)
    wanted = sorted(seconds)[max(0, -(-round(share * len(seconds) * 1000) // 1000) - 1)]
    assert wanted <= counters.snapshot()["get"].quantile_s(share) <= 2 * wanted + 2e-6


def test_a_quantile_without_calls_is_nothing() -> None:
    assert Counters().snapshot()["get"].quantile_s(0.5) == 0.0


@pytest.fixture
def hasty() -> Iterator[None]:
    """Let threads change places as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
def test_nothing_is_lost_under_eight_threads() -> None:
    counters, rounds = Counters(), 2000

    def work() -> None:
        for _ in range(rounds):
            counters.record("get", [OK, MISS], 10, 1e-6)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got = counters.snapshot()["get"]
    assert (got.calls, got.pages, got.nbytes, got.latency[1]) == (
        *(8 * rounds, 16 * rounds, 80 * rounds),
        8 * rounds,
    )
    assert got.statuses == {OK: 8 * rounds, MISS: 8 * rounds}
