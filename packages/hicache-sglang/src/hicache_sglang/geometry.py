"""Where the pages of an SGLang host pool lie: segments, flat copies, or nothing at all.

SGLang has some twenty kinds of host pool in half a dozen layouts, and each
release adds one. So nothing here knows a pool's class: a pool is asked for the
addresses of three pages (``get_page_buffer_meta``), and the answer is believed
only if it is linear (the same segments at a fixed stride) and complete (the
segments make up all bytes that the pool keeps a page: 0.5.9's NSA pool leaves its
indexer out). Otherwise pages are copied through ``get_data_page`` and
``set_from_flat_data_page``, if those are complete; a pool that offers neither, or
whose pages do not stay where they are, is refused with the reason.

Source: SGLang 0.5.5 to 0.5.23, ``mem_cache/memory_pool_host.py`` and ``mem_cache/pool_host/``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from hicache_core import HiCacheError, Segment

Kind = Literal["direct", "flat", "logical"]


class PoolRefused(HiCacheError, ValueError):
    """This host pool cannot be stored page by page; the engine should run without this storage."""

    def __init__(self, pool: object, reason: str, *, remedy: str = "") -> None:
        self.pool_class = type(pool).__name__
        super().__init__(
            f"hicache cannot store the pages of a '{self.pool_class}'",
            value=reason,
            remedy=remedy or "Detach the storage, or start SGLang with another --hicache-mem-layout.",
        )


@dataclass(frozen=True, slots=True)
class Geometry:
    """The pages of one host pool, as SGLang addresses them."""

    kind: Kind
    """``direct``: segments in place; ``flat``: copies, one a page; ``logical``: pages without bytes."""
    page_tokens: int
    """How many host indices make a page; page i is that of index ``i * page_tokens``."""
    num_pages: int
    page_nbytes: int
    segments: tuple[Segment, ...] = ()
    """For ``direct``, in the order of the flat page: K of all layers before V."""


def geometry_of(pool: Any) -> Geometry:
    """Find out how to reach the pages of a pool.

    Raises:
        PoolRefused: pages move, are interleaved over ranks, or cannot be had.
    """
    _refuse_unstable(pool)
    page_tokens = page_tokens_of(pool)
    num_pages = _num_pages(pool, page_tokens)
    if getattr(pool, "kv_buffer", True) is None and not _flat_nbytes(pool):
        return Geometry("logical", page_tokens, num_pages, 0)
    whole = _whole_page_nbytes(pool)
    segments, complaint = _segments(pool, page_tokens, num_pages, lambda at: pool.get_page_buffer_meta(at))
    total = sum(segment.nbytes for segment in segments)
    if segments and total == whole:
        return Geometry("direct", page_tokens, num_pages, total, _flat_order(segments, pool))
    if segments:
        complaint = f"its segments sum to {total} bytes, a page has {whole}"
    flat = _flat_nbytes(pool)
    if flat and flat == _data_page_nbytes(pool) == whole:
        return Geometry("flat", page_tokens, num_pages, flat)
    raise PoolRefused(pool, f"{complaint}; its flat pages have {flat} bytes of {whole}")


def head_groups_of(pool: Any, groups: int) -> list[Geometry]:
    """Cut the pages of a ``page_head`` pool into head groups, each with pages of its own.

    Raises:
        PoolRefused: the pool cannot be cut, or the groups are not linear.
    """
    page_tokens = page_tokens_of(pool)
    num_pages = _num_pages(pool, page_tokens)
    whole = _whole_page_nbytes(pool)
    segments, complaint = _segments(
        pool, page_tokens, num_pages, lambda at: pool.get_split_heads_page_buffer_meta(at, groups)
    )
    total = sum(segment.nbytes for segment in segments)
    if not segments or len(segments) % groups or total != whole:
        raise PoolRefused(
            pool, complaint or f"its {groups} head groups sum to {total} bytes, a page has {whole}"
        )
    each = len(segments) // groups
    parts = [segments[start : start + each] for start in range(0, len(segments), each)]
    return [
        Geometry("direct", page_tokens, num_pages, sum(segment.nbytes for segment in part), part)
        for part in parts
    ]


def page_tokens_of(pool: Any) -> int:
    """Give how many host indices a page has; under decode context parallelism the widened page."""
    return int(getattr(pool, "logical_page_size", 0) or getattr(pool, "page_size", 0) or 1)


def anchor_of(pool: Any) -> Any:
    """Unwrap a HostPoolGroup, which some releases register whole, to the pool whose indices it shares."""
    entry = getattr(pool, "anchor_entry", None)
    return pool if entry is None else entry.host_pool


def _refuse_unstable(pool: Any) -> None:
    if (
        getattr(pool, "stores_page_envelope", False)
        or getattr(pool, "shared_allocation_domain", None) is not None
    ):
        raise PoolRefused(
            pool,
            "its pages move while they are in use (a shared, compacting arena)",
            remedy="Start SGLang with separate host pools: leave --hicache-storage-backend set at launch.",
        )
    if getattr(pool, "placement", None) is not None:
        raise PoolRefused(
            pool,
            "its pages are interleaved over the ranks, so no rank holds a whole chain",
            remedy="Turn page-interleaved KV sharding off, or detach the storage.",
        )


def _num_pages(pool: Any, page_tokens: int) -> int:
    size = int(getattr(pool, "logical_size", 0) or getattr(pool, "size", 0))
    num_pages = size // page_tokens
    if num_pages < 1:
        raise PoolRefused(pool, f"it has no whole page ({size} tokens, {page_tokens} a page)")
    return num_pages


def _segments(pool: Any, page_tokens: int, num_pages: int, meta_of: Any) -> tuple[tuple[Segment, ...], str]:
    """Probe three pages; give a page's segments, or none and why not."""
    asked = sorted({0, 1, num_pages - 1} & set(range(num_pages)))
    answers = []
    for page in asked:
        indices = torch.arange(page * page_tokens, (page + 1) * page_tokens, dtype=torch.int64)
        try:
            meta = meta_of(indices)
            answers.append([(int(at), int(size)) for at, size in zip(*meta, strict=True)])
        except (
            NotImplementedError,
            AttributeError,
            ValueError,
            TypeError,
            AssertionError,
            IndexError,
        ) as error:
            return (), f"it gives no addresses ({type(error).__name__}: {error})"
    first, last = answers[0], answers[-1]
    sizes = [size for _, size in first]
    if not first or any([size for _, size in answer] != sizes for answer in answers):
        return (), "its pages have different segments"
    span = asked[-1] or 1
    strides = [(there - here) // span for (here, _), (there, _) in zip(first, last, strict=True)]
    if num_pages == 1:
        strides = sizes
    for page, answer in zip(asked, answers, strict=True):
        expected = [here + page * stride for (here, _), stride in zip(first, strides, strict=True)]
        if [at for at, _ in answer] != expected:
            return (), "its pages do not follow each other at a fixed stride"
    if any(stride < size for stride, size in zip(strides, sizes, strict=True)):
        return (), "its pages overlap"
    return tuple(Segment(here, stride, size) for (here, size), stride in zip(first, strides, strict=True)), ""


def _flat_order(segments: tuple[Segment, ...], pool: Any) -> tuple[Segment, ...]:
    """Put a layer_first page's segments into the order of its flat page.

    ``get_page_buffer_meta`` alternates K and V by layer there, ``get_data_page``
    gives all of K before all of V. One order makes generic and zero-copy calls
    store the same bytes, and is that of page_first_direct, so both layouts share pages.
    """
    layers = int(getattr(pool, "layer_num", 0) or 0)
    if getattr(pool, "layout", "") == "layer_first" and layers and len(segments) == 2 * layers:
        return segments[0::2] + segments[1::2]
    return segments


def _whole_page_nbytes(pool: Any) -> int:
    """Give the bytes that a pool keeps a page, everything included.

    Pools of page rows say the bytes of one layer's row (DeepSeek V4, QSA) or of all
    of them (MiniMax NVFP4), the others the bytes of one token over all layers and buffers.
    """
    row = int(getattr(pool, "item_bytes", 0) or getattr(pool, "state_page_bytes", 0) or 0)
    if row:
        return row * int(getattr(pool, "layer_num", 0) or 0)
    page = getattr(pool, "page_bytes", 0)
    if isinstance(page, int) and page:
        return page
    return int(getattr(pool, "size_per_token", 0) or 0) * int(getattr(pool, "page_size", 0) or 1)


def _flat_nbytes(pool: Any) -> int:
    """Give the size of the flat page that ``set_from_flat_data_page`` takes; 0 where there is none."""
    try:
        return _nbytes(pool.get_dummy_flat_data_page())
    except (NotImplementedError, AttributeError, ValueError, TypeError, RuntimeError):
        return 0


def _data_page_nbytes(pool: Any) -> int:
    try:
        return _nbytes(pool.get_data_page(0, flat=True))
    except (NotImplementedError, AttributeError, ValueError, TypeError, RuntimeError):
        return 0


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
