"""A library that answers late, strangely or never, callers that are interrupted, sets that fail."""

from __future__ import annotations

import ctypes

import pytest
from eic_builders import NBYTES, Opener, an_arena, keys_of

from hicache_core import Status
from hicache_eic.simulator import eic

OK, MISS, ERROR = Status.OK, Status.MISS, Status.ERROR


@pytest.mark.clause("C9")
def test_c9_after_a_set_that_failed_at_a_new_chunk_clear_finds_the_later_ones(opener: Opener):
    arena = an_arena(8)
    storage = opener(arena, workers=1, retries=0)
    for start in range(0, 64, 8):
        storage.batch_set(keys_of(64)[start : start + 8], arena.pages(range(8)))
    opener.simulator.quirks(fail={"mset": 1})
    assert storage.batch_set(keys_of(1, "failed"), arena.pages([0])) == [Status.UNAVAILABLE]
    opener.simulator.quirks()
    assert storage.batch_set(keys_of(2, "later"), arena.pages([0, 1])) == [OK, OK]
    assert storage.usage().pages == 66
    assert storage.clear() == 66
    assert storage.batch_contains(keys_of(2, "later")) == [MISS, MISS]


@pytest.mark.clause("C5")
def test_c5_a_transfer_that_lands_late_does_not_pass_for_another_page(opener: Opener, monkeypatch):
    arena, (first, second) = an_arena(4), keys_of(2)
    storage = opener(arena, workers=1, retries=0)
    assert storage.batch_set([first, second], arena.pages([0, 1])) == [OK, OK]
    mget, late = eic.Client.mget, []

    def lagging(self, keys, option, values):
        """Say FAILED for the first page, and let it land in the memory of the next get."""
        status, buffers, outcome = mget(self, keys, option, values)
        address, nbytes, _ = values.items[0]
        if not late:
            late.append(ctypes.string_at(address, nbytes))
            ctypes.memset(address, 0, nbytes)
            outcome.status_codes = [eic.StatusCode.FAILED]
        else:
            ctypes.memmove(address, late[0], nbytes)
        return status, buffers, outcome

    with monkeypatch.context() as patched:
        patched.setattr(eic.Client, "mget", lagging)
        assert storage.batch_get([first], arena.pages([2])) == [Status.UNAVAILABLE]
        assert storage.batch_get([second], arena.pages([3])) == [Status.CORRUPT]
    assert storage.batch_set([second], arena.pages([1])) == [OK]
    assert storage.batch_get([second], arena.pages([3])) == [OK]
    arena.check({3: b"\2" * NBYTES})
