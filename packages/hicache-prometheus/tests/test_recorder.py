from __future__ import annotations

import gc
import logging
import os

from hicache_core import Identity, Namespace, Status
from hicache_core.observers import OperationEvent
from hicache_prometheus import recorder as module
from hicache_prometheus.cells import ROWS
from hicache_prometheus.recorder import OTHER, Recorder
from hicache_prometheus.snapshot import (
    ABANDONED,
    BOUNDS_S,
    BREAKERS,
    CALLS,
    DEAD_KEYS,
    FIRST_BUCKET,
    LATE,
    NANOSECONDS,
    NBYTES,
    STATUSES,
)


def an_event() -> OperationEvent:
    return OperationEvent(
        backend="b",
        namespace="n",
        verb="get",
        component="kv",
        pages=1,
        nbytes=10,
        statuses={Status.OK: 1},
        seconds=0.5,
    )


def named(**identity):
    return Namespace.of(Identity.for_tests(**identity)).id


def breakers(recorder, **identity):
    cells = recorder.snapshot().caches[("toy", named(**identity))]
    return {state: cells[at] for state, at in BREAKERS.items()}


def test_a_call_is_counted_whole(recorder, open_cache, pool, script):
    script["get"] = lambda keys: [Status.OK, Status.MISS, Status.CORRUPT, Status.OK]
    open_cache().get(["a", "b", "c", "d"], pool.pages([0, 1, 2, 3]))
    cells = recorder.snapshot().verbs[("toy", named(), "kv", "get")]
    assert (cells[CALLS], cells[NBYTES]) == (1, 2 * 4096)
    assert {status: cells[STATUSES + status] for status in Status if cells[STATUSES + status]} == {
        Status.OK: 2,
        Status.MISS: 1,
        Status.CORRUPT: 1,
    }
    buckets = cells[FIRST_BUCKET : FIRST_BUCKET + len(BOUNDS_S) + 1]
    assert sum(buckets) == 1
    bound = (*BOUNDS_S, 60.0)[buckets.index(1)]
    assert 0 < cells[NANOSECONDS] <= bound * 1e9


def test_verbs_and_namespaces_are_apart(recorder, open_cache, pool):
    for tenant in ("a", "b"):
        cache = open_cache(tenant=tenant)
        cache.set(["x"], pool.pages([0]))
        cache.exists(["x", "y"])
    assert {labels[1:]: cells[CALLS] for labels, cells in recorder.snapshot().verbs.items()} == {
        (named(tenant=tenant), "kv", verb): 1 for tenant in ("a", "b") for verb in ("set", "exists")
    }


def test_what_is_no_event_is_seen_at_a_snapshot(recorder, open_cache, pool, script):
    cache = open_cache(model="m", weights=None)
    script["get"] = lambda keys: [Status.CORRUPT]
    cache.get(["a"], pool.pages([0]))
    cells = recorder.snapshot().caches[("toy", named(model="m"))]
    assert (cells[DEAD_KEYS], cells[LATE], cells[ABANDONED]) == (1, 0, 0)
    assert breakers(recorder, model="m") == {"closed": 1, "half-open": 0, "open": 0}
    identity = recorder.snapshot().identities[named(model="m")]
    assert identity == ("test", "m", "", "", "", "bf16", "64", "", "")


def test_an_open_breaker_is_seen(recorder, open_cache, pool, script):
    cache = open_cache()
    script["get"] = lambda keys: [Status.UNAVAILABLE] * len(keys)
    for _ in range(3):
        cache.get(["a"], pool.pages([0]))
    assert breakers(recorder) == {"closed": 0, "half-open": 0, "open": 1}


def test_two_caches_of_one_namespace_add_up_and_an_ended_one_is_no_more(recorder, open_cache):
    first, _ = open_cache(), open_cache()
    assert breakers(recorder)["closed"] == 2
    first.close()
    assert breakers(recorder)["closed"] == 1


def test_a_cache_that_is_dropped_unclosed_is_no_more(recorder, open_cache, pool):
    from hicache_core import HiCache, Placement

    cache = HiCache.open("toy", identity=Identity.for_tests(), placement=Placement(), pools=[pool])
    open_cache(tenant="other")
    assert breakers(recorder)["closed"] == 1
    del cache
    gc.collect()
    assert breakers(recorder) == {"closed": 0, "half-open": 0, "open": 0}


def test_late_calls_are_a_sum_over_caches_that_came_and_went(recorder, open_cache):
    for late in (2, 3):
        cache = open_cache()
        cache._guard.late = late
        cache.close()
    assert recorder.snapshot().caches[("toy", named())][LATE] == 5


def test_a_rebound_cache_is_counted_under_its_new_namespace(recorder, open_cache):
    cache = open_cache(tenant="a")
    cache.rebind(Identity.for_tests(tenant="b"))
    assert breakers(recorder, tenant="a")["closed"] == 0
    assert breakers(recorder, tenant="b")["closed"] == 1


def test_namespaces_that_no_cache_has_give_way_when_the_table_is_full(recorder, open_cache, pool):
    cache = open_cache(tenant="first")
    cache.exists(["x"])
    for number in range(ROWS):
        cache.rebind(Identity.for_tests(tenant=str(number)))
        cache.exists(["x"])
    verbs = recorder.snapshot().verbs
    assert len(recorder._rows) == ROWS - 16
    assert ("toy", named(tenant="first"), "kv", "exists") not in verbs
    assert verbs[("toy", named(tenant=str(ROWS - 1)), "kv", "exists")][CALLS] == 1


def test_a_table_full_of_namespaces_in_use_counts_the_rest_together(recorder, open_cache, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 20)
    caches = [open_cache(tenant=str(number)) for number in range(6)]
    for cache in caches:
        cache.exists(["x"])
    # Four rows beside those for the others: four caches fill them, and their calls find none.
    assert {labels[1:]: cells[CALLS] for labels, cells in recorder.snapshot().verbs.items()} == {
        (OTHER, "kv", "exists"): 6
    }


def test_a_folder_that_cannot_be_used_is_said_once_and_counting_goes_on(tmp_path, caplog):
    fresh = Recorder(tmp_path / "missing")
    with caplog.at_level(logging.WARNING, logger="hicache"):
        for _ in range(3):
            fresh.hicache_operation(an_event())
    assert caplog.text.count("HICACHE_PROMETHEUS_DIR: no file for other processes, counting goes on") == 1
    assert [cells[CALLS] for cells in fresh.snapshot().verbs.values()] == [3]


def test_a_forked_child_counts_in_a_table_of_its_own(tmp_path):
    parent = Recorder(tmp_path)
    parent.hicache_operation(an_event())
    (of_parent,) = tmp_path.iterdir()
    with parent._lock:
        pid = os.fork()
        if not pid:
            try:
                parent.start_afresh_in_child()
                untouched = list(tmp_path.iterdir()) == [of_parent]
                parent.hicache_operation(an_event())
                os._exit(0 if untouched else 2)
            finally:
                os._exit(3)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    (added,) = set(tmp_path.iterdir()) - {of_parent}
    assert added.name.startswith(f"{pid}-")
    assert [cells[CALLS] for cells in parent.snapshot().verbs.values()] == [1]
