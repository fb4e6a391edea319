"""What LMCache's layer-wise engine does that an engine must never feel, each shown on the real library.

Source: lmcache 0.5.6, ``v1/cache_engine.py``, ``v1/memory_management.py``, ``utils.py``; its reports #2400
(stores and loads nothing), #4715 and #4759 (hangs), #1690 (exists, and cannot be loaded).
"""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from hicache_core.errors import BackendIncompatible, BackendUnavailable
from hicache_lmcache import engines, native

from .machines import LAYERS, clean, references, serve, torch

TOKENS = list(range(64))


def stored_by(machine: Any, name: str, **more: Any) -> Any:
    """Give a second cache on what a first one has stored: 4 chunks."""
    _, first = machine(name, **more)
    serve(first, TOKENS)
    assert first.settle(10.0)
    return machine(name, **more)[1]


def engine_of(cache: Any) -> Any:
    return cache._store._shared.engine


def layer_keys(cache: Any, chunk: int) -> list[Any]:
    return list(cache._store._chunks(torch.tensor(TOKENS), {}))[chunk]


def test_the_collector_frees_no_memory_of_lmcache_under_its_locks(machine: Any, name: str) -> None:
    """Its finalizer takes locks that the interrupted code may hold: the thread then waits for itself."""
    _, cache = machine(name)
    engine, utils = engine_of(cache), importlib.import_module("lmcache.utils")
    allocator = engine.storage_manager.allocator_backend.memory_allocator
    before = allocator.pin_allocator.num_active_allocations
    memory = engine.storage_manager.allocate(torch.Size([16, 2, 32]), torch.bfloat16)
    cycle: list[Any] = [memory]
    cycle.append(cycle)

    def collect_under_locks() -> None:
        with utils._shared_observability_lock, allocator.host_mem_lock:
            gc.collect()

    del memory, cycle
    thread = threading.Thread(target=collect_under_locks, daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
    assert engines.free_orphans() >= 1
    assert allocator.pin_allocator.num_active_allocations == before


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("left", [0, 1, 3])
def test_a_store_that_brings_fewer_chunks_of_a_layer_is_no_load(
    machine: Any, name: str, layer: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remote that is late or broken brings an empty list, LMCache copies as many as came and goes on."""
    cache = stored_by(machine, name)
    stores = engine_of(cache).storage_manager
    real = stores.layerwise_batched_get

    def fewer(keys: list[list[Any]], location: str | None = None) -> Iterator[Any]:
        for number, task in enumerate(real(keys, location=location)):
            if number != layer:
                yield task
                continue
            memory, some = task.result(10), Future[Any]()
            for rest in memory[left:]:
                rest.ref_count_down()
            some.set_result(memory[:left])
            yield some

    monkeypatch.setattr(stores, "layerwise_batched_get", fewer)
    found, pages = serve(cache, TOKENS)
    assert (found, len(pages), cache.counters.failed_loads) == (0, 16, 1)
    assert (clean(cache), references(cache)) == ((0, 0, 0, 0), {(1, False)})


def test_chunks_that_go_between_question_and_load_are_no_load(
    machine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = stored_by(machine, name)
    stores = engine_of(cache).storage_manager
    gone = {layer_keys(cache, 2)[0].to_string()}
    real = stores.contains
    monkeypatch.setattr(
        stores, "contains", lambda key, *rest: key.to_string() not in gone and real(key, *rest)
    )
    match = cache.match_prefix(TOKENS)
    assert match.load is not None
    assert not match.load.wait_until(0)
    assert "32 tokens of 64 came" in str(match.load.error)
    assert cache.drop_load(match).pages == []
    assert (clean(cache), references(cache)) == ((0, 0, 0, 0), {(1, False)})


def test_a_chunk_that_lacks_a_layer_is_not_pinned_for_ever_and_stored_again(machine: Any, name: str) -> None:
    cache = stored_by(machine, name)
    engine_of(cache).storage_manager.remove(layer_keys(cache, 2)[1])
    match = cache.match_prefix(TOKENS)
    assert len(match.pages) == 8
    cache.drop_load(match)
    assert (clean(cache), references(cache)) == ((0, 0, 0, 0), {(1, False)})
    serve(cache, TOKENS)  # removes what is left of the chunk
    assert cache.settle(10.0)
    serve(cache, TOKENS)  # stores it
    assert cache.settle(10.0)
    assert cache._store.store(TOKENS, range(64)) == 64


def test_a_dropped_load_keeps_the_pins_of_others(machine: Any, name: str) -> None:
    one = stored_by(machine, name)
    _, two = machine(name)
    kept, dropped = one.match_prefix(TOKENS), two.match_prefix(TOKENS)
    assert (kept.load.wait_until(0), dropped.load.wait_until(0)) == (True, True)
    two.drop_load(dropped)
    assert clean(two)[:2] == (0, 0)
    objects = engine_of(one).storage_manager.storage_backends["LocalCPUBackend"].hot_cache.values()
    assert {memory.meta.pin_count for memory in objects} == {1}
    assert kept.load.wait_until(LAYERS - 1)
    one.drop_load(kept)
    assert (clean(one), references(one)) == ((0, 0, 0, 0), {(1, False)})


def test_what_lmcache_had_no_room_for_is_counted(machine: Any, name: str) -> None:
    """LMCache logs that its memory is under pressure, and stores nothing (lmcache#2400)."""
    _, cache = machine(name, cpu_nbytes=LAYERS * 2 * 4096, pages=128)
    serve(cache, list(range(256)))
    assert clean(cache) == (0, 0, 0, 0)
    counters = cache.counters
    assert counters.stored_tokens + counters.unstored_tokens == 256
    assert (counters.unstored_tokens > 0, counters.failed_stores) == (True, 0)


@pytest.mark.parametrize("break_it", ["loads nothing", "stores nothing", "a call that is gone"])
def test_a_canary_refuses_an_lmcache_whose_calls_mean_something_else(
    machine: Any, name: str, break_it: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = importlib.import_module("lmcache.v1.cache_engine").LMCacheEngine

    def empty(*_: Any, **__: Any) -> Iterator[None]:
        yield from [None] * (LAYERS + 2)

    if break_it == "loads nothing":
        monkeypatch.setattr(kind, "retrieve_layer", empty)
    elif break_it == "stores nothing":
        monkeypatch.setattr(kind, "store_layer", empty)
    else:
        monkeypatch.delattr(kind, "lookup_unpin")
    expected = BackendIncompatible if break_it == "a call that is gone" else BackendUnavailable
    with pytest.raises(expected):
        machine(name)
    assert not [key for key in engines._engines if key.namespace == name]


def test_a_canary_refuses_other_bytes(machine: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connector: Any = importlib.import_module("lmcache.v1.gpu_connector.gpu_connectors")
    kind = connector.SGLangLayerwiseGPUConnector
    real = kind.batched_to_gpu

    def shifted(self: Any, starts: Any, ends: Any, *, slot_mapping: Any, **more: Any) -> Any:
        return real(self, starts, ends, slot_mapping=slot_mapping.flip(0), **more)

    monkeypatch.setattr(kind, "batched_to_gpu", shifted)
    with pytest.raises(BackendIncompatible) as refused:
        machine(name)
    assert "a chunk that was stored did not come back the same" in str(refused.value)
    assert refused.value.remedy == "Run: pip install 'lmcache==0.5.6'"


def test_a_version_that_is_not_known_is_refused(
    machine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "version", lambda _: "0.6.0")
    with pytest.raises(BackendIncompatible) as refused:
        machine(name)
    assert "0.6.0" in str(refused.value)


def test_the_canary_leaves_nothing_behind(machine: Any, name: str) -> None:
    _, cache = machine(name)
    assert references(cache) == set()
    assert cache._store.pinned == 0


def test_telemetry_is_off_and_the_collector_stays_on(machine: Any, name: str) -> None:
    """Usage is sent unless a variable of the environment forbids it (lmcache#2269)."""
    _, cache = machine(name)
    usage = [importlib.import_module(f"lmcache.usage_telemetry.{part}") for part in ("context", "continuous")]
    assert [module.is_usage_tracking_enabled() for module in usage] == [False, False]
    assert gc.isenabled()
    assert (engine_of(cache).config.local_cpu, engine_of(cache).config.use_layerwise) == (True, True)
