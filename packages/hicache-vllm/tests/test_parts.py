"""Settings, jobs, lookups and the watch, each alone."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from hicache_core.errors import InvalidOptions
from hicache_vllm import watch
from hicache_vllm.jobs import Jobs
from hicache_vllm.settings import read_settings


def test_every_bad_key_is_named_at_once():
    with pytest.raises(InvalidOptions) as caught:
        read_settings({"type": "hicache", "option": {}, "timeout_s": -1, "options": [1]})
    text = str(caught.value)
    assert all(part in text for part in ("option is unknown (options?)", "backend", "timeout_s", "a table"))


def test_vllms_keys_and_objects_stand_beside_ours():
    entry = {
        "type": "hicache",
        "module_path": "m",
        "backend": "file",
        "locality": "LOCAL",
        "gadget": object(),
    }
    assert read_settings(entry).backend == "file"


def test_a_variable_sets_what_the_entry_does_not(monkeypatch):
    monkeypatch.setenv("HICACHE_VLLM_TENANT", "a")
    assert read_settings({"backend": "file"}).tenant == "a"
    assert read_settings({"backend": "file", "tenant": "b"}).tenant == "b"


class TestJobs:
    @pytest.fixture
    def errors(self):
        return []

    @pytest.fixture
    def jobs(self, errors):
        made = Jobs(1, 1, errors.append, "test-jobs", stuck_s=0.2)
        yield made
        made.stop(5)
        assert [t for t in threading.enumerate() if t.name.startswith("test-jobs")] == []

    def test_each_job_ends_once_with_one_truth_a_key(self, jobs):
        jobs.submit(1, loads=True, keys=[b"a", b"b"], move=lambda: [True, False])
        jobs.submit(2, loads=False, keys=[b"c"], move=lambda: [True])
        assert jobs.drain(5)
        outcomes = {outcome.job_id: outcome for outcome in jobs.finished()}
        assert (outcomes[1].loads, list(outcomes[1].good)) == (True, [True, False])
        assert (outcomes[2].loads, list(outcomes[2].good)) == (False, [True])
        assert (jobs.finished(), jobs.pending) == ([], False)

    def test_whatever_is_raised_fails_the_job(self, jobs, errors):
        def fail():
            raise SystemExit(3)

        jobs.submit(1, loads=True, keys=[b"a", b"b"], move=fail)
        assert jobs.drain(5)
        (outcome,) = jobs.finished()
        assert outcome.good == [False, False]
        assert [type(error) for error in errors] == [SystemExit]

    def test_draining_waits_for_what_runs_and_what_waits(self, jobs):
        gate = threading.Event()
        for number in range(3):
            jobs.submit(number, loads=True, keys=[b"a"], move=lambda: [gate.wait(10)])
        assert not jobs.drain(0.05)
        assert jobs.pending
        gate.set()
        assert jobs.drain(5)
        assert sorted(outcome.job_id for outcome in jobs.finished()) == [0, 1, 2]

    def test_what_waits_behind_stuck_threads_is_given_up_and_later_jobs_run(self, jobs):
        gate = threading.Event()
        jobs.submit(1, loads=True, keys=[b"a"], move=lambda: [gate.wait(10)])
        jobs.submit(2, loads=True, keys=[b"b", b"c"], move=lambda: [True, True])
        jobs.submit(3, loads=False, keys=[b"d"], move=lambda: [True])
        assert not jobs.drain(0.5)
        outcomes = {outcome.job_id: outcome.good for outcome in jobs.finished()}
        assert (outcomes, jobs.loads_stuck) == ({2: [False, False], 3: [True]}, True)
        gate.set()
        assert jobs.drain(5)
        jobs.submit(4, loads=True, keys=[b"e"], move=lambda: [True])
        assert jobs.drain(5)
        assert {outcome.job_id: outcome.good for outcome in jobs.finished()} == {1: [True], 4: [True]}
        assert not jobs.loads_stuck


@pytest.fixture
def lookups(fake):
    def make(contains, *, old=False, patience_s=2.0):
        fake(old=old)
        from hicache_vllm.lookups import Lookups

        now, late = SimpleNamespace(s=0.0), []
        made = Lookups(
            "t", contains, patience_s=patience_s, on_late=lambda: late.append(now.s), clock=lambda: now.s
        )
        return made, now, late

    return make


REQUEST = SimpleNamespace(req_id="r")


def test_a_lookup_that_hangs_is_a_miss_in_time_and_others_at_once_until_it_comes_back(lookups):
    made, now, late = lookups(lambda keys: [True] * len(keys))
    made.hangs = True
    answers = []
    for now.s in (0.0, 1.9, 2.0, 2.5):
        answers.append(made.verdict(b"a", REQUEST))
    assert answers == [None, None, False, False]
    assert made.verdict(b"b", SimpleNamespace(req_id="r2")) is False
    assert (late, list(made._lookup_state)) == ([2.0], [b"a"])
    made.hangs = False
    made.flush()
    assert made.verdict(b"a", REQUEST) is True
    assert made.verdict(b"b", REQUEST) is None
    made.forget("r")
    assert made._asked == {}


@pytest.mark.parametrize("old", [True, False], ids=["0.24", "0.28"])
def test_a_marked_page_is_a_miss_until_its_requests_have_gone(lookups, old):
    made, _, _ = lookups(lambda keys: [True] * len(keys), old=old)
    made.verdict(b"a", REQUEST)
    made.flush()
    made.mark_miss([b"a", b"never asked for"])
    assert made.verdict(b"a", REQUEST) is False
    made.forget("r")
    made.verdict(b"a", REQUEST)
    made.flush()
    assert made.verdict(b"a", REQUEST) is True


def test_a_lookup_thread_that_hangs_is_left_behind(lookups):
    made, _, _ = lookups(lambda keys: [True])
    hung = threading.Event()
    made.shutdown = lambda: hung.wait(30)
    assert made.stop(0.05) is False
    hung.set()
    made.shutdown = lambda: None
    assert made.stop(5) is True


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("get_model", ""),
        ("wake_up", ""),
        ("is_sleeping", ""),
        ("update_weights", "update_weights"),
        ("apply_model", "apply_model"),
        ("load_from_trainer", "load_from_trainer"),
        (lambda worker: None, "a function (<lambda>)"),
    ],
    ids=str,
)
def test_only_what_is_known_to_leave_weights_alone_passes_unnoticed(method, told):
    assert watch.may_change_weights(method) == told


def test_a_process_without_an_engine_has_nothing_to_hear(fake):
    assert watch.listen(SimpleNamespace()) is False
