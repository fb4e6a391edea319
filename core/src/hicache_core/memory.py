"""Where pages lie in memory: Segment, HostPool and Pages.

A page is the unit of transfer: in memory one or more segments, in storage one
value, its segments' bytes in order. An engine's host pool repeats the same
segments for every page at a fixed stride, so a pool is described by a handful
of numbers, whatever its layout, and a page's slices follow from its index.

Nothing here copies page bytes or knows an engine; buffers.py looks at the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from hicache_core.buffers import address_of, flat_view, view_at
from hicache_core.errors import InvalidPages
from hicache_core.layouts import halves_of, parts_of

if TYPE_CHECKING:
    from hicache_core.identity import Component


@dataclass(frozen=True, slots=True)
class Segment:
    """One contiguous part of every page: page i's lies at ``address + i * stride``."""

    address: int
    stride: int
    nbytes: int


class _Window(NamedTuple):
    """What a pool's views are cut from; without places where there is nothing to view."""

    base: memoryview
    """One view over all the segments of all the pages."""
    places: tuple[tuple[int, int, int], ...]
    """For each segment its first byte and its end within the base, in page 0, and its stride."""
    stride: int | None
    """The stride of all the segments, where it is one and the same."""


@dataclass(frozen=True, slots=True, eq=False)
class HostPool:
    """The pages of one component in one piece of (usually host) memory; compared by identity.

    Neighbouring segments are merged when the pool is made, so
    ``len(pool.segments)`` is what a backend's ``max_segments`` is compared with.

    Args:
        component: whose bytes these are; the segments' sum equals its page_nbytes.
        segments: a page's parts in the order in which storage joins them.
        num_pages: how many pages; indices run from 0.
        device: ``"cpu"``, or an accelerator's name such as ``"cuda:0"``.
        owner: whatever must stay alive as long as the memory is used.

    Raises:
        InvalidPages: sizes that do not add up, or pages that overlap.
    """

    component: Component
    segments: tuple[Segment, ...]
    num_pages: int
    device: str = "cpu"
    owner: object = field(default=None, repr=False)
    _window: _Window = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_geometry(self.component, self.segments, self.num_pages)
        segments = _merged(self.segments)
        object.__setattr__(self, "segments", segments)
        window = _Window(memoryview(b""), (), None)
        if segments and self.num_pages and self.device == "cpu":
            low = min(segment.address for segment in segments)
            high = max(_end(segment, self.num_pages) for segment in segments)
            places = tuple((s.address - low, s.address - low + s.nbytes, s.stride) for s in segments)
            strides = {segment.stride for segment in segments}
            window = _Window(
                view_at(low, high - low, self.owner), places, strides.pop() if len(strides) == 1 else None
            )
        object.__setattr__(self, "_window", window)

    @classmethod
    def from_buffer(cls, buffer: Any, component: Component) -> HostPool:
        """Cover a writable contiguous buffer with consecutive pages of one segment each.

        Raises:
            InvalidPages: the buffer is read-only, not contiguous, or not a whole number of pages.
        """
        view = flat_view(buffer)
        if view.readonly:
            raise InvalidPages(
                "a pool needs writable memory",
                value=f"{type(buffer).__name__} is read-only",
                remedy="Use a bytearray, mmap or array.",
            )
        if not component.page_nbytes or view.nbytes % component.page_nbytes:
            raise InvalidPages(
                f"a buffer is not a whole number of pages of component '{component.name}'",
                value=f"{view.nbytes} bytes, {component.page_nbytes} bytes a page",
                remedy="Pass a slice whose size is a multiple of the page's.",
            )
        segment = Segment(address_of(view), component.page_nbytes, component.page_nbytes)
        return cls(component, (segment,), view.nbytes // component.page_nbytes, owner=view)

    @classmethod
    def from_tensor(cls, tensor: Any, component: Component, layout: str) -> HostPool:
        """Cover a torch tensor (or a sequence of them, such as K and V apart) in an engine's layout.

        Layouts of one half, with L layers, ps tokens a page:
        ``layer_first`` (L, tokens, heads, dim), ``page_first`` (tokens, L, heads, dim),
        ``page_first_direct`` (pages, L, ps, heads, dim), ``page_head`` (pages, heads, ps, L, dim).
        A tensor with one leading axis more stacks K and V; MLA has one half. The
        page's tokens follow from ``component.page_nbytes``. Only data_ptr, shape,
        is_contiguous, element_size and device are asked of a tensor, and its parts where it is stacked.

        Source: SGLang 0.5.23, ``mem_cache/pool_host``; the order of a page's parts is
        that of its ``get_page_buffer_meta``: K and V, interleaved by layer in layer_first.

        Raises:
            InvalidPages: an unknown layout, a strided tensor, or sizes that do not divide.
        """
        halves = halves_of(tensor, layout)
        parts, num_pages = parts_of(halves, layout, component.page_nbytes)
        segments = tuple(Segment(address, nbytes, nbytes) for address, nbytes in parts)
        return cls(component, segments, num_pages, device=str(halves[0].device), owner=tensor)

    def pages(self, indices: Iterable[int]) -> Pages:
        """Name the pages of one call, bounds checked here and nowhere later.

        Raises:
            InvalidPages: an index outside the pool, or not an integer.
        """
        try:
            chosen = list(map(index, indices))
        except TypeError as error:
            raise InvalidPages("page indices are not integers", value=str(error)) from error
        if chosen and (min(chosen) < 0 or max(chosen) >= self.num_pages):
            outside = [page for page in chosen if not 0 <= page < self.num_pages]
            raise InvalidPages(
                f"pages outside the pool of component '{self.component.name}'",
                value=f"{outside[:8]}{' ...' if len(outside) > 8 else ''} of {self.num_pages} pages",
                remedy="Use indices from 0 to num_pages - 1.",
            )
        return _PoolPages(self, chosen)

    def regions(self) -> list[tuple[int, int]]:
        """Give the (address, nbytes) ranges that cover every page, overlapping ones joined."""
        spans = sorted((s.address, _end(s, self.num_pages)) for s in self.segments if self.num_pages)
        regions: list[tuple[int, int]] = []
        for start, end in spans:
            if regions and start <= regions[-1][1]:
                regions[-1] = (regions[-1][0], max(end, regions[-1][1]))
            else:
                regions.append((start, end))
        return [(start, end - start) for start, end in regions]


class Pages:
    """The slots of one call, all of one component: the ``locs`` of a verb.

    Made by ``HostPool.pages`` or ``Pages.of_buffers``; immutable, cheap to slice.
    Views are writable unless the caller gave read-only buffers (``readonly``).
    """

    __slots__ = ("component", "indices", "nbytes", "pool", "readonly")

    #: The pool that holds the slots; None for loose buffers.
    pool: HostPool | None
    #: Whose pages these are.
    component: Component
    #: Page indices in the pool; for loose buffers their positions.
    indices: list[int]
    #: Bytes of one page.
    nbytes: int
    #: True where some slot cannot be written.
    readonly: bool

    @staticmethod
    def of_buffers(buffers: Iterable[Any], component: Component) -> Pages:
        """Name loose contiguous buffers, one a page, as slots without a pool.

        Raises:
            InvalidPages: a buffer that is not contiguous or whose size is not the page's.
        """
        views = [flat_view(buffer) for buffer in buffers]
        wrong = [view.nbytes for view in views if view.nbytes != component.page_nbytes]
        if wrong:
            raise InvalidPages(
                f"loose buffers do not have the page size of component '{component.name}'",
                value=f"{wrong[:8]} bytes, {component.page_nbytes} bytes a page",
                remedy="Pass buffers of exactly one page each.",
            )
        return _LoosePages(views, component)

    def __len__(self) -> int:
        return len(self.indices)

    def views(self, position: int) -> list[memoryview]:
        """Give the segments of the page at this position as memoryviews, in order.

        Raises:
            IndexError: there is no such position.
            InvalidPages: the memory is an accelerator's.
        """
        raise NotImplementedError

    def buffers(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        """Give the segments of all pages in [start, stop), flat and segment-minor, for preadv and its like.

        Raises:
            InvalidPages: the memory is an accelerator's.
        """
        raise NotImplementedError

    def addresses(self) -> tuple[list[int], list[int]]:
        """Give every segment's address and size as two flat lists, segment-minor.

        Of a pool's pages they are worked out once; whoever changes a list works on a copy.
        """
        raise NotImplementedError

    def __getitem__(self, chosen: slice) -> Pages:
        """Give the pages of a slice of positions."""
        raise NotImplementedError

    def take(self, positions: Sequence[int]) -> Pages:
        """Give the pages at these positions, in this order."""
        raise NotImplementedError

    @property
    def segments_per_page(self) -> int:
        """How many memory segments a page has, neighbours merged."""
        return len(self.pool.segments) if self.pool is not None else 1


class _PoolPages(Pages):
    __slots__ = ("_flat",)

    def __init__(self, pool: HostPool, indices: list[int]) -> None:
        self._flat: tuple[list[int], list[int]] | None = None
        self.pool = pool
        self.component = pool.component
        self.indices = indices
        self.nbytes = pool.component.page_nbytes
        self.readonly = False

    def views(self, position: int) -> list[memoryview]:
        page = self.indices[position]
        base, places, stride = self._window()
        if stride is None:
            return [base[first + step * page : end + step * page] for first, end, step in places]
        shift = stride * page  # once a page: 0.9 times the loop that multiplies for each segment
        return [base[first + shift : end + shift] for first, end, _ in places]

    def buffers(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        base, places, stride = self._window()
        indices = self.indices if stop is None and not start else self.indices[start:stop]
        if stride is None:
            return [base[first + step * i : end + step * i] for i in indices for first, end, step in places]
        shifts = [stride * i for i in indices]
        return [base[first + shift : end + shift] for shift in shifts for first, end, _ in places]

    def addresses(self) -> tuple[list[int], list[int]]:
        if self._flat is None:
            segments = self._owner().segments
            self._flat = self._starts(segments), [s.nbytes for s in segments] * len(self.indices)
        return self._flat

    def _starts(self, segments: Sequence[Segment]) -> list[int]:
        indices, count = self.indices, len(self.indices)
        if len(segments) != 1:
            places = [(s.address, s.stride) for s in segments]
            return [address + stride * i for i in indices for address, stride in places]
        address, stride = segments[0].address, segments[0].stride
        first = indices[0] if count > 1 else 0
        if count > 1 and indices == list(range(first, first + count)):  # in a row: two thirds of the price
            return list(range(address + first * stride, address + (first + count) * stride, stride))
        return [address + stride * i for i in indices]

    def __getitem__(self, chosen: slice) -> Pages:
        return _PoolPages(self._owner(), self.indices[_only_slice(chosen)])

    def take(self, positions: Sequence[int]) -> Pages:
        return _PoolPages(self._owner(), [self.indices[position] for position in positions])

    def _owner(self) -> HostPool:
        pool = self.pool
        if pool is None:
            raise InvalidPages("pages have lost their pool")
        return pool

    def _window(self) -> _Window:
        pool = self._owner()
        if pool.device != "cpu":
            raise InvalidPages(
                f"memory on '{pool.device}' cannot be viewed",
                remedy="Use addresses(), or give the backend pages of host memory.",
            )
        return pool._window


class _LoosePages(Pages):
    __slots__ = ("_views",)

    def __init__(self, views: list[memoryview], component: Component) -> None:
        self.pool = None
        self.component = component
        self.indices = list(range(len(views)))
        self.nbytes = component.page_nbytes
        self.readonly = any(view.readonly for view in views)
        self._views = views

    def views(self, position: int) -> list[memoryview]:
        return [self._views[position]]

    def buffers(self, start: int = 0, stop: int | None = None) -> list[memoryview]:
        return self._views[start:stop]

    def addresses(self) -> tuple[list[int], list[int]]:
        return [address_of(view) for view in self._views], [self.nbytes] * len(self._views)

    def __getitem__(self, chosen: slice) -> Pages:
        return _LoosePages(self._views[_only_slice(chosen)], self.component)

    def take(self, positions: Sequence[int]) -> Pages:
        return _LoosePages([self._views[position] for position in positions], self.component)


def _only_slice(chosen: slice) -> slice:
    if not isinstance(chosen, slice):
        raise TypeError("pages are sliced (pages[2:5]) or taken (pages.take([2])), not indexed")
    return chosen


def _merged(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Join segments that follow each other in memory for every page."""
    merged: list[Segment] = []
    for segment in segments:
        last = merged[-1] if merged else None
        if last and last.stride == segment.stride and last.address + last.nbytes == segment.address:
            merged[-1] = Segment(last.address, last.stride, last.nbytes + segment.nbytes)
        else:
            merged.append(segment)
    return tuple(merged)


def _check_geometry(component: Component, segments: Sequence[Segment], num_pages: int) -> None:
    total = sum(segment.nbytes for segment in segments)
    what = f"the pool of component '{component.name}' is not well formed"
    if total != component.page_nbytes:
        raise InvalidPages(
            what,
            value=f"segments sum to {total} bytes, the component has {component.page_nbytes} a page",
            remedy="List every segment of a page once, or correct page_nbytes.",
        )
    if num_pages < 0 or any(s.nbytes < 1 or s.address < 1 for s in segments):
        raise InvalidPages(
            what,
            value=f"num_pages={num_pages}, segments={list(segments)[:4]}",
            remedy="Give a count from 0, and segments with an address and a size from 1.",
        )
    pairs = combinations(segments, 2)
    clash: Sequence[Segment] = [s for s in segments if num_pages > 1 and s.stride < s.nbytes]
    clash = clash or next((pair for pair in pairs if _overlap(*pair, num_pages)), ())
    if clash:
        raise InvalidPages(
            what, value=f"memory used twice by {list(clash)[:4]}", remedy="Pages must not overlap."
        )


def _overlap(a: Segment, b: Segment, num_pages: int) -> bool:
    """Tell whether some page's part by ``a`` shares a byte with some page's part by ``b``."""
    if not num_pages or _end(a, num_pages) <= b.address or _end(b, num_pages) <= a.address:
        return False
    if num_pages == 1:
        return True
    ahead = b.address - a.address
    if a.stride == b.stride:  # then only the two pages around the start of b come near
        nearest = ahead // a.stride
        gaps = (ahead - nearest * a.stride, ahead - (nearest + 1) * a.stride)
        return any(-b.nbytes < gap < a.nbytes for gap in gaps)
    starts = [(s.address + page * s.stride, s.nbytes) for page in range(num_pages) for s in (a, b)]
    starts.sort()
    return any(start + nbytes > after for (start, nbytes), (after, _) in pairwise(starts))


def _end(segment: Segment, num_pages: int) -> int:
    return segment.address + (num_pages - 1) * segment.stride + segment.nbytes
