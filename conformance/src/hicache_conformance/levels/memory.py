"""Level memory: every layout, every size, and no byte outside the slots (C2)."""

from __future__ import annotations

import mmap
import random

import pytest

from hicache_conformance.bench import PAGE_NBYTES, Bench, aligned, loose
from hicache_conformance.builders import LAYOUTS, ONE_SEGMENT, Arena, Layout, in_segments
from hicache_conformance.calls import pause_for
from hicache_core import InvalidArgument, Status

OK, MISS = Status.OK, Status.MISS

ODD_SIZES = [1, 7, 4095, 4097, 65_536 + 1]
#: A batch that a backend may split over helper threads, and how long one of them may lag behind.
BUSY_PAGES, BUSY_NBYTES, LATE_S = 64, 1 << 16, 0.02
SEGMENT_COUNTS = [1, 2, 3, 8, 61, 127, 128]


class MemoryLevel:
    """Cases of level memory."""

    @pytest.mark.clause("C2", "C3")
    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_c2_layout_round_trip_touches_only_its_slots(self, bench: Bench, layout: Layout) -> None:
        _round_trip(bench, layout, layout, PAGE_NBYTES)

    @pytest.mark.clause("C2", "C3")
    @pytest.mark.parametrize("count", SEGMENT_COUNTS, ids=lambda n: f"{n}_segments")
    def test_c2_any_number_of_segments(self, bench: Bench, count: int) -> None:
        _round_trip(bench, in_segments(count), in_segments(count), PAGE_NBYTES + count)

    @pytest.mark.clause("C2", "C5")
    @pytest.mark.parametrize("nbytes", ODD_SIZES, ids=lambda n: f"{n}_bytes")
    @pytest.mark.parametrize("parts", [1, 3], ids=["one_segment", "three_segments"])
    def test_c2_odd_sizes_off_alignment(self, bench: Bench, nbytes: int, parts: int) -> None:
        layout = in_segments(parts)
        _round_trip(bench, layout, layout, nbytes, shift=1 + nbytes % 3)

    @pytest.mark.clause("C2", "C3")
    @pytest.mark.parametrize("reader", LAYOUTS, ids=str)
    def test_c2_pages_set_in_one_segment_are_got_through_any_layout(
        self, bench: Bench, reader: Layout
    ) -> None:
        _round_trip(bench, ONE_SEGMENT, reader, PAGE_NBYTES)

    @pytest.mark.clause("C2", "C3")
    @pytest.mark.parametrize("writer", LAYOUTS, ids=str)
    def test_c3_pages_set_through_any_layout_are_got_in_one_segment(
        self, bench: Bench, writer: Layout
    ) -> None:
        _round_trip(bench, writer, ONE_SEGMENT, PAGE_NBYTES)

    @pytest.mark.clause("C2")
    @pytest.mark.parametrize("count", [16, 128])
    def test_c2_a_whole_batch_of_pages_in_many_segments(self, bench: Bench, count: int) -> None:
        layout = in_segments(count)
        _segments_fit(bench, layout, PAGE_NBYTES)
        pages = min(128, bench.capabilities.max_batch or 128)
        writer, reader = bench.arena(pages, layout=layout), bench.arena(pages + 1, layout=layout)
        storage, keys = bench.open(writer, reader), bench.keys(pages)
        for index, key in enumerate(keys):
            writer.fill(index, bench.page(key))
        assert aligned(storage.batch_set(keys, writer.pages()), pages) == [OK] * pages
        assert aligned(storage.batch_get(keys, reader.pages(range(1, pages + 1))), pages) == [OK] * pages
        reader.check({index + 1: bench.page(key) for index, key in enumerate(keys)})

    @pytest.mark.clause("C2")
    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_c2_misses_between_hits_touch_no_other_segment(self, bench: Bench, layout: Layout) -> None:
        _segments_fit(bench, layout, PAGE_NBYTES)
        arena = bench.arena(9, layout=layout)
        storage, keys = bench.open(arena), bench.keys(6)
        bench.stored(storage, keys[::2])
        slots = [7, 1, 4, 0, 8, 3]
        wanted = [OK, MISS] * 3
        assert aligned(storage.batch_get(keys, arena.pages(slots)), 6) == wanted
        arena.check({slots[i]: bench.page(keys[i]) for i in (0, 2, 4)}, undefined=[1, 0, 3])

    @pytest.mark.clause("C2", "C3")
    @pytest.mark.parametrize("nbytes", [1, PAGE_NBYTES, 4097], ids=lambda n: f"{n}_bytes")
    def test_c2_loose_buffers_need_no_pool(self, bench: Bench, nbytes: int) -> None:
        _takes_loose(bench)
        component, storage = bench.component(nbytes), bench.open()
        keys = bench.keys(4, component)
        sources = [bench.page(key, nbytes) for key in keys]
        assert aligned(storage.batch_set(keys, loose(sources, component)), 4) == [OK] * 4
        whole = [bytearray(b"\xa5" * (nbytes + 32)) for _ in keys]
        slots = loose([memoryview(buffer)[15 : 15 + nbytes] for buffer in whole], component)
        assert aligned(storage.batch_get(keys, slots), 4) == [OK] * 4
        guard = b"\xa5"
        assert [bytes(buffer) for buffer in whole] == [guard * 15 + page + guard * 17 for page in sources]

    @pytest.mark.clause("C2")
    def test_c2_loose_and_pooled_pages_are_the_same_pages(self, bench: Bench) -> None:
        _takes_loose(bench)
        arena = bench.arena(3)
        storage, keys = bench.open(arena), bench.keys(2)
        bench.stored(storage, keys[:1])
        buffers = [mmap.mmap(-1, PAGE_NBYTES), mmap.mmap(-1, PAGE_NBYTES)]
        buffers[1][:] = bench.page(keys[1])
        both = loose(buffers, bench.component())
        assert aligned(storage.batch_get(keys[:1], both[:1]), 1) == [OK]
        assert aligned(storage.batch_set(keys[1:], both[1:]), 1) == [OK]
        assert aligned(storage.batch_get(keys, arena.pages([2, 0])), 2) == [OK, OK]
        arena.check({2: bench.page(keys[0]), 0: bench.page(keys[1])})
        assert [bytes(buffer) for buffer in buffers] == [bench.page(key) for key in keys]

    @pytest.mark.clause("C2", "C3")
    @pytest.mark.parametrize("nbytes", [1 << 20, (4 << 20) + 1], ids=["1_mib", "4_mib_and_1_byte"])
    def test_c2_large_pages(self, bench: Bench, nbytes: int) -> None:
        _round_trip(bench, in_segments(2), in_segments(2), nbytes, count=3)

    @pytest.mark.clause("C11", "C2")
    def test_c11_a_get_that_has_returned_writes_no_more(self, bench: Bench) -> None:
        count = min(BUSY_PAGES, bench.capabilities.max_batch or BUSY_PAGES)
        arena = bench.arena(count, BUSY_NBYTES, in_segments(2))
        storage, keys = bench.open(arena), bench.keys(count, arena.component)
        bench.stored(storage, keys, BUSY_NBYTES)
        for _ in range(5):
            assert aligned(storage.batch_get(keys, arena.pages()), count) == [OK] * count
            arena.check({index: bench.page(key, BUSY_NBYTES) for index, key in enumerate(keys)})
            for index in range(count):
                arena.fill(index, bytes(BUSY_NBYTES))
            arena.freeze()
            pause_for(LATE_S)
            arena.check()

    @pytest.mark.clause("C11", "C3")
    def test_c11_a_set_that_has_returned_reads_no_more(self, bench: Bench) -> None:
        count = min(BUSY_PAGES, bench.capabilities.max_batch or BUSY_PAGES)
        arena = bench.arena(count, BUSY_NBYTES, in_segments(2))
        storage = bench.open(arena)
        for round_ in range(5):
            keys = bench.keys(count, arena.component, f"round-{round_}")
            for index, key in enumerate(keys):
                arena.fill(index, bench.page(key, BUSY_NBYTES))
            assert aligned(storage.batch_set(keys, arena.pages()), count) == [OK] * count
            for index in range(count):
                arena.fill(index, bytes(BUSY_NBYTES))
            pause_for(LATE_S)
            assert bench.versions(storage, keys, BUSY_NBYTES, known=1) == [0] * count

    @pytest.mark.clause("C2")
    def test_c2_one_slot_may_be_the_source_of_several_keys(self, bench: Bench) -> None:
        arena = bench.arena(2)
        storage, keys = bench.open(arena), bench.keys(3)
        source = arena.read(1)
        assert aligned(storage.batch_set(keys, arena.pages([1, 1, 1])), 3) == [OK] * 3
        assert bench.get(storage, keys) == [(OK, source)] * 3
        arena.check()

    @pytest.mark.clause("C2")
    def test_c2_pages_of_several_pools_in_turn(self, bench: Bench) -> None:
        kv, state = bench.arena(4), Arena(bench.component(1000, "mamba"), 4, in_segments(3))
        storage = bench.open(kv, state)
        kv_keys, state_keys = bench.keys(4), bench.keys(4, state.component)
        for index in range(4):
            kv.fill(index, bench.page(kv_keys[index]))
            state.fill(index, bench.page(state_keys[index], 1000))
        assert aligned(storage.batch_set(kv_keys, kv.pages()), 4) == [OK] * 4
        assert aligned(storage.batch_set(state_keys, state.pages()), 4) == [OK] * 4
        assert bench.get(storage, kv_keys) == [(OK, bench.page(key)) for key in kv_keys]
        other = Arena(state.component, 4, in_segments(2))
        storage.add_pool(other.pool)
        assert aligned(storage.batch_get(state_keys, other.pages([3, 2, 1, 0])), 4) == [OK] * 4
        other.check({3 - index: bench.page(key, 1000) for index, key in enumerate(state_keys)})


def _round_trip(
    bench: Bench, writing: Layout, reading: Layout, nbytes: int, *, shift: int = 0, count: int = 5
) -> None:
    """Set pages through one layout, get them through another into shuffled slots, compare every byte."""
    limit = bench.capabilities.max_page_nbytes
    if limit is not None and nbytes > limit:
        pytest.skip(f"unsupported: pages above {limit} bytes")
    for layout in (writing, reading):
        _segments_fit(bench, layout, nbytes)
    writer = bench.arena(count, nbytes, writing, shift=shift)
    reader = bench.arena(count + 2, nbytes, reading, shift=shift)
    storage, keys = bench.open(writer, reader), bench.keys(count, writer.component)
    for index, key in enumerate(keys):
        writer.fill(index, bench.page(key, nbytes))
    writer.freeze()
    assert aligned(storage.batch_set(keys, writer.pages()), count) == [OK] * count
    writer.check()
    slots = random.Random(bench.seed).sample(range(count + 2), count)
    assert aligned(storage.batch_get(keys, reader.pages(slots)), count) == [OK] * count
    reader.check({slot: bench.page(key, nbytes) for slot, key in zip(slots, keys, strict=True)})


def _segments_fit(bench: Bench, layout: Layout, nbytes: int) -> None:
    limit, needed = bench.capabilities.max_segments, len([n for n in layout.cut(nbytes) if n])
    if limit is not None and needed > limit:
        pytest.skip(f"unsupported: {needed} segments a page, which HiCache bounces above {limit}")


def _takes_loose(bench: Bench) -> None:
    if bench.capabilities.needs_registered:
        component = bench.component()
        with pytest.raises(InvalidArgument):
            bench.open().batch_set(bench.keys(1), loose([bytearray(component.page_nbytes)], component))
        pytest.skip(
            "unsupported: loose buffers, which HiCache bounces for a backend that needs registered memory"
        )
