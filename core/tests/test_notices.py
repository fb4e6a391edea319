"""Log lines: one a reason and interval, with how many were held back, and bounded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from hicache_core.notices import MAX_REASONS, Notices, described


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, logger="hicache"):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_the_same_reason_is_said_once_an_interval(lines: Callable[[], list[str]]) -> None:
    now = [0.0]
    notices = Notices(interval_s=60.0, clock=lambda: now[0])
    for second in range(0, 130, 10):
        now[0] = float(second)
        notices.warn("hicache 'a' get", "ERROR", f"at {second}")
    assert lines() == [
        "hicache 'a' get: at 0",
        "hicache 'a' get: at 60 (5 more like it since the last such line)",
        "hicache 'a' get: at 120 (5 more like it since the last such line)",
    ]


def test_other_reasons_and_subjects_are_said_beside_it(lines: Callable[[], list[str]]) -> None:
    notices = Notices(clock=lambda: 0.0)
    notices.warn("a", "x", "1")
    notices.warn("a", "y", "2")
    notices.warn("b", "x", "3")
    notices.warn("a", "x", "4")
    assert lines() == ["a: 1", "a: 2", "b: 3"]


def test_what_is_remembered_is_bounded() -> None:
    notices = Notices(clock=lambda: 0.0)
    for number in range(3 * MAX_REASONS):
        notices.warn("a", f"reason {number}", "x")
        assert len(notices._last) <= MAX_REASONS


def test_a_line_with_percent_signs_is_said_as_it_is(lines: Callable[[], list[str]]) -> None:
    Notices().warn("a %s", "x", "100 %d")
    assert lines() == ["a %s: 100 %d"]


class Broken:
    def __repr__(self) -> str:
        raise RecursionError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (KeyError("k"), "KeyError('k')"),
        (Broken(), "a Broken"),
        ([Broken()], "a list"),
        ([0] * 10**6, "[0, 0, 0, 0, 0, 0, 0, 0, 0]"),
        ("x" * 10**6, "'xxxxxxxxx'"),
        (RuntimeError("x" * 1000), f"RuntimeError('{'x' * 183}..."),
    ],
    ids=["none", "error", "broken", "list of broken", "long list", "long text", "long error"],
)
def test_anything_is_described_shortly(value: object, text: str) -> None:
    assert described(value) == text
