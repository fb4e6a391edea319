"""A hicache host pool as classes written for SGLang see one: a token a page, bytes for a dtype.

Such classes know two ways to a page's memory, and choose by ``layout``. In
``page_first`` a page is two runs of bytes, K and V, and may be moved in place
(``get_page_buffer_meta``, or ``get_data_page(index, flat=False)`` as two rows).
In ``layer_first`` it lies in many pieces, and classes copy it as a flat page. So a
pool of ours is page_first where its page is one run that can be halved or two
runs of one size, and layer_first otherwise, whatever was asked for.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import torch

from hicache_core import HostPool, Segment

Layout = Literal["page_first", "layer_first"]


class PoolOfOurs:
    """One of our host pools, as SGLang's classes see theirs (0.5.23, ``mem_cache/pool_host/mha.py``)."""

    page_size = 1
    dtype = torch.uint8
    device = "cpu"
    pin_memory = False
    layer_num = 1

    def __init__(self, pool: HostPool, layout: Layout = "page_first") -> None:
        """Show ``pool`` in ``layout``; in layer_first where its pages have no K and V."""
        self._pool = pool
        self._halves = _halves(pool) if layout == "page_first" else ()
        self.layout: Layout = "page_first" if self._halves else "layer_first"
        self.size = self.page_num = pool.num_pages
        self.size_per_token = pool.component.page_nbytes
        regions = pool.regions()
        low = min((address for address, _ in regions), default=0)
        high = max((address + nbytes for address, nbytes in regions), default=0)
        self.kv_buffer = _tensor_at(low, high - low) if regions else torch.empty(0, dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Give the addresses and sizes of each page's K and V, or of all its pieces in layer_first."""
        pages = indices.tolist()
        if not self._halves:
            return self._pool.pages(pages).addresses()
        at = [half.address + half.stride * page for page in pages for half in self._halves]
        return at, [half.nbytes for half in self._halves] * len(pages)

    def is_stride_page_aligned(self, page_size_bytes: int = 4096) -> bool:
        """Tell whether every page's K and V begin at a multiple of this."""
        return bool(self._halves) and not any(
            half.address % page_size_bytes or half.stride % page_size_bytes for half in self._halves
        )

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        """Copy a page out; with ``flat=False`` in page_first, give K and V in place as two rows."""
        page = int(index)
        if flat or not self._halves:
            return torch.frombuffer(bytearray(b"".join(self._views(page))), dtype=torch.uint8)
        k, v = (half.address + half.stride * page for half in self._halves)
        nbytes = self._halves[0].nbytes
        if k > v:  # no view goes backwards
            return torch.stack([_tensor_at(k, nbytes), _tensor_at(v, nbytes)])
        return _tensor_at(k, v - k + nbytes).as_strided((2, nbytes), (v - k, 1))

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Make an empty page to read into."""
        return torch.zeros(self.size_per_token, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: Any, data_page: torch.Tensor) -> None:
        """Copy a page in."""
        raw = data_page.contiguous().reshape(-1).view(torch.uint8).numpy()
        start = 0
        for view in self._views(int(index)):
            view[:] = raw[start : start + view.nbytes].data
            start += view.nbytes

    def get_size_per_token(self) -> int:
        """Bytes of a page, which is a token here."""
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        """Half of it, as SGLang's MHA pools say."""
        return self.size_per_token // 2

    def _views(self, page: int) -> list[memoryview]:
        return self._pool.pages([page]).views(0)


def _halves(pool: HostPool) -> tuple[Segment, ...]:
    """Give a page's K and V; nothing where its pieces are not two of one size."""
    if len(pool.segments) == 1 and pool.segments[0].nbytes % 2 == 0:
        (whole,) = pool.segments
        nbytes = whole.nbytes // 2
        return (
            Segment(whole.address, whole.stride, nbytes),
            Segment(whole.address + nbytes, whole.stride, nbytes),
        )
    sizes = [segment.nbytes for segment in pool.segments]
    return pool.segments if len(sizes) == 2 and sizes[0] == sizes[1] else ()


def _tensor_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
