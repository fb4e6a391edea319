"""LMCRadixCache over the real lmcache: loads layer by layer, failures, evictions, and nothing left behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hicache_core.errors import InvalidArgument

from .machines import LAYERS, clean, references, serve, torch

from hicache_engine import RadixCache, Request  # isort: skip
from hicache_lmcache.engines import chunk_hash  # isort: skip


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize(("page", "chunk"), [(1, 16), (1, 256), (16, 16), (16, 64), (64, 64), (64, 128)])
def test_a_prefix_of_one_instance_is_loaded_by_another_byte_for_byte(
    machine: Any, name: str, kind: str, page: int, chunk: int
) -> None:
    total = 4 * chunk + page
    one, first = machine(name, kind, page, chunk, pages=2 * total // page)
    two, second = machine(name, kind, page, chunk, pages=2 * total // page)
    tokens = list(range(total))
    _, stored = serve(first, tokens)
    assert first.settle(10.0)
    others = [layer.clone() for layer in two.layers]
    match = second.match_prefix(tokens)
    assert match.load is not None
    assert len(match.pages) == total // chunk * chunk // page
    for layer in range(LAYERS):
        assert match.load.wait_until(layer)
        for half in [layer] if kind == "mla" else [layer, LAYERS + layer]:
            slots = [p * page + at for p in match.pages for at in range(page)]
            source = [p * page + at for p in stored[: len(match.pages)] for at in range(page)]
            assert torch.equal(two.layers[half][slots], one.layers[half][source]), f"layer {layer}"
    untouched = [s for p in range(two.pages) if p not in match.pages for s in range(p * page, (p + 1) * page)]
    assert all(torch.equal(a[untouched], b[untouched]) for a, b in zip(two.layers, others, strict=True))
    second.drop_load(match)
    assert (clean(first), clean(second), references(second)) == ((0, 0, 0, 0), (0, 0, 0, 0), {(1, False)})


def test_a_match_in_memory_goes_on_in_lmcache(machine: Any, name: str) -> None:
    one, first = machine(name)
    two, second = machine(name)
    tokens = list(range(64))
    serve(first, tokens)
    assert first.settle(10.0)
    _, own = serve(second, tokens[:24])  # 16 of these were loaded, 8 computed
    before = two.bytes_of(own)
    match = second.match_prefix(tokens)
    assert match.load is not None
    assert match.load.wait_until(LAYERS - 1)
    assert (match.pages[:6], len(match.pages)) == (own, 16)
    assert all(torch.equal(a, b) for a, b in zip(before, two.bytes_of(own), strict=True))
    theirs = first._match(tokens, None).pages[6:]
    assert all(
        torch.equal(a, b) for a, b in zip(two.bytes_of(match.pages[6:]), one.bytes_of(theirs), strict=True)
    )
    second.drop_load(match)


def test_a_hole_yields_the_leading_part(machine: Any, name: str) -> None:
    _, first = machine(name)
    _, second = machine(name)
    tokens = list(range(64))
    serve(first, tokens)
    assert first.settle(10.0)
    engine = first._store._shared.engine
    gone = [key for _, _, key in engine.token_database.process_tokens(tokens=torch.tensor(tokens))][2]
    for key in gone.split_layers(LAYERS):
        engine.storage_manager.remove(key)
    match = second.match_prefix(tokens)
    assert len(match.pages) == 8
    second.drop_load(match)
    assert clean(second) == (0, 0, 0, 0)


def test_extra_keys_never_meet(machine: Any, name: str) -> None:
    _, first = machine(name)
    _, second = machine(name)
    tokens = list(range(32))
    serve(first, tokens, "adapter@one%")
    assert first.settle(10.0)
    assert [len(second.match_prefix(tokens, key).pages) for key in (None, "adapter two")] == [0, 0]


@pytest.mark.parametrize("keys", [["adapter@one%"], ["adapter@one%", None], [None, "adapter@one%"]], ids=str)
def test_a_prefix_under_an_extra_key_is_loaded_as_it_was(
    machine: Any, name: str, keys: list[str | None]
) -> None:
    """LMCache has to be told the key at each step: without it a load brings nothing, and ends well."""
    tokens, stored = list(range(32)), {}
    for key in keys:
        stored[key] = machine(name)
        serve(stored[key][1], tokens, key)
        assert stored[key][1].settle(10.0)
    two, second = machine(name)
    for key, (one, first) in stored.items():
        match = second.match_prefix(tokens, key)
        assert match.load is not None
        assert [match.load.wait_until(layer) for layer in range(LAYERS)] == [True] * LAYERS
        wanted = one.bytes_of(first._match(tokens, key).pages)
        assert all(torch.equal(a, b) for a, b in zip(two.bytes_of(match.pages), wanted, strict=True))
        second.drop_load(match)
    assert (clean(second), references(second)) == ((0, 0, 0, 0), {(1, False)})


def test_another_identity_never_hits(machine: Any, name: str) -> None:
    _, first = machine(name)
    _, second = machine(f"{name}-another")
    serve(first, list(range(32)))
    assert first.settle(10.0)
    assert second.match_prefix(list(range(32))).pages == []


def test_chunks_are_known_by_128_bits_of_sha256(machine: Any, name: str) -> None:
    """LMCache's own hash is Python's, 64 bits that whoever chooses the tokens can make collide."""
    _, cache = machine(name)
    assert cache._store._shared.engine.token_database.hash_func is chunk_hash
    links = [(0, (1, 2), ()), (1, (1, 2), ()), (0, (2, 1), ()), (0, (1, 2, 0), ())]
    assert len({chunk_hash(link) for link in links}) == 4
    assert all(0 <= chunk_hash(link) < 1 << 128 for link in links)


def test_eviction_during_a_load_frees_nothing_that_is_being_loaded(machine: Any, name: str) -> None:
    one, first = machine(name)
    two, second = machine(name, pages=20)
    tokens = list(range(64))
    _, stored = serve(first, tokens)
    assert first.settle(10.0)
    serve(second, [900 + i for i in range(16)])
    assert second.settle(10.0)
    match = second.match_prefix(tokens)
    assert match.load is not None
    assert second.evict(20) == 4
    assert second.allocator.available == 20 - len(match.pages)
    assert match.load.wait_until(LAYERS - 1)
    assert all(
        torch.equal(a, b) for a, b in zip(two.bytes_of(match.pages), one.bytes_of(stored), strict=True)
    )
    second.drop_load(match)
    assert clean(second) == (0, 0, 0, 0)


def test_eviction_waits_for_a_store_in_flight(
    machine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cache = machine(name)
    go, real = threading.Event(), cache._store.store

    def slow(*arguments: Any) -> Any:
        assert go.wait(10)
        return real(*arguments)

    monkeypatch.setattr(cache._store, "store", slow)
    serve(cache, list(range(64)))
    assert (cache.locked_pages, cache.evictable_pages) == (16, 0)
    threading.Timer(0.2, go.set).start()
    assert cache.evict(16) == 16
    assert go.is_set()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_an_error_at_any_layer_falls_back_to_computing(
    machine: Any, name: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = machine(name)
    _, second = machine(name)
    tokens = list(range(64))
    serve(first, tokens)
    assert first.settle(10.0)
    match = second.match_prefix(tokens[:0])
    consumer = second._store._tables.batched_to_gpu

    def failing(*arguments: Any, **named: Any) -> Iterator[Any]:
        inner = consumer(*arguments, **named)
        sent = yield next(inner)
        for number in range(LAYERS):
            if number == layer:
                raise RuntimeError("a copy failed")
            sent = yield inner.send(sent)

    monkeypatch.setattr(second._store._tables, "batched_to_gpu", failing)
    found, pages = serve(second, tokens)
    assert (match.load, found, len(pages)) == (None, 0, 16)
    assert second.counters.failed_loads == 1
    assert (clean(second), references(second)) == ((0, 0, 0, 0), {(1, False)})


def test_a_lookup_that_raises_falls_back_to_computing(
    machine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cache = machine(name)

    def broken(*_: Any, **__: Any) -> int:
        raise RuntimeError("no lookup today")

    monkeypatch.setattr(cache._store._shared.engine, "lookup", broken)
    found, pages = serve(cache, list(range(64)))
    assert (found, len(pages), clean(cache)) == (0, 16, (0, 0, 0, 0))


def test_a_load_that_hangs_costs_the_timeout_and_keeps_its_pages_until_it_ends(
    machine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What LMCache may still write is given to nobody, and freed once it has let go (C11)."""
    _, first = machine(name)
    _, second = machine(name, timeout_s=0.3)
    tokens = list(range(64))
    serve(first, tokens)
    assert first.settle(10.0)
    match = second.match_prefix(tokens)
    load = match.load
    assert load is not None
    assert load.wait_until(0)
    go = threading.Event()
    load._stream.submit(lambda: go.wait(10))
    assert not load.wait_until(2)
    assert second.drop_load(match).pages == []
    assert second.allocator.available == 64 - len(match.pages)
    go.set()
    assert (clean(second), references(second)) == ((0, 0, 0, 0), {(1, False)})
    assert second.allocator.available == 64


def test_a_lookup_that_hangs_costs_the_timeout_and_keeps_its_pages_until_it_ends(
    machine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache may begin to write when nobody waits any more: until it has ended, nobody has the pages."""
    _, first = machine(name)
    _, cache = machine(name, timeout_s=0.2)
    tokens = list(range(64))
    serve(first, tokens)
    assert first.settle(10.0)
    go, real = threading.Event(), cache._store._shared.engine.lookup

    def hanging(*arguments: Any, **named: Any) -> int:
        assert go.wait(10)
        return int(real(*arguments, **named))

    monkeypatch.setattr(cache._store._shared.engine, "lookup", hanging)
    match = cache.match_prefix(tokens)
    assert (match.pages, match.load, cache.pending, cache.allocator.available) == ([], None, 1, 48)
    go.set()
    assert (clean(cache), references(cache)) == ((0, 0, 0, 0), {(1, False)})
    assert (cache.allocator.available, cache.counters.failed_loads) == (64, 1)
    monkeypatch.undo()
    assert serve(cache, tokens)[0] == 16


def test_a_store_that_hangs_keeps_its_pages_and_costs_an_eviction_the_timeout(
    machine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cache = machine(name, timeout_s=0.2)
    go, real = threading.Event(), cache._store.store

    def hanging(*arguments: Any) -> Any:
        assert go.wait(10)
        return real(*arguments)

    monkeypatch.setattr(cache._store, "store", hanging)
    serve(cache, list(range(64)))
    assert (cache.evict(16), cache.locked_pages, cache.pending) == (0, 16, 1)
    go.set()
    assert (clean(cache), references(cache)) == ((0, 0, 0, 0), {(1, False)})
    assert cache.evict(16) == 16


def test_a_store_that_fails_is_counted_and_unlocks(
    machine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's connector logs such an error and says nothing (lmcache#2400)."""
    _, cache = machine(name)

    def broken(*_: Any, **__: Any) -> Iterator[None]:
        raise RuntimeError("no store today")
        yield

    monkeypatch.setattr(cache._store._shared.engine, "store_layer", broken)
    serve(cache, list(range(64)))
    assert clean(cache) == (0, 0, 0, 0)
    assert (cache.counters.failed_stores, cache.counters.stored_tokens) == (1, 0)


def test_ranks_load_what_all_of_them_hold(machine: Any, name: str) -> None:
    _, first = machine(name)
    asked: list[int] = []

    def lowest(tokens: int) -> int:
        asked.append(tokens)
        return min(tokens, 40)

    _, second = machine(name, lowest_common=lowest)
    serve(first, list(range(64)))
    assert first.settle(10.0)
    match = second.match_prefix(list(range(64)))
    assert (asked, len(match.pages)) == ([64], 8)  # 40 tokens are two chunks and a half
    second.drop_load(match)


def test_a_request_whose_load_was_not_waited_for_is_refused(machine: Any, name: str) -> None:
    _, first = machine(name)
    _, second = machine(name)
    serve(first, list(range(32)))
    assert first.settle(10.0)
    match = second.match_prefix(list(range(32)))
    second.lock(match.node)
    with pytest.raises(InvalidArgument):
        second.cache_finished_req(Request(list(range(32)), None, match.pages, match.node))
    second.unlock(match.node)
    second.drop_load(match)
    assert clean(second) == (0, 0, 0, 0)


def test_a_chunk_is_a_whole_number_of_pages(machine: Any, name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        machine(name, page=16, chunk=24)
    assert refused.value.remedy == "Choose a multiple of 16."


def test_a_thousand_requests_leave_no_lock_slot_or_thread(machine: Any, name: str) -> None:
    before = {thread.name for thread in threading.enumerate()}
    _, cache = machine(name, pages=48)
    running = threading.active_count()
    draw = random.Random(7)
    served = 0
    for _ in range(1000):
        tokens = [draw.randrange(3)] * 16 + [draw.randrange(3)] * 16 + list(range(draw.randrange(0, 24)))
        match_only = draw.random() < 0.1
        if match_only:
            cache.drop_load(cache.match_prefix(tokens))
        else:
            serve(cache, tokens)
        served += 1
        if served % 10 == 0:
            cache.evict(draw.randrange(48))
    assert (served, clean(cache), references(cache)) == (1000, (0, 0, 0, 0), {(1, False)})
    assert threading.active_count() <= running
    assert cache.counters.failed_loads == cache.counters.failed_stores == 0
    assert cache.counters.loaded_tokens > 0
    cache.reset()
    assert cache.allocator.available == 48
    assert cache.close(10.0)
    left = {thread.name for thread in threading.enumerate()} - before
    assert not [thread for thread in left if thread.startswith("hicache")]


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_requests_over_an_lmcache_that_fails_now_and_then_leave_nothing_and_load_nothing_wrong(
    machine: Any, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups, copies of a layer, and stores raise by turns; whatever is said to be loaded is compared."""
    one, first = machine(name, kind)
    two, second = machine(name, kind, pages=32)
    prefixes = [[number * 1000 + i for i in range(64)] for number in range(4)]
    wanted = {}
    for tokens in prefixes:
        _, pages = serve(first, tokens)
        wanted[tokens[0]] = one.bytes_of(pages)
        assert first.settle(10.0)
        first.evict(16)
    draw, broke = random.Random(5), [0]
    engine, tables = second._store._shared.engine, second._store._tables

    def breaking(target: Any, verb: str) -> None:
        real = getattr(target, verb)

        def sometimes(*arguments: Any, **named: Any) -> Any:
            if draw.random() < 0.2:
                broke[0] += 1
                raise RuntimeError(f"no {verb} today")
            return real(*arguments, **named)

        monkeypatch.setattr(target, verb, sometimes)

    for target, verb in ((engine, "lookup"), (tables, "batched_to_gpu"), (engine, "store_layer")):
        breaking(target, verb)
    whole = 0
    for _ in range(120):
        tokens = draw.choice(prefixes)[: draw.choice([16, 32, 48, 64])]
        match = second.match_prefix(tokens)
        if match.load is not None and all(match.load.wait_until(layer) for layer in range(LAYERS)):
            count, whole = len(match.pages) * 4, whole + 1
            for row, theirs in zip(two.bytes_of(match.pages), wanted[tokens[0]], strict=True):
                assert torch.equal(row, theirs[:count])
        second.drop_load(match)
        if draw.random() < 0.3:  # a request of its own, stored or not
            serve(second, [9000 + draw.randrange(50), *range(31)])
        second.evict(draw.randrange(8))
    assert broke[0] > 20
    assert whole > 20
    assert (clean(second), references(second)) == ((0, 0, 0, 0), {(1, False)})
    second.reset()
    assert second.allocator.available == 32


def test_it_is_a_radix_cache(machine: Any, name: str) -> None:
    _, cache = machine(name)
    assert isinstance(cache, RadixCache)
