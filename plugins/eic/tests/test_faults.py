"""A library that answers late, strangely or never, callers that are interrupted, sets that fail."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from types import SimpleNamespace

import pytest
from eic_builders import NBYTES, Opener, an_arena, keys_of, soon

from hicache_conformance.calls import Call, until
from hicache_core import Status
from hicache_core.errors import BackendTimeout, BackendUnavailable
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


STRANGE = {
    "None": lambda count: None,
    "no outcome": lambda count: (0, None, None),
    "no codes": lambda count: (0, *[SimpleNamespace(status_codes=None)] * 2),
    "codes that are none": lambda count: (0, *[SimpleNamespace(status_codes=[[]] * count)] * 2),
    "False, which equals SUCCESS": lambda count: (0, *[SimpleNamespace(status_codes=[False] * count)] * 2),
    "a KeyError": lambda count: {}["answer"],
}


@pytest.mark.clause("C10")
@pytest.mark.parametrize("answer", STRANGE.values(), ids=STRANGE)
def test_c10_strange_answers_are_no_answers(opener: Opener, monkeypatch, answer):
    arena, keys = an_arena(2), keys_of(2)
    storage = opener(arena, retries=0)
    verbs = {
        "mexist": lambda: storage.batch_contains(keys),
        "mget": lambda: storage.batch_get(keys, arena.pages([0, 1])),
        "mset": lambda: storage.batch_set(keys, arena.pages([0, 1])),
        "mdel": lambda: storage.batch_remove(keys),
    }
    for verb, work in verbs.items():
        with monkeypatch.context() as patched:
            patched.setattr(eic.Client, verb, lambda self, names, *_: answer(len(names.items)))
            assert work() == [Status.UNAVAILABLE] * 2, verb
            if verb == "mexist":
                with pytest.raises(BackendUnavailable):
                    storage.usage()
    assert storage.batch_set(keys, arena.pages([0, 1])) == [OK, OK]


def _refuse(*_: object) -> None:
    raise RuntimeError("not today")


@pytest.mark.clause("C10")
@pytest.mark.parametrize("verb", ["init", "register_memory"])
@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_c10_a_client_that_raises_at_its_start_is_unavailable(opener: Opener, monkeypatch, verb, error):
    def refuse(*_: object) -> None:
        raise error("not today")

    monkeypatch.setattr(eic.Client, verb, refuse)
    with pytest.raises(BackendUnavailable, match="not today"):
        opener()


@pytest.mark.clause("C10")
@pytest.mark.parametrize("code", [None, False, "0"])
def test_c10_an_init_that_answers_strangely_has_not_connected(opener: Opener, monkeypatch, code):
    init = eic.Client.init
    monkeypatch.setattr(eic.Client, "init", lambda self, *about: [init(self, *about), code][1])
    with pytest.raises(BackendUnavailable, match=f"init gave {code}"):
        opener()


@pytest.mark.clause("C10")
def test_c10_without_threads_to_be_had_there_is_no_answer(opener: Opener, monkeypatch):
    storage = opener(workers=2)
    workers = storage._workers
    with workers.lent(soon()), monkeypatch.context() as patched:
        patched.setattr("hicache_eic.workers.threading.Thread.start", _refuse)
        assert storage.batch_contains(keys_of(1)) == [Status.UNAVAILABLE]
    with workers.lent(soon()):
        assert storage.batch_contains(keys_of(1)) == [MISS]


@pytest.mark.clause("C11")
def test_c11_an_interrupted_wait_costs_no_worker(opener: Opener, monkeypatch):
    arena = an_arena(2)
    storage = opener(arena, workers=1)
    storage.batch_set(keys_of(1), arena.pages([0]))
    mget, go_on = eic.Client.mget, threading.Event()

    def interrupted(self, *arguments):
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait(5.0)
        return mget(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(eic.Client, "mget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            storage.batch_get(keys_of(1), arena.pages([1]))
        assert (storage._workers._abandoned, storage._workers._idle) == (1, []), "its memory is in use"
        go_on.set()
        assert until(lambda: storage._workers._abandoned == 0)
    assert storage.batch_get(keys_of(1), arena.pages([1])) == [OK]


@pytest.mark.clause("C11")
def test_c11_an_interrupted_copy_costs_no_worker(opener: Opener, monkeypatch):
    arena = an_arena(2)
    storage = opener(arena, workers=1, timeout_s=1.0)
    storage.batch_set(keys_of(1), arena.pages([0]))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("hicache_eic.storage.blank_head", interrupted)
        patched.setattr("hicache_eic.storage.copy_in", interrupted)
        with pytest.raises(KeyboardInterrupt):
            storage.batch_get(keys_of(1), arena.pages([1]))
        with pytest.raises(KeyboardInterrupt):
            storage.batch_set(keys_of(1), arena.pages([1]))
    assert storage.batch_get(keys_of(1), arena.pages([1])) == [OK]


@pytest.mark.clause("C11")
def test_c11_registering_that_hangs_is_left_behind(opener: Opener, monkeypatch):
    storage, register, go_on = opener(workers=2, timeout_s=0.3), eic.Client.register_memory, threading.Event()

    def hanging(self, *arguments):
        go_on.wait(5.0)
        return register(self, *arguments)

    monkeypatch.setattr(eic.Client, "register_memory", hanging)
    try:
        with storage._workers.lent(soon()):
            assert Call(lambda: storage.batch_contains(keys_of(1))).result(2.0) == [Status.TIMEOUT]
        with pytest.raises(BackendTimeout):
            opener(timeout_s=0.3)
    finally:
        go_on.set()
    assert until(lambda: storage._workers._abandoned == 0)
    with storage._workers.lent(soon()):
        assert storage.batch_contains(keys_of(1)) == [MISS]


@pytest.mark.clause("C11")
@pytest.mark.parametrize("verb", ["set", "clear"])
def test_c11_what_is_left_behind_begins_no_further_call(opener: Opener, monkeypatch, verb):
    """Else it stores what others have removed since, or removes what others have stored."""
    arena, begun, go_on = an_arena(2), [], threading.Event()
    storage = opener(arena, workers=1, timeout_s=0.3)
    storage.batch_set(keys_of(1), arena.pages([0]))
    originals = {name: getattr(eic.Client, name) for name in ("mexist", "mget", "mset", "mdel")}
    with monkeypatch.context() as patched:
        for name, original in originals.items():

            def recorded(self, *arguments, name=name, original=original):
                begun.append(name)
                go_on.wait(5.0)
                return original(self, *arguments)

            patched.setattr(eic.Client, name, recorded)
        if verb == "set":
            assert storage.batch_set(keys_of(1, "late"), arena.pages([1])) == [Status.TIMEOUT]
        else:
            with pytest.raises(BackendTimeout):
                storage.clear()
        go_on.set()
        assert until(lambda: storage._workers._abandoned == 0)
    assert begun == ["mexist"]
    assert storage.batch_contains([*keys_of(1), *keys_of(1, "late")]) == [OK, MISS]


@pytest.mark.clause("C4")
def test_c4_a_set_that_failed_removes_nobody_elses_page(opener: Opener, monkeypatch):
    arena, keys = an_arena(4), keys_of(2)
    storage, other = opener(arena, workers=1, retries=0), opener(arena, workers=1)
    mset, overtaking = eic.Client.mset, []

    def overtaken(self, names, values, option):
        if overtaking:
            return mset(self, names, values, option)
        overtaking.append("now")
        overtaking.append(other.batch_set(keys[:1], arena.pages([0])))
        opener.simulator.quirks(fail_keys={"mset": {"/0": 3, keys[0]: 3}})
        return mset(self, names, values, option)

    with monkeypatch.context() as patched:
        patched.setattr(eic.Client, "mset", overtaken)
        assert storage.batch_set(keys, arena.pages([1, 2])) == [ERROR, ERROR]
    opener.simulator.quirks()
    assert overtaking == ["now", [OK]]
    assert storage.batch_contains(keys) == [OK, MISS], "the second was stored by this set, and not listed"


def test_who_waits_longest_for_a_worker_is_served_first(opener: Opener):
    storage, served = opener(workers=1), []
    workers = storage._workers

    def work(name: str) -> None:
        with workers.lent(soon()):
            served.append(name)

    with workers.lent(soon()):
        calls = []
        for count, name in enumerate(["first", "second", "third"], 1):
            calls.append(Call(lambda name=name: work(name)))
            assert until(lambda count=count: len(workers._waiting) == count)
    work("late")  # by a thread that runs while the others must wake up
    for call in calls:
        call.result(5.0)
    assert served == ["first", "second", "third", "late"]


@pytest.mark.clause("C9")
def test_c9_with_a_ttl_the_slot_is_stored_with_every_set(opener: Opener, monkeypatch):
    """A slot that expires before the pages of later sets hides them from clear."""
    arena, stored, mset = an_arena(2), [], eic.Client.mset

    def recorded(self, names, values, option):
        stored.append({name.rpartition("/")[0].rpartition("/")[2] for name in names.items})
        return mset(self, names, values, option)

    monkeypatch.setattr(eic.Client, "mset", recorded)
    for options in ({"ttl_s": 60}, {}):
        storage = opener(arena, workers=1, **options)
        storage.clear()
        stored.clear()
        for key in keys_of(2):
            assert storage.batch_set([key], arena.pages([0])) == [OK]
        assert ["~w" in names for names in stored] == [True, "ttl_s" in options]


@pytest.mark.clause("C11")
def test_c11_opens_that_hang_are_bounded(opener: Opener, monkeypatch):
    go_on = threading.Event()

    def hanging(*_: object) -> int:
        go_on.wait(5.0)
        return 1

    def left_behind() -> int:
        return sum(thread.name == "hicache-apart" for thread in threading.enumerate())

    before = left_behind()
    monkeypatch.setattr(eic.Client, "init", hanging)
    try:
        for _ in range(4):
            with pytest.raises(BackendTimeout):
                opener(timeout_s=0.05)
        with pytest.raises(BackendUnavailable, match="earlier attempts"):
            opener(timeout_s=0.05)
        assert left_behind() == before + 4
    finally:
        go_on.set()
    assert until(lambda: left_behind() == before)
