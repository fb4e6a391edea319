"""Status: true only when OK, compared and counted by identity, frozen in its numbers."""

from __future__ import annotations

import pickle

import pytest

from hicache_core.status import OK, Status


def test_only_ok_is_true() -> None:
    assert [status for status in Status if status] == [Status.OK]
    assert OK is Status.OK


def test_numbers_are_frozen() -> None:
    assert {status.name: int(status) for status in Status} == {
        "OK": 1,
        "MISS": 2,
        "SIZE_MISMATCH": 3,
        "CORRUPT": 4,
        "NO_SPACE": 5,
        "DENIED": 6,
        "TIMEOUT": 7,
        "UNAVAILABLE": 8,
        "SKIPPED": 9,
        "ERROR": 10,
    }


@pytest.mark.parametrize("status", Status, ids=lambda status: status.name)
def test_a_status_stays_itself_through_pickle(status: Status) -> None:
    assert pickle.loads(pickle.dumps(status)) is status


def test_counting_finds_ok_only() -> None:
    assert [OK, Status.MISS, OK, Status.ERROR].count(OK) == 2
    assert all([OK, OK])
    assert not all([OK, Status.MISS])
