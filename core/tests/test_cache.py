"""HiCache over a backend that works: names, checks, splitting, dead keys, anchors, counters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from core_builders import CANARY, a_component, a_pool, noise, page_bytes
from core_builders import fill as fill_page
from core_caches import TIMEOUT_S, a_cache, filled
from core_toys import Script

from hicache_core import session as session_module
from hicache_core.cache import HiCache
from hicache_core.capabilities import Capabilities
from hicache_core.errors import (
    BackendNotFound,
    HiCacheError,
    InvalidArgument,
    InvalidKey,
    InvalidOptions,
    InvalidPages,
    StorageClosed,
    UnsupportedOperation,
)
from hicache_core.identity import Identity, Namespace, Placement, Shard
from hicache_core.memory import HostPool, Pages
from hicache_core.status import Status
from hicache_core.storage import Usage

OK, MISS = Status.OK, Status.MISS


def answers(*statuses: Status) -> Callable[..., list[Status]]:
    return lambda proceed, *_: list(statuses)


# What is set can be got.


def test_what_is_set_comes_back_in_other_slots_and_nothing_else_changes() -> None:
    pool = a_pool(pages=8)
    with a_cache(None, pool) as cache:
        assert cache.set(["a", "b"], filled(pool, 0, 1)) == [OK, OK]
        assert cache.exists(["a", "b", "x"]) == 2
        assert cache.contains(["x", "b", "a"]) == [MISS, OK, OK]
        assert cache.get(["b", "x", "a"], pool.pages([5, 6, 7])) == [OK, MISS, OK]
    untouched = bytes([CANARY]) * 64
    wanted = [noise(0, 64), noise(1, 64), *[untouched] * 3, noise(1, 64), untouched, noise(0, 64)]
    assert [page_bytes(pool.pages([at]), 0) for at in range(8)] == wanted


def test_keys_are_made_of_the_hash_and_the_component() -> None:
    pool, script = a_pool(), Script()
    with a_cache(script, pool) as cache:
        cache.set(["a"], filled(pool, 0))
        assert script.stores[cache.namespace.id] == {f"a.{pool.component.key}": noise(0, 64)}


def test_components_keep_their_pages_apart() -> None:
    kv, mamba = a_pool(nbytes=64), a_pool(component=a_component(64, "mamba"))
    with a_cache(None, kv, mamba) as cache:
        cache.set(["a"], filled(kv, 0))
        assert cache.exists(["a"]) == 1
        assert cache.exists(["a"], "mamba") == 0
        assert cache.get(["a"], mamba.pages([0])) == [MISS]


def test_a_page_is_there_when_all_components_of_its_name_have_it() -> None:
    groups = [a_pool(component=a_component(64, shard=Shard(heads=(at, at + 1, 2)))) for at in range(2)]
    with a_cache(None, *groups) as cache:
        cache.set(["a", "b"], filled(groups[0], 0, 1))
        cache.set(["a", "c"], filled(groups[1], 2, 3))
        assert cache.exists(["a", "b"]) == 1
        assert cache.contains(["a", "b", "c", "d"]) == [OK, MISS, MISS, MISS]
        assert cache.remove(["a", "b", "d"]) == [OK, OK, MISS]
        assert cache.contains(["a", "b"]) == [MISS, MISS]


def test_loose_buffers_serve_as_slots() -> None:
    pool = a_pool(pages=1)
    slot = bytearray(64)
    with a_cache(None, pool) as cache:
        assert cache.set(["a"], Pages.of_buffers([noise(3, 64)], pool.component)) == [OK]
        assert cache.get(["a"], Pages.of_buffers([slot], pool.component)) == [OK]
    assert slot == noise(3, 64)


@pytest.mark.clause("C7")
def test_c7_an_empty_batch_reaches_no_backend() -> None:
    pool, script = a_pool(), Script()
    with a_cache(script, pool) as cache:
        answered = [
            cache.get([], pool.pages([])),
            cache.set([], pool.pages([])),
            cache.contains([]),
            cache.exists([]),
            cache.remove([]),
            cache.touch([]),
        ]
    assert answered == [[], [], [], 0, [], None]
    assert script.calls == [("init", 0), ("open", 1), ("close", 0)]


@pytest.mark.clause("C7")
def test_c7_repeated_keys_work() -> None:
    pool = a_pool()
    with a_cache(None, pool) as cache:
        assert cache.set(["a", "a"], filled(pool, 0, 0)) == [OK, OK]
        assert cache.get(["a", "a"], pool.pages([4, 5])) == [OK, OK]
    assert page_bytes(pool.pages([4, 5]), 1) == noise(0, 64)


def test_touch_and_remove_reach_the_backend() -> None:
    pool, script = a_pool(), Script()
    with a_cache(script, pool) as cache:
        cache.set(["a"], filled(pool, 0))
        cache.touch(["a", "b"])
        assert cache.remove(["a", "b"]) == [OK, MISS]
    assert script.count("touch") == 1


def test_clear_and_usage() -> None:
    pool = a_pool()
    with a_cache(None, pool) as cache:
        cache.set(["a", "b"], filled(pool, 0, 1))
        assert cache.usage() == Usage(2, 128, 128, None)
        assert cache.clear() == 2
        assert cache.usage() == Usage(0, 0, 0, None)


@pytest.mark.clause("C13")
def test_c13_what_the_backend_cannot_do_is_refused() -> None:
    def refuse(*_: Any) -> Any:
        raise UnsupportedOperation("scripted", "clear a namespace", capability="clear")

    with a_cache(Script(clear=refuse, remove=refuse), a_pool()) as cache:
        with pytest.raises(UnsupportedOperation):
            cache.clear()
        with pytest.raises(UnsupportedOperation):
            cache.remove(["a"])
        assert cache.stats().breaker == "closed"


# Misuse.


MISUSE: list[tuple[str, Callable[[HiCache, HostPool], Any], type[HiCacheError], str]] = [
    (
        "unequal lengths",
        lambda cache, pool: cache.get(["a", "b"], pool.pages([0])),
        InvalidPages,
        "a batch has unequal lengths: 2 page hashes, 1 pages. Pass one page for each hash.",
    ),
    (
        "unequal lengths of a set",
        lambda cache, pool: cache.set([], pool.pages([0])),
        InvalidPages,
        "a batch has unequal lengths: 0 page hashes, 1 pages. Pass one page for each hash.",
    ),
    (
        "unknown pool",
        lambda cache, pool: cache.get(["a"], a_pool().pages([0])),
        InvalidPages,
        "pages of an unknown pool: component 'kv'. Pass the pool to HiCache.open or add_pool first.",
    ),
    (
        "read-only slots",
        lambda cache, pool: cache.get(["a"], Pages.of_buffers([bytes(64)], pool.component)),
        InvalidPages,
        "a get needs writable slots: read-only buffers. Pass writable memory.",
    ),
    (
        "malformed hash",
        lambda cache, pool: cache.set(["a/b"], pool.pages([0])),
        InvalidKey,
        "page hash 0 of 1 is not well formed: 'a/b'. Page hashes match [A-Za-z0-9_-]{1,128}.",
    ),
    (
        "one text for a list",
        lambda cache, pool: cache.get("a", pool.pages([0])),
        InvalidKey,
        "page hashes are not a sequence of texts: str. Pass a list of page hashes.",
    ),
    (
        "a generator for a list",
        lambda cache, pool: cache.get((h for h in ["a"]), pool.pages([0])),  # type: ignore[arg-type]
        InvalidKey,
        "page hashes are not a sequence of texts: generator. Pass a list of page hashes.",
    ),
    (
        "none for a list",
        lambda cache, pool: cache.exists(None),  # type: ignore[arg-type]
        InvalidKey,
        "page hashes are not a sequence of texts: NoneType. Pass a list of page hashes.",
    ),
    (
        "indices for pages",
        lambda cache, pool: cache.get(["a"], [0]),  # type: ignore[arg-type]
        InvalidPages,
        "slots are not Pages: list. Make them with pool.pages(indices) or Pages.of_buffers.",
    ),
    (
        "unknown component",
        lambda cache, pool: cache.exists(["a"], "mamba"),
        InvalidArgument,
        "no pool holds this component: 'mamba'. Add its pool first; there are: kv.",
    ),
    (
        "malformed hash in exists",
        lambda cache, pool: cache.exists(["a", ""]),
        InvalidKey,
        "page hash 1 of 2 is not well formed: ''. Page hashes match [A-Za-z0-9_-]{1,128}.",
    ),
]


@pytest.mark.clause("C10")
@pytest.mark.parametrize(
    ("call", "error", "message"), [case[1:] for case in MISUSE], ids=[case[0] for case in MISUSE]
)
def test_c10_misuse_raises_and_reaches_no_backend(
    call: Callable[[HiCache, HostPool], Any], error: type[HiCacheError], message: str
) -> None:
    pool, script = a_pool(), Script()
    before = page_bytes(pool.pages([0]), 0)
    with a_cache(script, pool) as cache:
        with pytest.raises(error) as caught:
            call(cache, pool)
        assert type(caught.value) is error
        assert str(caught.value) == message
    assert script.calls == [("init", 0), ("open", 1), ("close", 0)]
    assert page_bytes(pool.pages([0]), 0) == before


@pytest.mark.parametrize(
    ("capabilities", "pool", "message"),
    [
        (
            Capabilities(max_page_nbytes=63, deadline="hold"),
            a_pool(nbytes=64),
            "pages of component 'kv' are too large for 'scripted': 64 bytes, at most 63. "
            "Use fewer tokens a page.",
        ),
        (
            Capabilities(deadline="hold"),
            HostPool(a_component(64), a_pool(nbytes=64).segments, 1, device="cuda:0"),
            "'scripted' cannot reach the memory of component 'kv': device cuda:0. "
            "Give a pool in host memory, or choose a backend with device_memory.",
        ),
    ],
    ids=["large pages", "device"],
)
def test_a_pool_that_can_never_be_served_is_refused(
    capabilities: Capabilities, pool: HostPool, message: str
) -> None:
    script = Script()
    with pytest.raises(InvalidPages) as caught, a_cache(script, pool, capabilities=capabilities):
        raise AssertionError("opened")
    assert str(caught.value) == message
    with a_cache(script, capabilities=capabilities) as cache, pytest.raises(InvalidPages):
        cache.add_pool(pool)


# Opening by name.


@pytest.mark.usefixtures("plugins")
def test_open_takes_the_factorys_path() -> None:
    from hicache_core import StorageBackendFactory

    StorageBackendFactory.register_backend("toy", "core_toys", "ToyStorage")
    pool, identity = a_pool(), Identity.for_tests()
    options = {"name": "n", "size": 3}
    with HiCache.open(
        "toy", identity=identity, placement=Placement(), pools=[pool], options=options
    ) as cache:
        assert cache.namespace == Namespace.of(identity)
        assert (cache.backend, cache.identity) == ("toy", identity)
        assert cache.storage is not None
        assert (cache.storage.options.name, cache.storage.config.timeout_s) == ("n", 5.0)
        assert cache.set(["a"], filled(pool, 0)) == [OK]


@pytest.mark.usefixtures("plugins")
def test_the_loaders_errors_always_raise() -> None:
    from hicache_core import StorageBackendFactory

    StorageBackendFactory.register_backend("toy", "core_toys", "ToyStorage")
    identity, placement = Identity.for_tests(), Placement()
    with pytest.raises(BackendNotFound):
        HiCache.open("nothing", identity=identity, placement=placement)
    with pytest.raises(InvalidOptions):
        HiCache.open("toy", identity=identity, placement=placement, options={"sise": 1})
    with pytest.raises(InvalidArgument):
        HiCache.open("toy", identity=identity, placement=placement, timeout_s=0)


@pytest.mark.usefixtures("plugins")
def test_a_change_of_placement_hits_and_of_identity_misses() -> None:
    pool, script = a_pool(), Script()
    with a_cache(script, pool) as cache:
        cache.set(["a"], filled(pool, 0))
    from core_caches import scripted

    from hicache_core.storage import HiCacheStorageConfig

    def hits(identity: Identity, placement: Placement) -> int:
        config = HiCacheStorageConfig(
            namespace=Namespace.of(identity), identity=identity, placement=placement, timeout_s=TIMEOUT_S
        )
        other = HiCache(scripted(script), config, [pool])
        other._guard.open(strict=True)
        try:
            return other.exists(["a"])
        finally:
            other.close()

    elsewhere = Placement(
        tp_rank=1, tp_size=2, pp_rank=1, pp_size=2, dp_rank=1, dp_size=2, cp_rank=1, cp_size=2,
        host_layout="layer_first", device="cuda:1", io_backend="direct",
    )  # fmt: skip
    assert hits(Identity.for_tests(), elsewhere) == 1
    assert hits(Identity.for_tests(weights="v2"), Placement()) == 0


# Splitting.


@pytest.mark.parametrize("verb", ["get", "set", "contains", "exists", "touch", "remove"])
def test_batches_are_split_to_max_batch(verb: str) -> None:
    pool, hashes = a_pool(pages=10), [f"h{at}" for at in range(10)]
    script = Script(exists=lambda proceed, *_: proceed())
    limited = Capabilities(max_batch=4, remove=True, eviction="lru", deadline="hold")
    with a_cache(script, pool, capabilities=limited) as cache:
        cache.set(hashes, filled(pool, *range(10)))
        script.calls.clear()
        if verb in ("get", "set"):
            assert getattr(cache, verb)(hashes, pool.pages(range(10))) == [OK] * 10
        else:
            answer = getattr(cache, verb)(hashes)
            assert answer == {"contains": [OK] * 10, "remove": [OK] * 10, "exists": 10, "touch": None}[verb]
        sizes = [size for name, size in script.calls if name == verb]
    assert sizes == [4, 4, 2]


def test_the_parts_of_a_split_get_fill_their_own_slots() -> None:
    pool, hashes = a_pool(pages=20), [f"h{at}" for at in range(10)]
    limited = Capabilities(max_batch=3, deadline="hold")
    with a_cache(None, pool, capabilities=limited) as cache:
        cache.set(hashes[:4] + hashes[5:], filled(pool, 0, 1, 2, 3, 5, 6, 7, 8, 9))
        assert cache.get(hashes, pool.pages(range(10, 20))) == [OK] * 4 + [MISS] + [OK] * 5
    wanted = [noise(at, 64) if at != 4 else bytes([CANARY]) * 64 for at in range(10)]
    assert [page_bytes(pool.pages([10 + at]), 0) for at in range(10)] == wanted


def test_a_split_exists_stops_at_the_first_hole() -> None:
    pool, hashes, script = a_pool(pages=10), [f"h{at}" for at in range(10)], Script()
    limited = Capabilities(max_batch=3, deadline="hold")
    with a_cache(script, pool, capabilities=limited) as cache:
        cache.set(hashes[:4] + hashes[5:], filled(pool, 0, 1, 2, 3, 5, 6, 7, 8, 9))
        script.calls.clear()
        assert cache.exists(hashes) == 4
        assert [size for _, size in script.calls] == [3, 3]


# Dead keys.


@pytest.mark.clause("C6")
@pytest.mark.parametrize("status", [Status.CORRUPT, Status.SIZE_MISMATCH, Status.ERROR])
def test_c6_a_key_on_which_a_get_failed_is_absent_until_an_ok_set(status: Status) -> None:
    pool, script = a_pool(), Script()
    with a_cache(script, pool) as cache:
        cache.set(["a", "b"], filled(pool, 0, 1))
        script.verbs["get"] = answers(OK, status)
        assert cache.get(["a", "b"], pool.pages([4, 5])) == [OK, status]
        assert cache.contains(["a", "b"]) == [OK, MISS]
        assert cache.exists(["a", "b"]) == 1
        assert cache.stats().dead_keys == 1
        cache.set(["b"], filled(pool, 1))
        assert cache.contains(["a", "b"]) == [OK, OK]
        assert cache.stats().dead_keys == 0


@pytest.mark.parametrize("status", [MISS, Status.TIMEOUT, Status.UNAVAILABLE, Status.SKIPPED, Status.DENIED])
def test_other_outcomes_leave_a_key_alive(status: Status) -> None:
    pool, script = a_pool(), Script()
    with a_cache(script, pool) as cache:
        cache.set(["a", "b"], filled(pool, 0, 1))
        script.verbs["get"] = answers(OK, status)
        cache.get(["a", "b"], pool.pages([4, 5]))
        assert cache.exists(["a", "b"]) == 2


def test_a_failed_set_leaves_a_key_dead() -> None:
    pool, script = a_pool(), Script(get=answers(Status.CORRUPT), set=answers(Status.NO_SPACE))
    with a_cache(script, pool) as cache:
        cache.get(["a"], pool.pages([0]))
        cache.set(["a"], pool.pages([0]))
        assert cache.stats().dead_keys == 1


def test_dead_keys_come_alive_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "DEAD_KEY_S", 0.0)
    pool, script = a_pool(), Script()
    with a_cache(script, pool) as cache:
        cache.set(["a"], filled(pool, 0))
        script.verbs["get"] = answers(Status.CORRUPT)
        cache.get(["a"], pool.pages([4]))
        assert cache.contains(["a"]) == [OK]
        assert cache.stats().dead_keys == 0


def test_dead_keys_are_bounded_the_oldest_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_DEAD_KEYS", 2)
    pool, script = a_pool(), Script()
    with a_cache(script, pool) as cache:
        cache.set(["a", "b", "c"], filled(pool, 0, 1, 2))
        script.verbs["get"] = answers(Status.CORRUPT)
        for page_hash in ("a", "b", "a", "c"):
            cache.get([page_hash], pool.pages([4]))
        assert cache.contains(["a", "b", "c"]) == [MISS, OK, MISS]


def test_clear_forgets_dead_keys() -> None:
    pool, script = a_pool(), Script(get=answers(Status.CORRUPT))
    with a_cache(script, pool) as cache:
        cache.get(["a"], pool.pages([0]))
        cache.clear()
        assert cache.stats().dead_keys == 0


# Logical anchors.


def test_a_component_without_bytes_is_never_stored_and_never_there() -> None:
    anchor, script = HostPool(a_component(0, "anchor"), (), 8), Script()
    with a_cache(script, anchor, a_pool()) as cache:
        assert cache.set(["a"], anchor.pages([0])) == [Status.SKIPPED]
        assert cache.get(["a"], anchor.pages([0])) == [Status.SKIPPED]
        assert cache.exists(["a"], "anchor") == 0
        assert cache.contains(["a"], "anchor") == [MISS]
    assert script.calls == [("init", 0), ("open", 1), ("close", 0)]


# Pools that come and go.


def test_pools_are_added_and_dropped() -> None:
    first, late, script = a_pool(), a_pool(component=a_component(32, "mamba")), Script()
    with a_cache(script, first) as cache:
        cache.add_pool(late)
        cache.add_pool(late)
        assert cache.set(["a"], filled(late, 0)) == [OK]
        cache.drop_pool(late)
        cache.drop_pool(late)
        with pytest.raises(InvalidPages):
            cache.get(["a"], late.pages([0]))
        with pytest.raises(InvalidArgument):
            cache.exists(["a"], "mamba")
    assert [name for name, _ in script.calls if name.endswith("pool")] == ["add_pool", "drop_pool"]


# The end.


def test_after_close_misses_are_answered_and_operators_are_told() -> None:
    pool, script = a_pool(), Script()
    with a_cache(script, pool) as cache:
        cache.set(["a"], filled(pool, 0))
    cache.close()
    assert cache.get(["a"], pool.pages([4])) == [MISS]
    assert cache.contains(["a"]) == [MISS]
    assert cache.exists(["a"]) == 0
    assert not any(cache.set(["a"], pool.pages([4])))
    assert cache.touch(["a"]) is None
    assert cache.storage is None
    for call in (cache.clear, cache.usage, lambda: cache.remove(["a"])):
        with pytest.raises(StorageClosed):
            call()
    assert script.count("close") == 1


# Counting.


def test_counters_are_right_under_eight_threads() -> None:
    pool = a_pool(pages=8 * 4)
    script = Script()
    rounds = 200
    with a_cache(script, pool, timeout_s=30.0) as cache:

        def work(number: int) -> None:
            slots = pool.pages(range(number * 4, number * 4 + 4))
            hashes = [f"{number}-{at}" for at in range(4)]
            cache.set(hashes[:3], slots[:3])
            for _ in range(rounds):
                cache.get(hashes, slots)
                cache.exists(hashes)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = cache.stats()
    got = stats.verbs["get"]
    assert (got.calls, got.pages, got.nbytes) == (8 * rounds, 8 * rounds * 4, 8 * rounds * 3 * 64)
    assert dict(got.statuses) == {OK: 8 * rounds * 3, MISS: 8 * rounds}
    assert sum(got.latency) == 8 * rounds
    assert (stats.verbs["exists"].calls, stats.verbs["set"].pages) == (8 * rounds, 24)
    assert dict(stats.verbs["exists"].statuses) == {OK: 8 * rounds * 3, MISS: 8 * rounds}
    assert (stats.late, stats.abandoned, stats.breaker) == (0, 0, "closed")


def test_slots_of_many_segments_reach_the_backend() -> None:
    from core_builders import Geometry

    geometry = Geometry("layer_first", layers=64, pages=4, page_tokens=1, heads=1, dims=(2, 2))
    pool = HostPool.from_tensor(geometry.halves(), a_component(geometry.page_nbytes), "layer_first")
    with a_cache(None, pool) as cache:
        fill_page(pool.pages([0]), 0, noise(9, geometry.page_nbytes))
        assert cache.set(["a"], pool.pages([0])) == [OK]
        assert cache.get(["a"], pool.pages([3])) == [OK]
    assert page_bytes(pool.pages([3]), 0) == noise(9, geometry.page_nbytes)
