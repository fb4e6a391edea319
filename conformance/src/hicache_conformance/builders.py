"""What tests arrange with: page contents, layouts, and an Arena that notices every changed byte.

A test names keys; a page's bytes follow from its key, its version and the seed,
so that any process can make and verify them without being told.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from hicache_core import Component, HostPool, Pages, Segment

#: Canary bytes before, between and after planes of slots; more than a cache line.
GUARD_NBYTES = 96


def page_bytes(key: str, nbytes: int, version: int = 0, seed: int = 0) -> bytes:
    """Give the bytes of one version of a key's page."""
    return hashlib.shake_128(f"{seed}/{version}/{key}".encode()).digest(nbytes)


def page_hash(label: str, seed: int = 0) -> str:
    """Give a well-formed page hash, as engines make them: 64 hex digits."""
    return hashlib.sha256(f"{seed}/{label}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Layout:
    """How a page is cut into segments, and how far apart two pages' segments lie."""

    name: str
    cut: Callable[[int], list[int]]
    """Page size -> sizes of its segments in storage order."""
    spread: float = 1.0
    """Stride over segment size: above 1 for a head group or a layer range of a page."""

    def __str__(self) -> str:
        return self.name


def _equal(parts: int) -> Callable[[int], list[int]]:
    return lambda nbytes: [nbytes * (i + 1) // parts - nbytes * i // parts for i in range(parts)]


def _shares(*shares: int) -> Callable[[int], list[int]]:
    def cut(nbytes: int) -> list[int]:
        bounds = [nbytes * sum(shares[:i]) // sum(shares) for i in range(len(shares) + 1)]
        return [high - low for low, high in itertools.pairwise(bounds)]

    return cut


#: The engine layouts of the contract, with 8 layers where layers count.
LAYOUTS: tuple[Layout, ...] = (
    Layout("mha_page_first", _equal(2)),
    Layout("mha_asymmetric", _shares(2, 1)),
    Layout("mla_page_first", _equal(1)),
    Layout("mla_kv_split", _equal(4)),
    Layout("mha_layer_first", _equal(16)),
    Layout("mla_layer_first", _equal(8)),
    Layout("head_group_of_page_head", _equal(2), spread=4.0),
    Layout("layer_range_of_page_first_direct", _equal(2), spread=2.5),
    Layout("mamba_conv_temporal_state", _shares(37, 25, 2)),
    Layout("nvfp4_with_scales", _shares(8, 8, 1, 1)),
)

ONE_SEGMENT = Layout("one_segment", _equal(1))


def in_segments(count: int) -> Layout:
    """Give a layout of this many segments a page."""
    return Layout(f"{count}_segments", _equal(count))


class Arena:
    """A pool in memory of its own, every byte of which is known.

    Slots start as canaries too, so that "untouched" and "overwritten" can be
    told apart everywhere.

    Args:
        component: whose pages; page_nbytes is its.
        num_pages: slots.
        layout: how each is cut.
        shift: bytes by which everything is moved off alignment.
    """

    def __init__(
        self, component: Component, num_pages: int, layout: Layout = ONE_SEGMENT, *, shift: int = 0
    ) -> None:
        self.component = component
        self.nbytes = component.page_nbytes
        self.num_pages = num_pages
        self._sizes = [size for size in layout.cut(self.nbytes) if size]
        self._strides = [int(size * layout.spread) for size in self._sizes]
        self._starts: list[int] = []
        at = GUARD_NBYTES + shift
        for stride in self._strides:
            self._starts.append(at)
            at += stride * num_pages + GUARD_NBYTES
        self.buffer = bytearray(hashlib.shake_128(b"canary").digest(at))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        segments = tuple(
            Segment(base + start, stride, size)
            for start, stride, size in zip(self._starts, self._strides, self._sizes, strict=True)
        )
        self.pool = HostPool(component, segments, num_pages, owner=self.buffer)
        self._frozen = bytes(self.buffer)

    def pages(self, indices: Sequence[int] | None = None) -> Pages:
        """Name slots; all of them in order by default."""
        return self.pool.pages(range(self.num_pages) if indices is None else indices)

    def read(self, index: int) -> bytes:
        """Give a slot's bytes, segments joined in storage order."""
        return b"".join(bytes(self.buffer[start:end]) for start, end in self._spans(index))

    def fill(self, index: int, value: bytes) -> None:
        """Put a page's bytes into a slot."""
        _write(self.buffer, self._spans(index), value)

    def freeze(self) -> None:
        """Remember every byte as it is now; ``check`` compares with this."""
        self._frozen = bytes(self.buffer)

    def check(self, pages: Mapping[int, bytes] | None = None, *, undefined: Collection[int] = ()) -> None:
        """Compare every byte: these slots hold these pages, undefined ones anything, all else is as frozen.

        Raises AssertionError, naming the first byte that differs.
        """
        wanted = bytearray(self._frozen)
        for index, value in (pages or {}).items():
            _write(wanted, self._spans(index), value)
        for index in undefined:
            _write(wanted, self._spans(index), self.read(index))
        if wanted != self.buffer:
            raise AssertionError(self._difference(wanted))

    def _difference(self, wanted: bytearray) -> str:
        at = next(i for i, (was, now) in enumerate(zip(wanted, self.buffer, strict=True)) if was != now)
        count = sum(was != now for was, now in zip(wanted, self.buffer, strict=True))
        where = f"guard byte {at}"
        for index in range(self.num_pages):
            for segment, (start, end) in enumerate(self._spans(index)):
                if start <= at < end:
                    where = f"slot {index}, segment {segment}, byte {at - start}"
        return (
            f"{count} bytes of memory are not as they must be; the first at {where}: "
            f"0x{self.buffer[at]:02x}, wanted 0x{wanted[at]:02x} (before the call 0x{self._frozen[at]:02x})"
        )

    def _spans(self, index: int) -> list[tuple[int, int]]:
        return [
            (start + index * stride, start + index * stride + size)
            for start, stride, size in zip(self._starts, self._strides, self._sizes, strict=True)
        ]


def _write(target: bytearray, spans: Sequence[tuple[int, int]], value: bytes) -> None:
    if sum(end - start for start, end in spans) != len(value):
        raise AssertionError(f"a page of {len(value)} bytes does not fit this slot")
    at = 0
    for start, end in spans:
        target[start:end] = value[at : at + end - start]
        at += end - start
