"""Tensors of the generic calls as slots: the memory itself, kept as long as anybody may touch it."""

# ruff: noqa: E402 - without torch there is nothing to import
from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from hicache_core import Component, Status

KV = Component("kv", shard="whole", byte_order="page_first", format="u8", page_nbytes=64)


def a_page(value: int) -> object:
    return torch.full((32,), value, dtype=torch.bfloat16)


@pytest.fixture
def moved(sglang):
    """Moves tensors through a verb that writes each page's number; gives the answers and the pages."""
    from hicache_sglang.pools import move_loose

    seen = []

    def move(tensors):
        def verb(hashes, pages):
            seen.append(pages)
            for i in range(len(pages)):
                (view,) = pages.views(i)
                view[:] = bytes([len(hashes) + i]) * 64
            return [Status.OK] * len(hashes)

        return move_loose(verb, KV, [f"{i}" for i in range(len(tensors))], tensors), seen.pop()

    return move


def written(tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def test_slots_are_the_tensors_own_memory_in_any_order_of_addresses(moved):
    tensors = sorted((a_page(i) for i in range(5)), key=lambda each: -each.data_ptr())
    good, _ = moved(tensors)
    assert good == [True] * 5
    assert [written(each) for each in tensors] == [bytes([5 + i]) * 64 for i in range(5)]


def test_a_tensor_lives_as_long_as_a_slot_of_its_call(moved):
    tensors = [a_page(i) for i in range(3)]
    alive = weakref.ref(tensors[1])
    _, pages = moved(tensors)
    (slot,) = pages.views(1)
    del tensors, pages
    gc.collect()
    assert alive() is not None
    assert bytes(slot) == bytes([4]) * 64
    del slot
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "odd",
    [torch.zeros(64, dtype=torch.uint8)[::2], torch.zeros(5), torch.zeros(64, device="meta"), None],
    ids=["not contiguous", "another size", "not on the cpu", "none"],
)
def test_an_odd_one_among_them_costs_no_other_its_page(moved, odd):
    tensors = [a_page(0), odd, a_page(2)]
    good, _ = moved(tensors)
    assert good == [True, False, True]
    assert [written(each) for each in (tensors[0], tensors[2])] == [bytes([2]) * 64, bytes([3]) * 64]


def test_a_buffer_that_is_no_tensor_is_a_slot_as_well(moved):
    tensors = [bytearray(64), a_page(1)]
    good, _ = moved(tensors)
    assert good == [True, True]
    assert tensors[0] == bytes([2]) * 64
