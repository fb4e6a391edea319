"""Engines' layouts: where the parts of a page lie in a tensor.

Every layout repeats a page's parts at their own size, so the first page's say it
all. torch is not imported: a tensor is asked for its pointer, shape and item size.
"""

from __future__ import annotations

from math import prod
from typing import Any

from hicache_core.errors import InvalidPages

#: Layout -> (number of axes of one half, axis of the layers, axis of the tokens or pages).
_LAYOUTS = {
    "layer_first": (4, 0, 1),
    "page_first": (4, 1, 0),
    "page_first_direct": (5, 1, 0),
    "page_head": (5, 3, 0),
}


def halves_of(tensor: Any, layout: str) -> list[Any]:
    """Take a tensor or several apart into K, V and so on, each of the layout's axes.

    Raises:
        InvalidPages: an unknown layout, no tensor, or one of other axes or strides.
    """
    if layout not in _LAYOUTS:
        raise InvalidPages("unknown layout", value=repr(layout), remedy=f"Use one of: {', '.join(_LAYOUTS)}.")
    axes = _LAYOUTS[layout][0]
    parts: list[Any] = list(tensor) if isinstance(tensor, (list, tuple)) else [tensor]
    halves: list[Any] = []
    for part in parts:
        halves.extend(part if len(part.shape) == axes + 1 else [part])
    for half in halves:
        if len(half.shape) != axes or not half.is_contiguous():
            raise InvalidPages(
                f"a tensor does not have the layout '{layout}'",
                value=f"shape {tuple(half.shape)}, contiguous: {half.is_contiguous()}",
                remedy=f"Pass contiguous tensors of {axes} axes, or {axes + 1} with K and V stacked first.",
            )
    if not halves:
        raise InvalidPages("no tensor was given", remedy="Pass a tensor, or a sequence such as (K, V).")
    return halves


def parts_of(halves: list[Any], layout: str, page_nbytes: int) -> tuple[list[tuple[int, int]], int]:
    """Give the (address, nbytes) of the first page's parts, and how many pages follow each other there.

    Raises:
        InvalidPages: halves that differ, or that are not whole pages.
    """
    _, layer_axis, unit_axis = _LAYOUTS[layout]
    layers, units = halves[0].shape[layer_axis], halves[0].shape[unit_axis]
    alike = {(half.shape[layer_axis], half.shape[unit_axis], str(half.device)) for half in halves}
    if len(alike) > 1:
        raise InvalidPages(
            "the tensors of a pool do not have the same pages",
            value=", ".join(f"{tuple(half.shape)} on {half.device}" for half in halves),
            remedy="Pass K and V of one pool: as many layers, as many tokens, one device.",
        )
    nbytes = [prod(half.shape) * half.element_size() for half in halves]
    total = sum(nbytes)
    num_pages, rest = divmod(total, page_nbytes or 1)
    by_page = layout in ("page_first_direct", "page_head")
    if rest or not num_pages or units % num_pages or (by_page and units != num_pages):
        raise InvalidPages(
            f"a tensor of layout '{layout}' is not a whole number of pages",
            value=f"{total} bytes of {units} {'pages' if by_page else 'tokens'}, {page_nbytes} bytes a page",
            remedy="Check page_nbytes: K and V, all layers, all tokens of a page.",
        )
    if layout != "layer_first":
        return [(half.data_ptr(), n // num_pages) for half, n in zip(halves, nbytes, strict=True)], num_pages
    parts = []
    for layer in range(layers):
        for half, n in zip(halves, nbytes, strict=True):
            parts.append((half.data_ptr() + layer * (n // layers), n // layers // num_pages))
    return parts, num_pages
