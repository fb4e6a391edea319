"""Level identity: what must not be shared is not, what may be shared is (C9)."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from hicache_conformance.bench import PAGE_NBYTES, Bench, aligned
from hicache_core import Component, HiCacheStorage, Identity, Placement, Shard, Status

OK, MISS = Status.OK, Status.MISS

#: One changed field of Identity each; any must miss.
IDENTITY_CHANGES: dict[str, dict[str, Any]] = {
    "engine": {"engine": "other"},
    "hash_scheme": {"hash_scheme": "other"},
    "hash_seed": {"hash_seed": "0"},
    "model": {"model": "test/model2"},
    "revision": {"revision": "main"},
    "weights": {"weights": "v2"},
    "quantization": {"quantization": "awq"},
    "config_overrides": {"config_overrides": {"rope_scaling": 2}},
    "kv_dtype": {"kv_dtype": "fp8_e4m3"},
    "kv_scales": {"kv_scales": "abc"},
    "page_tokens": {"page_tokens": 65},
    "lora": {"lora": "abc"},
    "tenant": {},  # each test has a tenant of its own, so this one is made there
}

#: Pairs that a careless concatenation, folding or cleaning makes equal.
LOOKALIKES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "slash_or_dash": ({"model": "a/b"}, {"model": "a-b"}),
    "border_moved": ({"model": "a", "revision": "b_c"}, {"model": "a_b", "revision": "c"}),
    "none_or_its_name": ({"revision": None}, {"revision": "None"}),
    "upper_or_lower": ({"model": "A"}, {"model": "a"}),
    "dtype_of_equal_size": ({"kv_dtype": "fp8_e4m3"}, {"kv_dtype": "fp8_e5m2"}),
    "trailing_space": ({"model": "a"}, {"model": "a "}),
    "value_in_another_field": ({"lora": "x", "weights": None}, {"lora": None, "weights": "x"}),
}

#: One changed field of Placement each; any must hit.
PLACEMENT_CHANGES: dict[str, dict[str, Any]] = {
    "tp": {"tp_rank": 1, "tp_size": 2},
    "pp": {"pp_rank": 1, "pp_size": 2},
    "dp": {"dp_rank": 1, "dp_size": 2},
    "cp": {"cp_rank": 1, "cp_size": 2},
    "host_layout": {"host_layout": "layer_first"},
    "device": {"device": "cuda:3"},
    "io_backend": {"io_backend": "direct"},
}

#: One changed field of a Component each; any must miss.
COMPONENT_CHANGES: dict[str, dict[str, Any]] = {
    "name": {"name": "mamba"},
    "layers": {"shard": Shard(layers=(0, 8, 16))},
    "other_layers": {"shard": Shard(layers=(8, 16, 16))},
    "heads": {"shard": Shard(heads=(0, 4, 8))},
    "replicated_heads": {"shard": Shard(heads="replicated")},
    "rank": {"shard": Shard(tp=(0, 2))},
    "other_rank": {"shard": Shard(tp=(1, 2))},
    "byte_order": {"byte_order": "page_head"},
    "format": {"format": "fp8_e4m3"},
    "draft_model": {"draft_model": "draft"},
}

#: Page hashes that a store of files, tables or prefixes may confuse.
AWKWARD_HASHES = [
    "a",
    "A",
    "aa",
    "a-",
    "a_",
    "-a",
    "_",
    "-",
    "--",
    "0",
    "00",
    "con",
    "nul",
    "index",
    "manifest",
    "0" * 64,
    "0" * 63 + "1",
    "a" * 127,
    "a" * 128,
    "A" * 128,
    "Z" * 127 + "-",
    "Z" * 127 + "_",
]


class IdentityLevel:
    """Cases of level identity."""

    @pytest.mark.clause("C9")
    @pytest.mark.parametrize("field", IDENTITY_CHANGES)
    def test_c9_a_change_of_identity_misses_both_ways(self, bench: Bench, field: str) -> None:
        changes = IDENTITY_CHANGES.get(field) or {field: f"{bench.identity.tenant}, somebody else"}
        other = bench.open(identity=dataclasses.replace(bench.identity, **changes))
        _apart(bench, bench.open(), other)

    @pytest.mark.clause("C9")
    @pytest.mark.parametrize("pair", LOOKALIKES)
    def test_c9_identities_that_look_alike_are_apart(self, bench: Bench, pair: str) -> None:
        one, two = (dataclasses.replace(bench.identity, **changes) for changes in LOOKALIKES[pair])
        _apart(bench, bench.open(identity=one), bench.open(identity=two))

    @pytest.mark.clause("C9", "C3")
    @pytest.mark.needs("shared")
    @pytest.mark.parametrize("field", PLACEMENT_CHANGES)
    def test_c9_a_change_of_placement_hits_both_ways(self, bench: Bench, field: str) -> None:
        one, two = bench.open(), bench.open(placement=Placement(**PLACEMENT_CHANGES[field]))
        keys = bench.keys(4)
        bench.stored(one, keys[:2])
        bench.stored(two, keys[2:])
        assert bench.versions(two, keys) == [0] * 4
        assert bench.versions(one, keys) == [0] * 4

    @pytest.mark.clause("C9")
    @pytest.mark.parametrize("field", COMPONENT_CHANGES)
    def test_c9_a_change_of_component_misses_both_ways(self, bench: Bench, field: str) -> None:
        storage = bench.open()
        one = bench.component()
        fields = {
            name: getattr(one, name) for name in ("name", "shard", "byte_order", "format", "draft_model")
        }
        two = Component(**(fields | COMPONENT_CHANGES[field]), page_nbytes=PAGE_NBYTES)
        one_keys, two_keys = bench.keys(2, one), bench.keys(2, two)
        bench.stored(storage, one_keys[:1])
        bench.stored(storage, two_keys[1:])
        assert bench.versions(storage, one_keys + two_keys) == [0, MISS, MISS, 0]

    @pytest.mark.clause("C9", "C2")
    def test_c9_awkward_keys_are_all_different(self, bench: Bench) -> None:
        storage, keys = bench.open(), bench.component().keys(AWKWARD_HASHES)
        bench.stored(storage, keys[::2])
        wanted: list[Status] = [MISS if i % 2 else OK for i in range(len(keys))]
        assert aligned(storage.batch_contains(keys), len(keys)) == wanted
        bench.stored(storage, keys[1::2])
        assert bench.versions(storage, keys) == [0] * len(keys)
        assert storage.usage().pages == len(keys)

    @pytest.mark.clause("C9")
    def test_c9_a_component_key_of_full_length(self, bench: Bench) -> None:
        component = bench.component(name="c" * 47)
        storage, keys = bench.open(), bench.keys(2, component)
        bench.stored(storage, keys[:1])
        assert bench.versions(storage, keys) == [0, MISS]

    @pytest.mark.clause("C9")
    @pytest.mark.needs("clear")
    def test_c9_clear_leaves_a_neighbours_pages_as_they_are(self, bench: Bench) -> None:
        mine = bench.open()
        neighbour = bench.open(identity=dataclasses.replace(bench.identity, model="a neighbour's"))
        keys = bench.keys(10)
        bench.stored(mine, keys)
        bench.stored(neighbour, keys[:7], version=1)
        assert mine.clear() == 10
        assert bench.versions(mine, keys) == [MISS] * 10
        assert bench.versions(neighbour, keys) == [1] * 7 + [MISS] * 3
        assert (mine.usage().pages, neighbour.usage().pages) == (0, 7)

    @pytest.mark.clause("C9", "C13")
    @pytest.mark.needs("remove")
    def test_c9_remove_leaves_a_neighbours_page_as_it_is(self, bench: Bench) -> None:
        mine = bench.open()
        neighbour = bench.open(identity=dataclasses.replace(bench.identity, kv_dtype="fp8_e5m2"))
        keys = bench.keys(1)
        bench.stored(mine, keys)
        bench.stored(neighbour, keys, version=1)
        assert aligned(mine.batch_remove(keys), 1) == [OK]
        assert (bench.versions(mine, keys), bench.versions(neighbour, keys)) == ([MISS], [1])

    @pytest.mark.clause("C9")
    def test_c9_usage_counts_its_own_pages_only(self, bench: Bench) -> None:
        mine = bench.open()
        neighbour = bench.open(identity=dataclasses.replace(bench.identity, model="a neighbour's"))
        bench.stored(neighbour, bench.keys(5))
        bench.stored(mine, bench.keys(2))
        assert [(u.pages, u.bytes) for u in (mine.usage(), neighbour.usage())] == [
            (2, 2 * PAGE_NBYTES),
            (5, 5 * PAGE_NBYTES),
        ]

    @pytest.mark.clause("C9", "C13")
    @pytest.mark.needs("listing")
    def test_c9_namespaces_are_listed_each_with_its_own(self, bench: Bench) -> None:
        mine = bench.open()
        neighbour = bench.open(identity=dataclasses.replace(bench.identity, config_overrides={"rope": 2}))
        bench.stored(mine, bench.keys(5))
        bench.stored(neighbour, bench.keys(2))
        for storage, pages in ((mine, 5), (neighbour, 2)):
            found = {use.id: use for use in mine.namespaces()}[storage.config.namespace.id]
            assert (found.pages, found.bytes) == (pages, pages * PAGE_NBYTES)
            if found.manifest is not None:
                assert Identity.of_manifest(found.manifest) == storage.config.identity
            assert found.written_s is None or abs(found.written_s - time.time()) < 3600

    @pytest.mark.clause("C9", "C13")
    @pytest.mark.needs("listing", "clear")
    def test_c9_a_cleared_namespace_is_listed_empty_or_not_at_all(self, bench: Bench) -> None:
        mine, neighbour = bench.open(), bench.open(identity=dataclasses.replace(bench.identity, lora="x"))
        bench.stored(mine, bench.keys(3))
        bench.stored(neighbour, bench.keys(3))
        mine.clear()
        pages = {use.id: use.pages for use in neighbour.namespaces()}
        assert pages.get(mine.config.namespace.id, 0) == 0
        assert pages[neighbour.config.namespace.id] == 3

    @pytest.mark.clause("C9", "C3")
    @pytest.mark.needs("shared")
    def test_c9_the_same_identity_built_anew_hits(self, bench: Bench) -> None:
        one, keys = bench.open(), bench.keys(3)
        bench.stored(one, keys)
        same = dataclasses.replace(bench.identity)
        assert bench.versions(bench.open(identity=same), keys) == [0] * 3


def _apart(bench: Bench, one: HiCacheStorage, two: HiCacheStorage) -> None:
    """Require that neither sees, changes or blocks the other's pages under the same keys."""
    keys = bench.keys(3)
    bench.stored(one, keys[:2])
    assert aligned(two.batch_contains(keys), 3) == [MISS] * 3
    assert two.batch_exists(keys) == 0
    assert bench.versions(two, keys) == [MISS] * 3
    bench.stored(two, keys[1:], version=1)
    assert bench.versions(one, keys) == [0, 0, MISS]
    assert bench.versions(two, keys) == [MISS, 1, 1]
