"""Builders: components, pools over memory whose every byte is known, and tensors without torch."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from hicache_core.buffers import address_of
from hicache_core.identity import Component
from hicache_core.memory import HostPool, Pages

CANARY = 0xA5


def a_component(nbytes: int, name: str = "kv", **changes: object) -> Component:
    fields: dict[str, object] = {
        "shard": "whole",
        "byte_order": "page_first",
        "format": "bf16",
        "page_nbytes": nbytes,
    }
    return Component(name, **(fields | changes))  # type: ignore[arg-type]


def noise(seed: int, nbytes: int) -> bytes:
    """Give bytes that no other seed gives, nor the same seed at another place."""
    return random.Random(seed).randbytes(nbytes)


class Memory:
    """A buffer with a known address, every byte of it known, to tell what was written and what was not."""

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        self.buffer = bytearray(noise(seed, nbytes))
        self.address = address_of(memoryview(self.buffer)) if nbytes else 0

    def at(self, address: int, nbytes: int) -> bytes:
        start = address - self.address
        assert start >= 0
        assert start + nbytes <= len(self.buffer)
        return bytes(self.buffer[start : start + nbytes])


class FakeTensor:
    """The little of a torch tensor that HostPool.from_tensor asks for, over a Memory."""

    def __init__(
        self, memory: Memory, shape: Sequence[int], itemsize: int, offset: int = 0, device: str = "cpu"
    ) -> None:
        self.memory = memory
        self.shape = tuple(shape)
        self.itemsize = itemsize
        self.offset = offset
        self.device = device
        self.contiguous = True

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    def data_ptr(self) -> int:
        return self.memory.address + self.offset

    def element_size(self) -> int:
        return self.itemsize

    def is_contiguous(self) -> bool:
        return self.contiguous

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: int) -> FakeTensor:
        if not 0 <= at < self.shape[0]:
            raise IndexError(at)
        step = prod(self.shape[1:]) * self.itemsize
        return FakeTensor(self.memory, self.shape[1:], self.itemsize, self.offset + at * step, self.device)

    def __iter__(self) -> Iterator[FakeTensor]:
        return (self[at] for at in range(self.shape[0]))


#: Layout -> the axes of one half. L layers, S tokens of the pool, P pages, T tokens a page, H heads, D dim.
AXES = {
    "layer_first": "LSHD",
    "page_first": "SLHD",
    "page_first_direct": "PLTHD",
    "page_head": "PHTLD",
}


@dataclass(frozen=True)
class Geometry:
    """An engine's pool in numbers; ``dims`` has the head dim of each half: (K, V), (K,) or MLA's (D,)."""

    layout: str
    layers: int
    pages: int
    page_tokens: int
    heads: int
    dims: tuple[int, ...]
    itemsize: int = 2

    def shape(self, half: int) -> tuple[int, ...]:
        sizes = {
            "L": self.layers,
            "S": self.pages * self.page_tokens,
            "P": self.pages,
            "T": self.page_tokens,
            "H": self.heads,
            "D": self.dims[half],
        }
        return tuple(sizes[axis] for axis in AXES[self.layout])

    @property
    def page_nbytes(self) -> int:
        return self.layers * self.page_tokens * self.heads * sum(self.dims) * self.itemsize

    @property
    def segments(self) -> int:
        return len(self.dims) * (self.layers if self.layout == "layer_first" else 1)

    def halves(self, seed: int = 1) -> list[FakeTensor]:
        """Lay the halves out in one memory, apart from each other so that nothing merges by chance."""
        sizes = [prod(self.shape(half)) * self.itemsize for half in range(len(self.dims))]
        gap = 24
        memory = Memory(gap + sum(size + gap for size in sizes), seed)
        tensors = []
        offset = gap
        for half, size in enumerate(sizes):
            tensors.append(FakeTensor(memory, self.shape(half), self.itemsize, offset))
            offset += size + gap
        return tensors


def model_page(geometry: Geometry, tensors: Sequence[FakeTensor], page: int) -> list[int]:
    """Say by brute force where each byte of a page lies: one address a byte, in storage order.

    Walks over every element of every half, asks of each coordinate whether it
    belongs to the page, and sorts by the order that the design states: K and V
    one after the other, in layer_first alternating layer by layer.
    """
    found: list[tuple[tuple[int, int], int]] = []
    for half, tensor in enumerate(tensors):
        axes = AXES[geometry.layout]
        for flat, at in enumerate(product(*map(range, tensor.shape))):
            place = dict(zip(axes, at, strict=True))
            owner = place["P"] if "P" in place else place["S"] // geometry.page_tokens
            if owner == page:
                part = (place["L"], half) if geometry.layout == "layer_first" else (0, half)
                found.append((part, tensor.data_ptr() + flat * geometry.itemsize))
    found.sort(key=lambda item: item[0])  # stable: memory order inside a part
    return [start + byte for _, start in found for byte in range(geometry.itemsize)]


def read_at(addresses: Sequence[int], sizes: Sequence[int]) -> bytes:
    return b"".join(ctypes.string_at(a, n) for a, n in zip(addresses, sizes, strict=True))


def page_bytes(pages: Pages, position: int) -> bytes:
    return b"".join(bytes(view) for view in pages.views(position))


def fill(pages: Pages, position: int, content: bytes) -> None:
    at = 0
    for view in pages.views(position):
        view[:] = content[at : at + view.nbytes]
        at += view.nbytes


def a_pool(
    pages: int = 8, nbytes: int = 64, fill: int | None = CANARY, component: Component | None = None
) -> HostPool:
    """Make a pool of one-segment pages over a bytearray, every byte a canary."""
    component = component or a_component(nbytes)
    return HostPool.from_buffer(bytearray([fill or 0]) * (pages * component.page_nbytes), component)
