"""Segment, HostPool, Pages: every layout against a model that walks over single elements."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from dataclasses import replace

import pytest
from core_builders import (
    FakeTensor,
    Geometry,
    Memory,
    a_component,
    a_pool,
    model_page,
    noise,
    page_bytes,
    read_at,
)
from core_builders import fill as fill_page
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_core.errors import InvalidPages
from hicache_core.memory import HostPool, Pages, Segment

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

#: Name -> (halves' dims, layouts): what design section 2 lists.
MODELS = {
    "mha": ((8, 8), LAYOUTS),
    "asymmetric mha": ((8, 4), LAYOUTS),
    "k only": ((8,), LAYOUTS),
    "mla": ((20,), ("layer_first", "page_first", "page_first_direct")),
    "kv split": ((8, 4, 2, 6), ("page_first",)),
}
CASES = [
    pytest.param(
        Geometry(layout, layers=3, pages=4, page_tokens=2, heads=1 if name == "mla" else 2, dims=dims),
        id=f"{name} {layout}",
    )
    for name, (dims, layouts) in MODELS.items()
    for layout in layouts
]

geometries = st.builds(
    Geometry,
    layout=st.sampled_from(LAYOUTS),
    layers=st.integers(1, 8),
    pages=st.integers(1, 5),
    page_tokens=st.integers(1, 3),
    heads=st.integers(1, 3),
    dims=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    itemsize=st.sampled_from([1, 2, 4]),
)


def a_tensor_pool(geometry: Geometry) -> tuple[HostPool, list[FakeTensor]]:
    tensors = geometry.halves()
    return HostPool.from_tensor(tensors, a_component(geometry.page_nbytes), geometry.layout), tensors


def expected(tensors: list[FakeTensor], addresses: list[int]) -> bytes:
    return b"".join(tensors[0].memory.at(address, 1) for address in addresses)


# Layouts.


@pytest.mark.parametrize("geometry", CASES)
def test_layout_views_and_addresses_give_each_page_its_elements(geometry: Geometry) -> None:
    pool, tensors = a_tensor_pool(geometry)
    indices = [*range(geometry.pages)][::-1]
    pages = pool.pages(indices)
    wanted = [expected(tensors, model_page(geometry, tensors, page)) for page in indices]
    starts, sizes = pages.addresses()
    assert pool.num_pages == geometry.pages
    assert [page_bytes(pages, position) for position in range(len(pages))] == wanted
    assert read_at(starts, sizes) == b"".join(wanted)
    assert b"".join(map(bytes, pages.buffers())) == b"".join(wanted)


@pytest.mark.parametrize("geometry", CASES)
def test_layout_has_the_segments_that_the_design_lists(geometry: Geometry) -> None:
    pool, _ = a_tensor_pool(geometry)
    assert len(pool.segments) == geometry.segments
    assert pool.pages([0]).segments_per_page == geometry.segments
    assert len(pool.pages([0]).views(0)) == geometry.segments


@pytest.mark.parametrize("geometry", CASES)
def test_layout_writing_a_page_changes_its_elements_and_no_other_byte(geometry: Geometry) -> None:
    pool, tensors = a_tensor_pool(geometry)
    memory = tensors[0].memory
    before = bytearray(memory.buffer)
    content = noise(7, geometry.page_nbytes)
    fill_page(pool.pages([2]), 0, content)
    for address, byte in zip(model_page(geometry, tensors, 2), content, strict=True):
        before[address - memory.address] = byte
    assert memory.buffer == before


@pytest.mark.parametrize("layers", [1, 2, 16, 63, 64])
@pytest.mark.parametrize("dims", [(2,), (2, 2), (3, 2)], ids=["mla", "mha", "asymmetric"])
def test_layer_first_reaches_128_segments(layers: int, dims: tuple[int, ...]) -> None:
    geometry = Geometry("layer_first", layers=layers, pages=3, page_tokens=2, heads=1, dims=dims, itemsize=1)
    pool, tensors = a_tensor_pool(geometry)
    pages = pool.pages([2, 0])
    wanted = [expected(tensors, model_page(geometry, tensors, page)) for page in (2, 0)]
    assert len(pool.segments) == layers * len(dims)
    assert [page_bytes(pages, 0), page_bytes(pages, 1)] == wanted
    assert read_at(*pages.addresses()) == b"".join(wanted)


@settings(max_examples=60, deadline=None)
@given(geometry=geometries, data=st.data())
def test_any_geometry_agrees_with_the_model(geometry: Geometry, data: st.DataObject) -> None:
    pool, tensors = a_tensor_pool(geometry)
    indices = data.draw(st.lists(st.integers(0, geometry.pages - 1), max_size=6))
    start, stop = sorted((data.draw(st.integers(0, len(indices))), data.draw(st.integers(0, len(indices)))))
    pages = pool.pages(indices)
    bytes_of = {page: model_page(geometry, tensors, page) for page in set(indices)}
    wanted = [expected(tensors, bytes_of[page]) for page in indices]
    assert [page_bytes(pages, position) for position in range(len(pages))] == wanted
    assert read_at(*pages.addresses()) == b"".join(wanted)
    assert b"".join(map(bytes, pages.buffers(start, stop))) == b"".join(wanted[start:stop])
    assert b"".join(map(bytes, pages[start:stop].buffers())) == b"".join(wanted[start:stop])
    assert pages[start:stop].addresses() == pool.pages(indices[start:stop]).addresses()
    backwards = [*range(len(indices))][::-1]
    assert b"".join(map(bytes, pages.take(backwards).buffers())) == b"".join(wanted[::-1])


@settings(max_examples=40, deadline=None)
@given(geometry=geometries)
def test_regions_cover_every_page_and_nothing_outside_the_tensors(geometry: Geometry) -> None:
    pool, tensors = a_tensor_pool(geometry)
    covered = {address + byte for address, nbytes in pool.regions() for byte in range(nbytes)}
    assert covered == {tensor.data_ptr() + byte for tensor in tensors for byte in range(tensor.nbytes)}
    assert sorted(pool.regions()) == sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)


def test_stacked_halves_are_the_same_as_halves_given_apart() -> None:
    memory = Memory(2 * 3 * 8 * 2 * 4 * 2)
    stacked = FakeTensor(memory, (2, 3, 8, 2, 4), 2)
    component = a_component(memory.buffer.__len__() // 4)
    pool = HostPool.from_tensor(stacked, component, "layer_first")
    apart = HostPool.from_tensor((stacked[0], stacked[1]), component, "layer_first")
    assert pool.segments == apart.segments
    assert pool.num_pages == apart.num_pages == 4


def test_split_heads_share_the_memory_of_one_page_head_pool() -> None:
    geometry = Geometry("page_head", layers=2, pages=3, page_tokens=2, heads=4, dims=(4, 4))
    whole, tensors = a_tensor_pool(geometry)
    half_page = geometry.page_nbytes // 2
    group = half_page // 2
    pools = [
        HostPool(
            a_component(group * 2),
            tuple(Segment(t.data_ptr() + rank * group, half_page, group) for t in tensors),
            geometry.pages,
            owner=tensors,
        )
        for rank in range(2)
    ]
    k, v = whole.pages([1]).views(0)
    assert page_bytes(pools[0].pages([1]), 0) == bytes(k[:group]) + bytes(v[:group])
    assert page_bytes(pools[1].pages([1]), 0) == bytes(k[group:]) + bytes(v[group:])


def test_layer_range_shares_the_memory_of_one_page_first_direct_pool() -> None:
    geometry = Geometry("page_first_direct", layers=4, pages=3, page_tokens=2, heads=1, dims=(4,))
    whole, (tensor,) = a_tensor_pool(geometry)
    layer = geometry.page_nbytes // 4
    segment = Segment(tensor.data_ptr() + layer, geometry.page_nbytes, 2 * layer)
    part = HostPool(a_component(2 * layer), (segment,), geometry.pages, owner=tensor)
    assert page_bytes(part.pages([2]), 0) == page_bytes(whole.pages([2]), 0)[layer : 3 * layer]
    assert part.regions() == [(segment.address, 2 * geometry.page_nbytes + 2 * layer)]


# Real tensors.


@pytest.mark.parametrize("geometry", CASES)
def test_real_tensors_agree_with_fake_ones(geometry: Geometry) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    fakes = geometry.halves()
    tensors = []
    for half, fake in enumerate(fakes):
        content = bytearray(fake.memory.at(fake.data_ptr(), fake.nbytes))
        tensors.append(torch.frombuffer(content, dtype=torch.bfloat16).reshape(geometry.shape(half)))
    pool = HostPool.from_tensor(tensors, a_component(geometry.page_nbytes), geometry.layout)
    pages = pool.pages(torch.tensor([3, 1]))
    wanted = [expected(fakes, model_page(geometry, fakes, page)) for page in (3, 1)]
    assert pool.device == "cpu"
    assert [page_bytes(pages, 0), page_bytes(pages, 1)] == wanted


def test_a_strided_tensor_is_refused_by_its_shape() -> None:
    tensor = FakeTensor(Memory(64), (2, 4, 2, 2), 2)
    tensor.contiguous = False
    with pytest.raises(InvalidPages) as caught:
        HostPool.from_tensor(tensor, a_component(32), "layer_first")
    assert str(caught.value) == (
        "a tensor does not have the layout 'layer_first': shape (2, 4, 2, 2), contiguous: False. "
        "Pass contiguous tensors of 4 axes, or 5 with K and V stacked first."
    )


def test_an_unknown_layout_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidPages) as caught:
        HostPool.from_tensor(FakeTensor(Memory(16), (1, 2, 2, 2), 2), a_component(16), "pagefirst")
    assert str(caught.value) == (
        "unknown layout: 'pagefirst'. Use one of: layer_first, page_first, page_first_direct, page_head."
    )


@pytest.mark.parametrize(
    ("layout", "shape", "page_nbytes"),
    [
        ("page_first", (6, 1, 1, 4), 32),
        ("page_first", (6, 1, 1, 4), 10),
        ("page_first_direct", (6, 1, 1, 1, 4), 16),
        ("layer_first", (2, 6, 1, 4), 64),
        ("page_head", (0, 1, 1, 1, 4), 8),
    ],
    ids=["tokens left over", "bytes left over", "half a page", "too large", "no page"],
)
def test_a_tensor_that_is_not_whole_pages_is_refused(
    layout: str, shape: tuple[int, ...], page_nbytes: int
) -> None:
    with pytest.raises(InvalidPages) as caught:
        HostPool.from_tensor(FakeTensor(Memory(256), shape, 2), a_component(page_nbytes), layout)
    assert caught.value.what == f"a tensor of layout '{layout}' is not a whole number of pages"


def test_halves_of_different_lengths_are_refused() -> None:
    memory = Memory(4096)
    k, v = FakeTensor(memory, (8, 1, 1, 4), 2), FakeTensor(memory, (16, 1, 1, 4), 2, 1024)
    with pytest.raises(InvalidPages) as caught:
        HostPool.from_tensor((k, v), a_component(48), "page_first")
    assert caught.value.what == "the tensors of a pool do not have the same pages"


def test_halves_on_different_devices_are_refused() -> None:
    memory = Memory(4096)
    k = FakeTensor(memory, (8, 1, 1, 4), 2)
    v = FakeTensor(memory, (8, 1, 1, 4), 2, 1024, device="cuda:0")
    with pytest.raises(InvalidPages) as caught:
        HostPool.from_tensor((k, v), a_component(32), "page_first")
    assert caught.value.what == "the tensors of a pool do not have the same pages"


def test_no_tensor_is_refused() -> None:
    with pytest.raises(InvalidPages, match=r"^no tensor was given\."):
        HostPool.from_tensor([], a_component(8), "page_first")


def test_device_memory_has_addresses_and_no_views() -> None:
    tensor = FakeTensor(Memory(64), (4, 2, 1, 4), 2, device="cuda:0")
    pages = HostPool.from_tensor(tensor, a_component(32), "page_first").pages([1])
    assert pages.addresses() == ([tensor.data_ptr() + 32], [32])
    with pytest.raises(InvalidPages) as caught:
        pages.buffers()
    assert str(caught.value) == (
        "memory on 'cuda:0' cannot be viewed. Use addresses(), or give the backend pages of host memory."
    )
    with pytest.raises(InvalidPages):
        pages.views(0)


# Segments.


@settings(max_examples=80, deadline=None)
@given(
    chunks=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=16),
    pages=st.integers(1, 4),
    slack=st.integers(0, 3),
    order=st.randoms(use_true_random=False),
    shuffled=st.booleans(),
)
def test_merged_segments_give_the_same_bytes_with_no_neighbours_left(
    chunks: list[tuple[int, int]], pages: int, slack: int, order: object, shuffled: bool
) -> None:
    stride = sum(size + gap for size, gap in chunks) + slack
    memory = Memory(stride * pages)
    segments = []
    at = memory.address
    for size, gap in chunks:
        segments.append(Segment(at, stride, size))
        at += size + gap
    if shuffled:
        order.shuffle(segments)  # type: ignore[attr-defined]
    pool = HostPool(a_component(sum(s.nbytes for s in segments)), tuple(segments), pages, owner=memory)
    for page in range(pages):
        wanted = b"".join(memory.at(s.address + page * s.stride, s.nbytes) for s in segments)
        assert page_bytes(pool.pages([page]), 0) == wanted
    pairs = zip(pool.segments, pool.segments[1:], strict=False)
    assert all(a.address + a.nbytes != b.address for a, b in pairs)


def test_neighbours_of_different_strides_are_not_merged() -> None:
    memory = Memory(64)
    segments = (Segment(memory.address, 16, 4), Segment(memory.address + 4, 20, 4))
    pool = HostPool(a_component(8), segments, 2, owner=memory)
    assert pool.segments == segments
    assert page_bytes(pool.pages([1]), 0) == memory.at(memory.address + 16, 4) + memory.at(
        memory.address + 24, 4
    )


@pytest.mark.parametrize(
    ("segments", "pages", "value"),
    [
        ([(0, 16, 4)], 2, "segments sum to 4 bytes, the component has 8 a page"),
        ([], 2, "segments sum to 0 bytes, the component has 8 a page"),
        ([(0, 16, 12)], 2, "segments sum to 12 bytes, the component has 8 a page"),
    ],
    ids=["too small", "none", "too large"],
)
def test_segments_that_do_not_sum_to_the_page_are_refused(
    segments: list[tuple[int, int, int]], pages: int, value: str
) -> None:
    made = tuple(Segment(4096 + address, stride, nbytes) for address, stride, nbytes in segments)
    with pytest.raises(InvalidPages) as caught:
        HostPool(a_component(8), made, pages)
    assert caught.value.what == "the pool of component 'kv' is not well formed"
    assert caught.value.value == value


@pytest.mark.parametrize(
    ("segments", "pages"),
    [
        ([Segment(4096, 16, 8)], -1),
        ([Segment(0, 16, 8)], 1),
        ([Segment(4096, 16, 8), Segment(8192, 16, 0)], 1),
        ([Segment(4096, 16, 10), Segment(4106, 16, -2)], 1),
        ([Segment(4096, -16, 8)], 2),
        ([Segment(4096, 7, 8)], 2),
    ],
    ids=[
        "negative count",
        "null",
        "empty segment",
        "negative segment",
        "negative stride",
        "stride too small",
    ],
)
def test_malformed_segments_are_refused(segments: list[Segment], pages: int) -> None:
    with pytest.raises(InvalidPages) as caught:
        HostPool(a_component(8), tuple(segments), pages)
    assert caught.value.what == "the pool of component 'kv' is not well formed"


@pytest.mark.parametrize(
    "segments",
    [
        [Segment(4096, 8, 4), Segment(4098, 8, 4)],
        [Segment(4096, 8, 4), Segment(4096, 8, 4)],
        [Segment(4096, 4, 4), Segment(4104, 4, 4)],
        [Segment(4096, 8, 4), Segment(4100, 12, 4)],
        [Segment(4096, 100, 4), Segment(4194, 100, 4)],
    ],
    ids=["inside a page", "twice the same", "across pages", "of two strides", "around the end of a page"],
)
def test_segments_that_overlap_are_refused(segments: list[Segment]) -> None:
    with pytest.raises(InvalidPages) as caught:
        HostPool(a_component(8), tuple(segments), 4)
    assert caught.value.what == "the pool of component 'kv' is not well formed"
    assert caught.value.remedy == "Pages must not overlap."


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(1, 6)), min_size=1, max_size=4
    ),
    pages=st.integers(1, 4),
)
def test_overlap_is_refused_exactly_where_two_pages_share_a_byte(
    parts: list[tuple[int, int, int]], pages: int
) -> None:
    segments = tuple(Segment(4096 + start, stride, nbytes) for start, stride, nbytes in parts)
    touched = [
        s.address + page * s.stride + byte
        for page in range(pages)
        for s in segments
        for byte in range(s.nbytes)
    ]
    try:
        HostPool(a_component(sum(s.nbytes for s in segments)), segments, pages, device="cuda:0")
        refused = False
    except InvalidPages:
        refused = True
    assert refused == (len(set(touched)) != len(touched))


def test_a_pool_without_pages_or_bytes_is_empty() -> None:
    none = HostPool(a_component(8), (Segment(4096, 8, 8),), 0)
    anchor = HostPool(a_component(0), (), 4)
    assert none.regions() == []
    assert none.pages([]).buffers() == []
    assert anchor.regions() == []
    assert anchor.pages([1, 2]).buffers() == []
    assert anchor.pages([1, 2]).addresses() == ([], [])
    assert anchor.pages([1, 2]).views(1) == []


# Buffers.


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(64),
        lambda: mmap.mmap(-1, 64),
        lambda: array.array("f", [0.0] * 16),
        lambda: (ctypes.c_ubyte * 64)(),
        lambda: memoryview(bytearray(80))[8:72],
        lambda: memoryview(bytearray(64)).cast("B", (4, 16)),
    ],
    ids=["bytearray", "mmap", "array of floats", "ctypes", "slice", "two axes"],
)
def test_any_writable_buffer_makes_a_pool(make) -> None:  # type: ignore[no-untyped-def]
    buffer = make()
    pool = HostPool.from_buffer(buffer, a_component(16))
    fill_page(pool.pages([2]), 0, b"x" * 16)
    flat = bytes(memoryview(buffer).cast("B")) if not isinstance(buffer, memoryview) else buffer.tobytes()
    assert pool.num_pages == 4
    assert flat == bytes(32) + b"x" * 16 + bytes(16)
    assert pool.regions() == [(pool.pages([0]).addresses()[0][0], 64)]


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (
            bytes(32),
            "a pool needs writable memory: bytes is read-only. Use a bytearray, mmap or array.",
        ),
        (
            bytearray(40),
            "a buffer is not a whole number of pages of component 'kv': 40 bytes, 16 bytes a page. "
            "Pass a slice whose size is a multiple of the page's.",
        ),
        (
            memoryview(bytearray(64))[::2],
            "memory does not offer one contiguous buffer: memoryview: "
            "memoryview: casts are restricted to C-contiguous views. "
            "Pass a C-contiguous bytes-like object; for a tensor use HostPool.from_tensor.",
        ),
        (
            "text",
            "memory does not offer one contiguous buffer: str: "
            "memoryview: a bytes-like object is required, not 'str'. "
            "Pass a C-contiguous bytes-like object; for a tensor use HostPool.from_tensor.",
        ),
    ],
    ids=["read-only", "not whole pages", "strided", "no buffer"],
)
def test_an_unfit_buffer_is_refused(buffer: object, message: str) -> None:
    with pytest.raises(InvalidPages) as caught:
        HostPool.from_buffer(buffer, a_component(16))
    assert str(caught.value) == message


def test_a_logical_anchor_has_no_buffer() -> None:
    with pytest.raises(InvalidPages, match=r"^a buffer is not a whole number of pages of component 'kv'"):
        HostPool.from_buffer(bytearray(16), a_component(0))


def test_the_buffer_stays_pinned_while_the_pool_lives() -> None:
    buffer = bytearray(64)
    pool = HostPool.from_buffer(buffer, a_component(16))
    with pytest.raises(BufferError):
        buffer.extend(b"x" * 4096)
    assert pool.num_pages == 4


def test_a_view_keeps_the_memory_alive_without_the_pool() -> None:
    class Owner(Memory):
        pass

    owner = Owner(64)
    watch = weakref.ref(owner)
    pool = HostPool(a_component(16), (Segment(owner.address, 16, 16),), 4, owner=owner)
    (view,) = pool.pages([1]).views(0)
    wanted = owner.at(owner.address + 16, 16)
    del pool, owner
    gc.collect()
    assert watch() is not None
    assert bytes(view) == wanted


# Indices.


@pytest.mark.parametrize(
    ("indices", "value"),
    [
        ([0, 8], "[8] of 8 pages"),
        ([-1], "[-1] of 8 pages"),
        ([9, 0, -3, 1 << 70], f"[9, -3, {1 << 70}] of 8 pages"),
        (range(100, 110), "[100, 101, 102, 103, 104, 105, 106, 107] ... of 8 pages"),
    ],
)
def test_indices_outside_the_pool_are_named(indices: list[int], value: str) -> None:
    with pytest.raises(InvalidPages) as caught:
        a_pool(pages=8).pages(indices)
    assert str(caught.value) == (
        f"pages outside the pool of component 'kv': {value}. Use indices from 0 to num_pages - 1."
    )


@pytest.mark.parametrize("indices", [None, 3, [1.0], ["1"], "1", [None]])
def test_indices_that_are_no_integers_are_refused(indices: object) -> None:
    with pytest.raises(InvalidPages) as caught:
        a_pool(pages=8).pages(indices)  # type: ignore[arg-type]
    assert caught.value.what == "page indices are not integers"


def test_any_iterable_of_integers_names_pages() -> None:
    assert a_pool(pages=8).pages(i for i in (3, 1)).indices == [3, 1]


# Pages.


@pytest.mark.parametrize("loose", [False, True], ids=["pool", "loose"])
@pytest.mark.parametrize("position", [2, 3, -3])
def test_a_position_outside_the_batch_is_an_error_not_an_empty_page(position: int, loose: bool) -> None:
    pages = Pages.of_buffers([bytearray(64)] * 2, a_component(64)) if loose else a_pool(pages=8).pages([5, 6])
    with pytest.raises(IndexError):
        pages.views(position)


@pytest.mark.parametrize("loose", [False, True], ids=["pool", "loose"])
def test_pages_are_sliced_never_indexed(loose: bool) -> None:
    pages = Pages.of_buffers([bytearray(64)] * 2, a_component(64)) if loose else a_pool(pages=8).pages([5, 6])
    with pytest.raises(TypeError):
        pages[0]  # type: ignore[index]
    with pytest.raises(TypeError):
        list(pages)  # type: ignore[call-overload]


@pytest.mark.parametrize("indices", [[], [5], [2, 3, 4], [4, 3, 2], [0, 2, 4], [3, 3], [1, 2, 2, 3]])
def test_addresses_follow_the_indices_whatever_their_order(indices: list[int]) -> None:
    pool = HostPool(a_component(16), (Segment(1 << 20, 64, 16),), 6, device="elsewhere")
    pages = pool.pages(indices)
    wanted = ([(1 << 20) + 64 * i for i in indices], [16] * len(indices))
    assert (pages.addresses(), pages.addresses()) == (wanted, wanted)


def test_the_only_page_of_a_pool_needs_no_stride() -> None:
    pool = HostPool(a_component(16), (Segment(1 << 20, 0, 16),), 1, device="elsewhere")
    assert pool.pages([0]).addresses() == ([1 << 20], [16])


def test_a_pool_is_compared_by_identity() -> None:
    component = a_component(64)
    a, b = a_pool(component=component), a_pool(component=component)
    assert a != b
    assert len({a, b, a}) == 2


# Loose buffers.


def test_loose_buffers_are_slots_of_their_own() -> None:
    slots = [bytearray(noise(seed, 16)) for seed in range(3)]
    pages = Pages.of_buffers(slots, a_component(16))
    addresses, sizes = pages.addresses()
    assert (len(pages), pages.pool, pages.nbytes, pages.readonly) == (3, None, 16, False)
    assert read_at(addresses, sizes) == b"".join(slots)
    assert [bytes(view) for view in pages.buffers(1)] == [bytes(slots[1]), bytes(slots[2])]
    assert [page_bytes(pages.take([2, 0]), at) for at in (0, 1)] == [bytes(slots[2]), bytes(slots[0])]
    assert page_bytes(pages[1:2], 0) == bytes(slots[1])
    fill_page(pages, 1, b"y" * 16)
    assert slots == [bytearray(noise(0, 16)), bytearray(b"y" * 16), bytearray(noise(2, 16))]


def test_read_only_loose_buffers_are_marked_and_have_addresses() -> None:
    slot = noise(1, 16)
    pages = Pages.of_buffers([bytearray(16), slot], a_component(16))
    assert pages.readonly
    assert read_at(*pages.addresses()) == bytes(16) + slot
    assert not pages[:1].readonly


def test_loose_buffers_of_another_size_are_refused_together() -> None:
    with pytest.raises(InvalidPages) as caught:
        Pages.of_buffers([bytearray(16), bytearray(15), bytearray(17)], a_component(16))
    assert str(caught.value) == (
        "loose buffers do not have the page size of component 'kv': [15, 17] bytes, 16 bytes a page. "
        "Pass buffers of exactly one page each."
    )


def test_changing_a_component_needs_a_pool_of_its_own() -> None:
    pool = a_pool(pages=2, nbytes=16)
    other = replace(pool.component, format="fp8")
    assert HostPool(other, pool.segments, 2, owner=pool).component.key != pool.component.key
