"""What is registered: each byte once, whatever pools lie over it."""

from __future__ import annotations

from mooncake_builders import a_component

from hicache_core import HostPool, Segment
from hicache_mooncake._regions import Regions

BASE = 1 << 20


def a_pool(start: int, pages: int, nbytes: int = 100, stride: int = 100) -> HostPool:
    return HostPool(a_component(nbytes), (Segment(BASE + start, stride, nbytes),), pages, device="elsewhere")


def added(regions: Regions, *pools: HostPool) -> list[tuple[int, int]]:
    missing = regions.missing(pools)
    for pool in pools:
        regions.add(pool, missing)
    return [(start - BASE, end - BASE) for start, end in missing]


def dropped(regions: Regions, pool: HostPool) -> list[tuple[int, int]]:
    return [(start - BASE, end - BASE) for start, end in regions.drop(pool)]


def test_pools_over_the_same_memory_register_it_once():
    regions = Regions()
    first, second = a_pool(0, 10), a_pool(0, 10)
    assert added(regions, first) == [(0, 1000)]
    assert added(regions, second) == []
    assert dropped(regions, first) == []
    assert dropped(regions, second) == [(0, 1000)]


def test_head_groups_of_one_pool_register_one_range():
    """Shifted against each other: each covers nearly all of the memory."""
    groups = [a_pool(g * 25, 10, nbytes=25, stride=100) for g in range(4)]
    assert added(Regions(), *groups) == [(0, 1000)]


def test_a_late_head_group_registers_only_what_is_not_covered():
    regions = Regions()
    first, late = a_pool(0, 10, nbytes=25), a_pool(75, 10, nbytes=25)
    assert added(regions, first) == [(0, 925)]
    assert added(regions, late) == [(925, 1000)]
    assert regions.straddled(late) is None
    assert dropped(regions, first) == []
    assert dropped(regions, late) == [(0, 925), (925, 1000)]


def test_a_page_across_two_ranges_is_noticed():
    regions = Regions()
    added(regions, a_pool(0, 2))
    late = a_pool(150, 3)
    assert added(regions, late) == [(200, 450)]
    assert regions.straddled(late) == BASE + 200


def test_a_gap_between_ranges_is_filled_from_both_sides():
    regions = Regions()
    added(regions, a_pool(0, 1), a_pool(300, 1))
    assert added(regions, a_pool(0, 5)) == [(100, 300), (400, 500)]


def test_dropping_an_unknown_pool_drops_nothing():
    regions = Regions()
    added(regions, a_pool(0, 1))
    assert dropped(regions, a_pool(0, 1)) == []


def test_touching_pools_stay_apart():
    """Their memory may be given back apart."""
    regions = Regions()
    first, second = a_pool(0, 1), a_pool(100, 1)
    assert added(regions, first) == [(0, 100)]
    assert added(regions, second) == [(100, 200)]
    assert dropped(regions, first) == [(0, 100)]
