"""The arena notices every byte, and pages follow from their keys."""

from __future__ import annotations

import pytest

from hicache_conformance.builders import LAYOUTS, Arena, Layout, in_segments, page_bytes
from hicache_core import Component


def _component(nbytes: int = 4096) -> Component:
    return Component("kv", "whole", "page_first", "bf16", nbytes)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_arena_fill_then_read_gives_the_page_and_the_pools_views_agree(layout: Layout) -> None:
    arena = Arena(_component(), 3, layout)
    page = page_bytes("key", 4096)
    arena.fill(1, page)
    assert arena.read(1) == page
    assert b"".join(arena.pages([1]).views(0)) == page
    arena.check({1: page})


@pytest.mark.parametrize("at", ["before", "between_planes", "behind", "other_slot"])
def test_arena_check_finds_one_changed_byte(at: str) -> None:
    arena = Arena(_component(), 2, in_segments(2))
    places = {
        "before": 0,
        "between_planes": 96 + 2 * 2048 + 5,
        "behind": len(arena.buffer) - 1,
        "other_slot": 96 + 2048,
    }
    arena.buffer[places[at]] ^= 1
    with pytest.raises(AssertionError) as caught:
        arena.check(undefined=[0])
    where = "slot 1, segment 0, byte 0" if at == "other_slot" else f"guard byte {places[at]}"
    assert str(caught.value).startswith(f"1 bytes of memory are not as they must be; the first at {where}: ")


def test_arena_check_lets_an_undefined_slot_be_anything_and_no_other() -> None:
    arena = Arena(_component(), 2)
    arena.fill(0, bytes(4096))
    arena.check(undefined=[0])
    with pytest.raises(AssertionError):
        arena.check(undefined=[1])


def test_arena_shift_moves_every_segment_off_alignment() -> None:
    plain, shifted = (
        Arena(_component(4095), 2, in_segments(3)),
        Arena(_component(4095), 2, in_segments(3), shift=1),
    )
    offsets = [
        [address - arena.pool.segments[0].address for address in arena.pages([0]).addresses()[0]]
        for arena in (plain, shifted)
    ]
    assert offsets[0] == offsets[1]
    assert len(shifted.buffer) == len(plain.buffer) + 1


def test_arena_of_more_segments_than_bytes_leaves_out_the_empty_ones() -> None:
    arena = Arena(_component(1), 4, in_segments(3))
    assert [segment.nbytes for segment in arena.pool.segments] == [1]


@pytest.mark.parametrize("count", [1, 2, 3, 61, 128])
def test_layout_in_segments_cuts_the_whole_page(count: int) -> None:
    sizes = in_segments(count).cut(4096 + count)
    assert (len(sizes), sum(sizes)) == (count, 4096 + count)


def test_page_bytes_differ_by_key_version_and_seed() -> None:
    pages = {page_bytes(key, 64, version, seed) for key in "ab" for version in (0, 1) for seed in (0, 1)}
    assert len(pages) == 8
    assert page_bytes("a", 64) == page_bytes("a", 64)
    assert page_bytes("a", 32) == page_bytes("a", 64)[:32]
