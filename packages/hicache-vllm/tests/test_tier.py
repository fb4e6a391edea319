"""The tier over a toy store and a fake vLLM: bytes, misses, hangs, the end."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import vllm_fake
import vllm_toy
from vllm_fake import Job, LookupResult, OldJob

from hicache_core.errors import InvalidOptions

ROWS, NBYTES = 8, 4096
TOY = {"backend_name": "toy", "module_path": "vllm_toy", "class_name": "ToyStore"}
REQUEST = SimpleNamespace(req_id="r1")


def key(name: int, group: int = 0) -> bytes:
    return bytes([name]) * 32 + group.to_bytes(4, "big")


@pytest.fixture(autouse=True)
def empty_store():
    vllm_toy.STORE.clear()
    vllm_toy.BEFORE.clear()
    vllm_toy.CALLS.clear()
    yield
    vllm_toy.BEFORE.clear()


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return str(tmp_path)


class Bench:
    """A tier over rows that hold their own number in each byte, and vLLM's part in using it."""

    def __init__(self, install, model, *, old=False, entry=None, view=None, spec=None, **changes):
        self.modules = install(old=old)
        self.memory = bytearray(b"".join(bytes([row]) * NBYTES for row in range(ROWS)))
        self.view = view or memoryview(self.memory).cast("b", (ROWS, NBYTES))
        self.config = vllm_fake.vllm_config(model, **changes)
        from hicache_vllm import plugin
        from hicache_vllm.tier import HiCacheTier

        plugin.register()
        factory = self.modules["vllm.distributed.kv_transfer.kv_connector.factory"].KVConnectorFactory
        factory.create_connector(config=self.config, role="scheduler", kv_cache_config=None)
        given = {"backend": "dynamic", "options": TOY, "timeout_s": 2.0} | (entry or {})
        self.tier = HiCacheTier(
            offloading_spec=spec or vllm_fake.spec(self.config, old=old),
            primary_kv_view=self.view,
            tier_type="hicache",
            **given,
        )
        self._job = OldJob if old else Job
        self._next = 0

    def submit(self, *, loads, keys, rows):
        self._next += 1
        submit = self.tier.submit_load if loads else self.tier.submit_store
        submit(self._job(self._next, keys, rows, loads, REQUEST))
        return self._next

    def transfer(self, *, loads, keys, rows):
        self.submit(loads=loads, keys=keys, rows=rows)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        return result

    def look(self, *keys):
        """Look keys up twice, a step apart, and give both answers."""
        first = [self.tier.lookup(each, REQUEST) for each in keys]
        self.tier.on_schedule_end(None)
        return first, [self.tier.lookup(each, REQUEST) for each in keys]

    def rows(self):
        return [bytes(self.memory[row * NBYTES : (row + 1) * NBYTES]) for row in range(ROWS)]


@pytest.fixture
def bench(fake, model):
    made = []

    def make(**more):
        made.append(Bench(fake, model, **more))
        return made[-1]

    yield make
    vllm_toy.BEFORE.clear()
    for each in made:
        each.tier.shutdown()


HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY


def test_what_is_stored_is_found_and_loaded_into_its_rows_and_no_other(bench):
    one = bench()
    stored = one.transfer(loads=False, keys=[key(1), key(2)], rows=[1, 2])
    assert (stored.success, stored.transfer_bytes, stored.successful_keys) == (True, 2 * NBYTES, None)
    assert one.look(key(1), key(2), key(3)) == ([RETRY] * 3, [HIT, HIT, MISS])
    before = one.rows()
    loaded = one.transfer(loads=True, keys=[key(2), key(1)], rows=[5, 7])
    assert loaded.success
    assert one.rows() == [*before[:5], before[2], before[6], before[1]]


def test_a_step_makes_way_for_what_a_request_waits_for_and_only_then(bench, monkeypatch):
    pauses = []
    one = bench()
    monkeypatch.setattr("hicache_vllm.tier.time", SimpleNamespace(sleep=pauses.append))
    one.transfer(loads=False, keys=[key(1)], rows=[1])
    one.tier.on_schedule_end(None)
    assert pauses == []
    one.tier.lookup(key(1), REQUEST)
    one.tier.on_schedule_end(None)
    assert len(pauses) == 1
    one.tier.lookup(key(1), REQUEST)
    one.tier.on_schedule_end(None)
    assert len(pauses) == 1, "answered"
    gate = threading.Event()
    vllm_toy.BEFORE["get"] = gate.wait
    one.submit(loads=True, keys=[key(1)], rows=[2])
    one.tier.on_schedule_end(None)
    one.tier.on_schedule_end(None)
    assert len(pauses) == 3, "a load runs"
    gate.set()
    one.tier.drain_jobs()
    one.tier.on_schedule_end(None)
    assert len(pauses) == 3
    assert max(pauses) <= 100e-6


def test_one_call_a_batch_reaches_the_store(bench):
    one = bench()
    keys = [key(n) for n in range(6)]
    one.transfer(loads=False, keys=keys, rows=list(range(6)))
    one.look(*keys)
    one.transfer(loads=True, keys=keys, rows=list(range(6)))
    assert vllm_toy.CALLS == [("set", 6), ("contains", 6), ("get", 6)]


@pytest.mark.parametrize("old", [False, True], ids=["0.31", "0.24"])
def test_pages_that_cannot_be_loaded_are_named_and_are_misses_from_then_on(bench, old):
    one = bench(old=old)
    one.transfer(loads=False, keys=[key(1), key(2)], rows=[1, 2])
    hit, miss, retry = (True, False, None) if old else (HIT, MISS, RETRY)
    assert one.look(key(1), key(2)) == ([retry] * 2, [hit] * 2)
    damaged = next(name for name in vllm_toy.STORE if key(2)[:-4].hex() in name)
    vllm_toy.STORE[damaged] = b""
    result = one.transfer(loads=True, keys=[key(1), key(2)], rows=[5, 6])
    assert not result.success
    if not old:
        assert (result.successful_keys, result.transfer_bytes) == ((key(1),), NBYTES)
    assert [one.tier.lookup(each, REQUEST) for each in (key(1), key(2))] == [hit, miss]


@pytest.mark.parametrize("loads", [True, False], ids=["load", "store"])
def test_a_backend_that_raises_fails_the_job_and_the_next_one_works(bench, loads):
    one = bench()
    one.transfer(loads=False, keys=[key(1)], rows=[1])

    def fail():
        vllm_toy.BEFORE.clear()
        raise OSError("gone")

    vllm_toy.BEFORE["get" if loads else "set"] = fail
    assert [one.transfer(loads=loads, keys=[key(1)], rows=[3]).success for _ in range(2)] == [False, True]


def test_a_load_that_hangs_ends_at_the_deadline_with_bounce_and_its_rows_are_never_written(bench):
    one = bench(entry={"bounce": True, "timeout_s": 0.3})
    one.transfer(loads=False, keys=[key(1)], rows=[1])
    hung = threading.Event()
    vllm_toy.BEFORE["get"] = vllm_toy.hang(hung)
    before, started = one.rows(), time.monotonic()
    result = one.transfer(loads=True, keys=[key(1)], rows=[5])
    assert (result.success, result.successful_keys) == (False, None)
    assert time.monotonic() - started < 5
    hung.set()
    assert one.rows() == before


def test_a_load_that_is_late_without_bounce_keeps_its_rows_until_it_ends_with_its_bytes(bench):
    one = bench(entry={"timeout_s": 0.2})
    one.transfer(loads=False, keys=[key(1)], rows=[1])
    hung = threading.Event()
    vllm_toy.BEFORE["get"] = vllm_toy.hang(hung)
    one.submit(loads=True, keys=[key(1)], rows=[5])
    assert (list(one.tier.get_finished_jobs()), one.tier.has_pending_work()) == ([], True)
    assert one.tier._jobs.drain(0.5) is False
    hung.set()
    one.tier.drain_jobs()
    (result,) = one.tier.get_finished_jobs()
    assert (result.success, one.rows()[5]) == (True, one.rows()[1])
    assert not one.tier.has_pending_work()


def test_a_load_that_hangs_without_bounce_holds_no_other_request(bench):
    one = bench(entry={"timeout_s": 0.1, "load_threads": 1})
    one.transfer(loads=False, keys=[key(1), key(2)], rows=[1, 2])
    assert one.look(key(1), key(2))[1] == [HIT, HIT]
    hung = threading.Event()
    vllm_toy.BEFORE["get"] = vllm_toy.hang(hung)
    held = one.submit(loads=True, keys=[key(1)], rows=[5])
    behind = one.submit(loads=True, keys=[key(2)], rows=[6])
    results = []
    deadline = time.monotonic() + 10
    while not results and time.monotonic() < deadline:
        threading.Event().wait(0.01)
        results = list(one.tier.get_finished_jobs())
    assert [(result.job_id, result.success) for result in results] == [(behind, False)]
    assert [one.tier.lookup(each, REQUEST) for each in (key(1), key(2))] == [MISS, MISS]
    hung.set()
    one.tier.drain_jobs()
    assert [(r.job_id, r.success) for r in one.tier.get_finished_jobs()] == [(held, True)]
    assert one.tier.lookup(key(1), REQUEST) is HIT


def test_a_store_that_hangs_keeps_no_load_waiting(bench):
    one = bench(entry={"store_threads": 1})
    one.transfer(loads=False, keys=[key(1)], rows=[1])
    hung = threading.Event()
    vllm_toy.BEFORE["set"] = vllm_toy.hang(hung)
    store = one.submit(loads=False, keys=[key(2)], rows=[2])
    load = one.submit(loads=True, keys=[key(1)], rows=[5])
    results = []
    deadline = time.monotonic() + 5
    while not results and time.monotonic() < deadline:
        results = list(one.tier.get_finished_jobs())
    assert [(result.job_id, result.success) for result in results] == [(load, True)]
    hung.set()
    one.tier.drain_jobs()
    assert [(r.job_id, r.success) for r in one.tier.get_finished_jobs()] == [(store, True)]


def test_groups_with_equal_hashes_are_apart(bench, fake, model):
    config = vllm_fake.vllm_config(model)
    one = bench(spec=vllm_fake.spec(config, groups=2))
    one.transfer(loads=False, keys=[key(1, 0), key(1, 1)], rows=[1, 2])
    one.transfer(loads=True, keys=[key(1, 1), key(1, 0)], rows=[5, 6])
    assert one.rows()[5:7] == [one.rows()[2], one.rows()[1]]
    assert [component for component in one.tier._pools] == [0, 1]


@pytest.mark.parametrize("what", ["update_weights", "reload_weights", lambda worker: None])
def test_after_weights_may_have_been_replaced_pages_are_neither_given_nor_taken(bench, what):
    one = bench()
    one.transfer(loads=False, keys=[key(1)], rows=[1])
    engine = one.modules["vllm.v1.engine.core"].EngineCore()
    engine.collective_rpc("get_model")
    assert one.look(key(1))[1] == [HIT]
    assert engine.collective_rpc(what) == ["done"]
    assert one.look(key(1)) == ([MISS], [MISS])
    assert not one.transfer(loads=False, keys=[key(2)], rows=[2]).success
    assert not one.transfer(loads=True, keys=[key(1)], rows=[5]).success
    assert len(vllm_toy.STORE) == 1


def test_shutdown_lets_vllm_release_its_view_and_answers_misses(bench):
    one = bench()
    one.transfer(loads=False, keys=[key(1)], rows=[1])
    one.tier.shutdown()
    one.tier.shutdown()
    one.view.release()
    assert one.tier.lookup(key(1), REQUEST) is MISS


def test_shutdown_waits_for_stores_that_were_submitted(bench):
    one = bench()
    gate = threading.Event()
    vllm_toy.BEFORE["set"] = vllm_toy.hang(gate)
    for name in range(4):
        one.submit(loads=False, keys=[key(name)], rows=[name])
    threading.Timer(0.2, gate.set).start()
    one.tier.shutdown()
    assert len(vllm_toy.STORE) == 4


def test_shutdown_over_a_transfer_that_hangs_says_so_in_time(bench):
    one = bench(entry={"timeout_s": 0.2})
    hung = threading.Event()
    vllm_toy.BEFORE["set"] = vllm_toy.hang(hung)
    one.submit(loads=False, keys=[key(1)], rows=[1])
    started = time.monotonic()
    with pytest.raises(RuntimeError, match='set "bounce": true'):
        one.tier.shutdown()
    assert time.monotonic() - started < 8
    hung.set()


def test_a_new_request_asks_anew_after_the_last_one_that_asked_has_finished(bench):
    one = bench()
    assert one.look(key(1))[1] == [MISS]
    one.tier.on_request_finished(REQUEST)
    one.transfer(loads=False, keys=[key(1)], rows=[1])
    assert one.look(key(1))[1] == [HIT]


def test_stats_tell_pages_by_verb_and_outcome_once(bench):
    one = bench()
    one.transfer(loads=False, keys=[key(1)], rows=[1])
    one.look(key(1), key(2))
    stats, labels = one.tier.get_stats(), ("hicache", "dynamic")
    pages = "vllm:kv_offload_hicache_pages"
    assert stats.counters == {
        (pages, (*labels, "set", "OK")): 1,
        (pages, (*labels, "contains", "OK")): 1,
        (pages, (*labels, "contains", "MISS")): 1,
    }
    assert stats.gauges == {("vllm:kv_offload_hicache_breaker_open", labels): 0}
    assert one.tier.get_stats() is None
    one.transfer(loads=False, keys=[key(3)], rows=[3])
    assert one.tier.get_stats().counters == {(pages, (*labels, "set", "OK")): 1}
    assert {name for name, _ in stats.counters} <= set(type(one.tier).build_metric_definitions({}))


def test_a_misspelt_key_is_refused_and_what_a_newer_vllm_passes_is_not(bench):
    with pytest.raises(InvalidOptions, match=r"tenannt is unknown \(tenant\?\)"):
        bench(entry={"tenannt": "a"})
    one = bench(entry={"detector_of_tomorrow": object(), "locality": "REMOTE"})
    assert one.tier.locality is vllm_fake.Locality.REMOTE


def test_without_the_plugin_it_is_refused_since_pages_have_no_meaning(bench, model):
    lost = vllm_fake.spec(vllm_fake.vllm_config(model, kv_transfer_config__engine_id="another"))
    with pytest.raises(InvalidOptions, match="VLLM_PLUGINS"):
        bench(spec=lost)


def test_lora_is_refused_where_adapters_cannot_be_told_apart(fake, model):
    def install(*, old):
        modules = fake(old=old)
        del modules["vllm.v1.core.kv_cache_utils"]._gen_lora_extra_hash_keys
        return modules

    with pytest.raises(InvalidOptions, match="serve without LoRA"):
        Bench(install, model, lora_config=object())


def test_a_store_that_cannot_be_reached_costs_hits_and_nothing_else(bench, monkeypatch):
    from hicache_core import BackendUnavailable

    def refuse(self, pools=()):
        raise BackendUnavailable("the toy is away")

    monkeypatch.setattr(vllm_toy.ToyStore, "open", refuse)
    one = bench()
    assert one.look(key(1)) == ([RETRY], [MISS])
    assert not one.transfer(loads=False, keys=[key(1)], rows=[1]).success
