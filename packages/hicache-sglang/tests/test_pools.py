"""Host pools of SGLang 0.5.23 that the trees of a test cannot build, as real objects."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.timeout(300)  # a whole SGLang is imported, on a machine that may be busy


@pytest.fixture(scope="module")
def found(engine):
    return json.loads(engine("pool_cases.py"))


def test_a_pool_whose_pages_move_is_refused(found):
    assert found["envelope"] == "its pages move while they are in use (a shared, compacting arena)"


def test_a_pool_interleaved_over_ranks_is_refused(found):
    assert found["interleaved"] == "its pages are interleaved over the ranks, so no rank holds a whole chain"


def test_page_rows_are_whole_though_their_size_per_token_is_a_rows(found):
    assert (found["deepseek segments"], found["deepseek bytes"]) == ([3, 1], 144)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_a_logical_anchor_is_present_where_its_sidecars_are(found, layout):
    assert found[f"anchor {layout}"] == "ok"


@pytest.mark.parametrize(
    ("pool", "outcome"),
    [
        ("nvfp4 page_first", "ok (direct)"),
        ("nvfp4 layer_first", "ok (flat)"),
        ("mamba", "ok (direct)"),
        ("mamba side states", "ok (flat)"),
        ("k only layer_first", "ok (flat)"),
        ("k only page_first", "ok (direct)"),
        ("k only page_first_direct", "ok (direct)"),
        ("qsa layer_first", "ok (direct)"),
        ("qsa page_first", "ok (direct)"),
        ("qsa page_first_direct", "ok (direct)"),
    ],
)
def test_sidecars_come_back_whole_with_scales_and_side_states(found, pool, outcome):
    assert found[pool] == outcome


@pytest.mark.parametrize(
    ("pool", "outcome"),
    [
        ("kv_split", "ok (direct, 2 parts)"),
        ("kv_split, index keys", "ok (direct, 3 parts)"),
        ("kv_split, index keys, scales", "ok (direct, 4 parts)"),
        ("kv_split, packed fp8", "ok (direct, 3 parts)"),
    ],
)
def test_pages_in_buffers_of_their_own_come_back_with_every_part(found, pool, outcome):
    assert found[pool] == outcome


def test_a_pool_that_gives_no_pages_is_refused_with_its_own_reason(found):
    assert "a page's UE8M0 scales live outside kv_buffer" in found["mxfp8"]
    assert "Unsupported layout: page_unified" in found["page_unified"]


def test_stats_are_sglangs_own(found):
    assert found["metrics"] == "StorageMetrics [2] [2]"
