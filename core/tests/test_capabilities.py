"""Capabilities: compared by value, refused where malformed, narrowed and never widened."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hicache_core.capabilities import Capabilities
from hicache_core.errors import InvalidArgument

FLAGS = (
    *("shared", "persistent", "durable", "remove", "clear", "listing", "verify", "checksum"),
    *("zero_copy", "device_memory", "needs_registered"),
)
LIMITS = ("max_segments", "max_batch", "max_page_nbytes")


def violations(declared: dict[str, Any], opened: dict[str, Any]) -> list[str]:
    return Capabilities(**declared).narrowing_violations(Capabilities(**opened))


def test_the_fields_are_those_of_the_design() -> None:
    assert {field.name for field in dataclasses.fields(Capabilities)} == {
        *FLAGS,
        *LIMITS,
        *("eviction", "deadline", "transport"),
    }


def test_equal_by_value_and_frozen() -> None:
    assert Capabilities(shared=True) == Capabilities(shared=True)
    assert hash(Capabilities()) == hash(Capabilities())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Capabilities().shared = True  # type: ignore[misc]


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_may_be_dropped_and_not_raised(flag: str) -> None:
    assert violations({flag: True}, {flag: False}) == []
    assert violations({flag: False}, {flag: True}) == [f"{flag}: False to True"]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(
    ("declared", "opened", "wider"),
    [(8, 4, False), (8, 8, False), (None, 4, False), (4, 8, True), (8, None, True), (None, None, False)],
)
def test_a_limit_may_go_down_and_not_up(limit: str, declared: Any, opened: Any, wider: bool) -> None:
    wanted = [f"{limit}: {declared} to {opened}"] if wider else []
    assert violations({limit: declared}, {limit: opened}) == wanted


@pytest.mark.parametrize(
    ("declared", "opened", "wider"),
    [
        ("lru", "none", False),
        ("lru", "approx", False),
        ("approx", "none", False),
        ("ttl", "none", False),
        ("approx", "lru", True),
        ("none", "lru", True),
        ("lru", "ttl", True),
        ("ttl", "approx", True),
    ],
)
def test_eviction_may_go_to_a_weaker_promise(declared: str, opened: str, wider: bool) -> None:
    wanted = [f"eviction: '{declared}' to '{opened}'"] if wider else []
    assert violations({"eviction": declared}, {"eviction": opened}) == wanted


@pytest.mark.parametrize("declared", ["cancel", "bounce", "hold", "none"])
@pytest.mark.parametrize("opened", ["cancel", "bounce", "hold", "none"])
def test_the_means_of_the_deadline_may_go_to_a_weaker_one(declared: str, opened: str) -> None:
    order = ["cancel", "bounce", "hold", "none"]
    wider = order.index(opened) < order.index(declared)
    wanted = [f"deadline: '{declared}' to '{opened}'"] if wider else []
    assert violations({"deadline": declared}, {"deadline": opened}) == wanted


def test_the_transport_is_free_text() -> None:
    assert violations({"transport": "tcp"}, {"transport": "rdma"}) == []


def test_every_widening_is_named() -> None:
    wider = violations({"max_batch": 8}, {"shared": True, "clear": True, "max_batch": 9})
    assert wider == ["shared: False to True", "clear: False to True", "max_batch: 8 to 9"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"eviction": "fifo"},
            "capability 'eviction' has an unknown value: 'fifo'. Use one of: lru, approx, ttl, none.",
        ),
        (
            {"deadline": "soon"},
            "capability 'deadline' has an unknown value: 'soon'. Use one of: cancel, bounce, hold, none.",
        ),
        ({"max_batch": 0}, "capability 'max_batch' is not a limit: 0. Give a count from 1, or None."),
        ({"max_segments": -1}, "capability 'max_segments' is not a limit: -1. Give a count from 1, or None."),
        (
            {"max_page_nbytes": True},
            "capability 'max_page_nbytes' is not a limit: True. Give a count from 1, or None.",
        ),
        ({"max_batch": 1.5}, "capability 'max_batch' is not a limit: 1.5. Give a count from 1, or None."),
        ({"shared": "no"}, "capability 'shared' is not a promise: 'no'. Write True or False."),
        ({"clear": None}, "capability 'clear' is not a promise: None. Write True or False."),
        ({"clear": 1}, "capability 'clear' is not a promise: 1. Write True or False."),
    ],
)
def test_a_malformed_capability_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Capabilities(**changes)
    assert str(caught.value) == message
