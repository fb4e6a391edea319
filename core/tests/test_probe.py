"""Hit policies against models that try every length by the policy's own words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from core_builders import a_component, a_pool
from core_caches import a_cache, filled
from core_toys import Script
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_core.errors import InvalidArgument
from hicache_core.memory import HostPool
from hicache_core.probe import ComponentQuery, Hit, combine, leading_run, reach

flags = st.lists(st.booleans(), max_size=14)
queries = st.one_of(
    st.builds(ComponentQuery, name=st.just("x"), policy=st.just("all_pages")),
    st.builds(ComponentQuery, name=st.just("x"), policy=st.just("trailing_pages"), window=st.integers(1, 5)),
    st.integers(1, 5).flatmap(
        lambda block: st.builds(
            ComponentQuery,
            name=st.just("x"),
            policy=st.just("block_groups"),
            block_pages=st.just(block),
            group_pages=st.integers(1, block),
        )
    ),
)


def allowed_by(query: ComponentQuery, present: Sequence[bool], length: int) -> bool:
    """Say by the policy's words whether a prefix of this length is usable."""
    if query.policy == "all_pages":
        return all(present[page] for page in range(length))
    if query.policy == "trailing_pages":
        return all(present[page] for page in range(max(0, length - query.window), length))
    if length % query.block_pages:
        return False
    for end in range(query.block_pages, length + 1, query.block_pages):
        if not all(present[page] for page in range(end - query.group_pages, end)):
            return False
    return True


def model_reach(query: ComponentQuery, present: Sequence[bool]) -> tuple[int, ...]:
    return tuple(length for length in range(1, len(present) + 1) if allowed_by(query, present, length))


@settings(max_examples=150)
@given(query=queries, present=flags)
def test_reach_gives_every_length_that_the_policy_allows(query: ComponentQuery, present: list[bool]) -> None:
    assert reach(query, present) == model_reach(query, present)


@settings(max_examples=150)
@given(
    kv=st.none() | flags,
    pages=st.integers(0, 14),
    sidecars=st.lists(st.tuples(queries, st.lists(st.booleans(), min_size=14, max_size=14)), max_size=3),
)
def test_combine_gives_every_length_that_all_gates_allow(
    kv: list[bool] | None, pages: int, sidecars: list[tuple[ComponentQuery, list[bool]]]
) -> None:
    named = [
        (ComponentQuery(name=f"c{at}", policy=q.policy, window=q.window,
                        block_pages=q.block_pages, group_pages=q.group_pages), present)
        for at, (q, present) in enumerate(sidecars)
    ]  # fmt: skip
    kv = None if kv is None else [*kv, *[False] * 14][:pages]
    kv_run = None if kv is None else leading_run(kv)
    asked = pages if kv_run is None else kv_run
    reached = [(query, reach(query, present[:asked])) for query, present in named]

    gates = [(query, present) for query, present in named if query.policy != "block_groups"]
    usable = tuple(
        length
        for length in range(1, asked + 1)
        if all(allowed_by(query, present, length) for query, present in gates) and (kv is not None or gates)
    )
    per_component = {
        query.name: max(model_reach(query, present[:asked]), default=0) for query, present in named
    }
    wanted_kv = kv_run if kv_run is not None else max(usable, default=0)
    assert combine(kv_run, pages, reached) == Hit(wanted_kv, per_component, usable)


@given(flags)
def test_the_leading_run(present: list[bool]) -> None:
    assert leading_run(present) == next((at for at, flag in enumerate(present) if not flag), len(present))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"policy": "some"},
            "component 'x' has an unknown policy: 'some'. "
            "Use one of: all_pages, trailing_pages, block_groups.",
        ),
        *[
            (
                changes,
                "the query of component 'x' is not well formed: "
                f"window={changes.get('window', 1)!r}, block_pages={changes.get('block_pages', 1)!r}, "
                f"group_pages={changes.get('group_pages', 1)!r}. "
                "window is at least 1, and 1 <= group_pages <= block_pages.",
            )
            for changes in (
                {"window": 0},
                {"window": 1.5},
                {"window": None},
                {"block_pages": 0},
                {"group_pages": 0, "block_pages": 2},
                {"group_pages": 3, "block_pages": 2},
                {"block_pages": "2"},
            )
        ],
    ],
)
def test_a_malformed_query_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ComponentQuery(name="x", **changes)
    assert str(caught.value) == message


# Through HiCache.


def test_probe_asks_the_store_for_sidecars_within_the_kv_run_only() -> None:
    kv, mamba, indexer = (a_pool(component=a_component(64, name)) for name in ("kv", "mamba", "indexer"))
    script = Script()
    with a_cache(script, kv, mamba, indexer) as cache:
        cache.set(["a", "b", "c"], filled(kv, 0, 1, 2))
        cache.set(["b", "d"], filled(mamba, 0, 1))
        cache.set(["a", "b", "d"], filled(indexer, 0, 1, 2))
        script.calls.clear()
        hit = cache.probe(
            ["a", "b", "c", "d"],
            [ComponentQuery(name="mamba", policy="trailing_pages"), ComponentQuery(name="indexer")],
        )
    assert hit == Hit(3, {"mamba": 2, "indexer": 2}, (2,))
    assert script.calls == [("contains", 4), ("contains", 3), ("contains", 3), ("close", 0)]


def test_probe_without_queries_is_the_kv_run() -> None:
    kv = a_pool()
    with a_cache(None, kv) as cache:
        cache.set(["a", "b"], filled(kv, 0, 1))
        assert cache.probe(["a", "b", "c"]) == Hit(2, {}, (1, 2))
        assert cache.probe([]) == Hit(0, {}, ())


def test_an_anchor_is_there_where_its_gating_sidecars_are() -> None:
    anchor = HostPool(a_component(0), (), 8)
    mamba, blocks = (a_pool(component=a_component(64, name)) for name in ("mamba", "blocks"))
    with a_cache(None, anchor, mamba, blocks) as cache:
        cache.set(["a", "b", "d"], filled(mamba, 0, 1, 2))
        cache.set(["b"], filled(blocks, 0))
        gate = ComponentQuery(name="mamba")
        loose = ComponentQuery(name="blocks", policy="block_groups", block_pages=2)
        assert cache.probe(["a", "b", "c", "d"], [gate]) == Hit(2, {"mamba": 2}, (1, 2))
        assert cache.probe(["a", "b", "c"], [gate, loose]) == Hit(2, {"mamba": 2, "blocks": 2}, (1, 2))
        assert cache.probe(["a", "b"], [loose]) == Hit(0, {"blocks": 2}, ())
        assert cache.probe(["a", "b"]) == Hit(0, {}, ())


def test_a_block_group_that_is_missing_never_shortens_the_prefix() -> None:
    kv, blocks = a_pool(), a_pool(component=a_component(64, "blocks"))
    with a_cache(None, kv, blocks) as cache:
        cache.set(["a", "b", "c", "d"], filled(kv, 0, 1, 2, 3))
        cache.set(["d"], filled(blocks, 0))
        query = ComponentQuery(name="blocks", policy="block_groups", block_pages=2)
        assert cache.probe(["a", "b", "c", "d"], [query]) == Hit(4, {"blocks": 0}, (1, 2, 3, 4))


def test_a_query_for_a_component_without_a_pool_is_misuse() -> None:
    with a_cache(None, a_pool()) as cache, pytest.raises(InvalidArgument):
        cache.probe(["a"], [ComponentQuery(name="mamba")])
    with a_cache(None, a_pool(component=a_component(64, "mamba"))) as cache, pytest.raises(InvalidArgument):
        cache.probe(["a"])


def test_a_dead_store_is_no_hit() -> None:
    kv, mamba = a_pool(), a_pool(component=a_component(64, "mamba"))

    def boom(*_: Any) -> Any:
        raise RuntimeError

    with a_cache(Script(contains=boom), kv, mamba) as cache:
        assert cache.probe(["a"], [ComponentQuery(name="mamba")]) == Hit(0, {"mamba": 0}, ())
