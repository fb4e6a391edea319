"""Segments out of three probed pages: linear and complete, or not believed."""

# ruff: noqa: E402 - without torch there is nothing to import
from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hicache_core import Segment
from hicache_sglang.geometry import (
    Geometry,
    PoolRefused,
    anchor_of,
    geometry_of,
    head_groups_of,
    page_tokens_of,
)

ADDRESS = 0x10000


class Pool:
    """A host pool that is only arithmetic: two segments a page of 32 and 16 bytes."""

    layout = "page_first"
    page_size = 4
    layer_num = 2
    size = 40
    size_per_token = 12
    kv_buffer = "memory"

    def get_page_buffer_meta(self, indices):
        starts = indices.tolist()[:: self.page_size]
        pointers = [at for start in starts for at in (ADDRESS + 8 * start, 0x90000 + 4 * start)]
        return pointers, [32, 16] * len(starts)

    def get_dummy_flat_data_page(self):
        return torch.zeros(48, dtype=torch.uint8)

    def get_data_page(self, index, flat=True):
        return torch.zeros(48, dtype=torch.uint8)

    def set_from_flat_data_page(self, index, page): ...


def changed(**members):
    return type("Changed", (Pool,), members)()


def no_meta(self, indices):
    raise ValueError("Unsupported layout: odd")


def test_linear_and_complete_is_direct():
    segments = (Segment(ADDRESS, 32, 32), Segment(0x90000, 16, 16))
    assert geometry_of(Pool()) == Geometry("direct", 4, 10, 48, segments)


def test_layer_first_puts_k_of_all_layers_before_v():
    def meta(self, indices):
        starts = indices.tolist()[:: self.page_size]
        return [base + 3 * s for s in starts for base in (0x1000, 0x5000, 0x2000, 0x6000)], [12] * 4 * len(
            starts
        )

    pool = changed(layout="layer_first", get_page_buffer_meta=meta)
    assert [segment.address for segment in geometry_of(pool).segments] == [0x1000, 0x2000, 0x5000, 0x6000]


def test_incomplete_segments_fall_back_to_whole_flat_pages():
    pool = changed(
        size_per_token=24,
        get_dummy_flat_data_page=lambda self: torch.zeros(96, dtype=torch.uint8),
        get_data_page=lambda self, index, flat=True: torch.zeros(48, dtype=torch.uint16),
    )
    assert geometry_of(pool) == Geometry("flat", 4, 10, 96)


def test_a_pool_that_leaves_bytes_out_of_its_pages_is_refused():
    """0.5.9's NSA pool counts the indexer in size_per_token and leaves it out of its pages."""
    with pytest.raises(PoolRefused) as refused:
        geometry_of(changed(size_per_token=24))
    assert (
        refused.value.value
        == "its segments sum to 48 bytes, a page has 96; its flat pages have 48 bytes of 96"
    )


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        (no_meta, "it gives no addresses (ValueError: Unsupported layout: odd)"),
        (lambda self, at: ([ADDRESS + 8 * int(at[0]) ** 2, 0x90000], [32, 16]), "at a fixed stride"),
        (lambda self, at: ([ADDRESS, 0x90000], [32 + int(at[0]), 16]), "its pages have different segments"),
        (lambda self, at: ([ADDRESS + int(at[0]), 0x90000 + 4 * int(at[0])], [32, 16]), "its pages overlap"),
    ],
    ids=["no addresses", "not linear", "sizes differ", "overlapping"],
)
def test_what_is_not_linear_is_refused_with_the_reason(meta, reason):
    pool = changed(get_page_buffer_meta=meta, get_dummy_flat_data_page=no_meta)
    with pytest.raises(PoolRefused) as refused:
        geometry_of(pool)
    assert reason in refused.value.value


def test_flat_pages_serve_where_there_are_no_addresses():
    assert geometry_of(changed(get_page_buffer_meta=no_meta)) == Geometry("flat", 4, 10, 48)


def test_moving_and_interleaved_pages_are_refused_before_they_are_probed():
    for member in (
        {"stores_page_envelope": True},
        {"shared_allocation_domain": object()},
        {"placement": object()},
    ):
        with pytest.raises(PoolRefused):
            geometry_of(changed(get_page_buffer_meta=None, **member))


def test_a_pool_without_bytes_is_a_logical_anchor():
    pool = changed(kv_buffer=None, size_per_token=0, get_page_buffer_meta=lambda self, at: None,
                   get_dummy_flat_data_page=lambda self: torch.empty(0, dtype=torch.uint8))  # fmt: skip
    assert geometry_of(pool) == Geometry("logical", 4, 10, 0)


def test_pages_are_counted_in_widened_tokens_under_decode_context_parallelism():
    assert page_tokens_of(changed(logical_page_size=8)) == 8


def test_one_page_and_no_page():
    assert geometry_of(changed(size=4)).segments == (Segment(ADDRESS, 32, 32), Segment(0x90000, 16, 16))
    with pytest.raises(PoolRefused, match="no whole page"):
        geometry_of(changed(size=3))


def test_head_groups_are_cut_from_the_whole_page(sglang):
    import sgl_release

    pool = sgl_release.host_pool(sglang, "mha", "page_head")
    whole, groups = geometry_of(pool), head_groups_of(pool, 2)
    assert [group.page_nbytes for group in groups] == [whole.page_nbytes // 2] * 2
    assert [len(group.segments) for group in groups] == [2, 2]
    first, second = (group.segments[0] for group in groups)
    assert (second.address - first.address, first.stride) == (first.nbytes, whole.segments[0].stride)


def test_a_group_of_pools_is_its_anchor():
    inner = Pool()
    group = type("Group", (), {"anchor_entry": type("Entry", (), {"host_pool": inner})()})()
    assert anchor_of(group) is inner
    assert anchor_of(inner) is inner
