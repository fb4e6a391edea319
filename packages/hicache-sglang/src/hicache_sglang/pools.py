"""SGLang's host pools as hicache's: which pages a call means, and how their bytes move.

A bound pool knows three ways. Direct: HiCache works on the pool's own memory, no
copy. Flat: one private tensor a page, through the pool's own accessors. Logical:
no bytes, so nothing to move. A pool whose heads are split has one HostPool a head
group over the same memory, and a page is there when all its groups are.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hicache_core import Component, HiCache, HostPool, Pages, Segment, Status
from hicache_sglang.components import Ranks, component_of
from hicache_sglang.geometry import Geometry, PoolRefused, geometry_of, head_groups_of

OK = Status.OK

#: All memory behind an address, of which only slices that are tensors' are touched; one type for all calls.
_ANYWHERE = ctypes.c_char * (sys.maxsize // 2)


@dataclass(frozen=True, slots=True)
class _UnseenPool:
    """What can be said of a pool that was never registered: its pages may be cut by heads."""

    layout: str
    dtype: Any
    head_num: int = 0


@dataclass(frozen=True, slots=True)
class BoundPool:
    """One SGLang host pool and what stands for it in HiCache."""

    name: str
    pool: Any
    geometry: Geometry
    host_pools: tuple[HostPool, ...]

    @property
    def component(self) -> Component:
        """The component of the whole page; of the first head group where heads are split."""
        return self.host_pools[0].component

    @property
    def nbytes(self) -> int:
        """Bytes of a whole page."""
        return sum(pool.component.page_nbytes for pool in self.host_pools)

    def get(self, cache: HiCache, hashes: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Read pages into the pool; True where the whole page is there."""
        pages, good = self._pages(len(hashes), host_indices)
        if self.geometry.kind == "logical" or not pages:
            return good
        wanted = _chosen(hashes, good)
        move = self._get_flat if self.geometry.kind == "flat" else self._get_direct
        return _spread(good, move(cache, wanted, pages))

    def set(self, cache: HiCache, hashes: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        """Store pages of the pool; True where the page is stored now or was before."""
        pages, good = self._pages(len(hashes), host_indices)
        if self.geometry.kind == "logical" or not pages:
            return good
        wanted = _chosen(hashes, good)
        if self.geometry.kind == "flat":
            return _spread(good, self._set_flat(cache, wanted, pages))
        answers = [cache.set(wanted, part.pages(pages)) for part in self.host_pools]
        return _spread(good, _all_ok(answers))

    def get_loose(self, cache: HiCache, hashes: Sequence[str], tensors: Sequence[Any]) -> list[bool]:
        """Read pages into tensors of one flat page each, as the generic calls do."""
        return move_loose(cache.get, self.component, hashes, tensors)

    def set_loose(self, cache: HiCache, hashes: Sequence[str], tensors: Sequence[Any]) -> list[bool]:
        """Store tensors of one flat page each, as the generic calls do."""
        return move_loose(cache.set, self.component, hashes, tensors)

    def _get_direct(self, cache: HiCache, hashes: list[str], pages: list[int]) -> list[bool]:
        return _all_ok([cache.get(hashes, part.pages(pages)) for part in self.host_pools])

    def _get_flat(self, cache: HiCache, hashes: list[str], pages: list[int]) -> list[bool]:
        tensors = [self.pool.get_dummy_flat_data_page() for _ in hashes]
        good = self.get_loose(cache, hashes, tensors)
        for page, tensor, there in zip(pages, tensors, good, strict=True):
            if there:
                self.pool.set_from_flat_data_page(page * self.geometry.page_tokens, tensor)
        return good

    def _set_flat(self, cache: HiCache, hashes: list[str], pages: list[int]) -> list[bool]:
        start = self.geometry.page_tokens
        return self.set_loose(
            cache, hashes, [self.pool.get_data_page(page * start, flat=True) for page in pages]
        )

    def _pages(self, count: int, host_indices: torch.Tensor | None) -> tuple[list[int], list[bool]]:
        """Turn host indices into page numbers; a page that is not whole in its place is not good."""
        tokens = self.geometry.page_tokens
        if not count or host_indices is None or host_indices.numel() != count * tokens:
            return [], [False] * count
        table = host_indices.reshape(count, tokens)
        first, last = table[:, 0], table[:, -1]
        numbers = first // tokens
        whole = (first % tokens == 0) & (last - first == tokens - 1)
        whole &= (numbers >= 0) & (numbers < self.geometry.num_pages)
        good: list[bool] = whole.tolist()
        return _chosen(numbers.tolist(), good), good


def bind(name: str, pool: Any, ranks: Ranks, *, zero_copy: bool, draft_model: str | None) -> BoundPool:
    """Make a host pool known by its name.

    Args:
        zero_copy: False where the engine will use the generic calls for ``kv``, which need flat pages.

    Raises:
        PoolRefused: its pages cannot be stored, with the reason.
    """
    geometry = geometry_of(pool)
    groups = ranks.head_groups if name == "kv" else 1
    if name == "kv" and not zero_copy and geometry.kind == "direct":
        _check_generic(pool, groups)
    parts = head_groups_of(pool, groups) if groups > 1 else [geometry]
    host_pools = []
    for group, part in enumerate(parts):
        component = component_of(name, pool, part, ranks, draft_model=draft_model, group=group)
        host_pools.append(_host_pool(component, part, pool))
    return BoundPool(name, pool, geometry, tuple(host_pools))


def move_loose(verb: Any, component: Component, hashes: Sequence[str], tensors: Sequence[Any]) -> list[bool]:
    """Give tensors of one page each to a verb of HiCache; one of another size is not good."""
    if not component.page_nbytes:
        return [True] * len(hashes)
    given = tensors[: len(hashes)]
    views: list[memoryview | None] = [*_equal_views(given, component.page_nbytes)]
    views = views or [_view(tensor) for tensor in given]
    good = [view is not None and view.nbytes == component.page_nbytes for view in views]
    good += [False] * (len(hashes) - len(good))
    if not any(good):
        return good
    pages = Pages.of_buffers(_chosen(views, good), component)
    return _spread(good, _all_ok([verb(_chosen(hashes, good), pages)]))


def named_by_key(key: str) -> tuple[str, str]:
    """Split a generic call's key into pool name and page hash.

    KV pages come under the bare hash; 0.5.12 writes draft pages as ``d:<hash>``,
    0.5.15 as ``<hash>.draft``, without ever registering their pool.
    """
    if key.startswith("d:"):
        return "draft", key[2:]
    page_hash, _, name = key.partition(".")
    return (name, page_hash) if name else ("kv", key)


def loose_pool(name: str, tensor: Any, kv: BoundPool, ranks: Ranks, *, draft_model: str | None) -> BoundPool:
    """Make a pool known of which only flat pages are ever seen."""
    nbytes = int(tensor.numel() * tensor.element_size())
    geometry = Geometry("flat", kv.geometry.page_tokens, 0, nbytes)
    unseen = _UnseenPool(str(getattr(kv.pool, "layout", "page_first")), tensor.dtype)
    component = component_of(name, unseen, geometry, ranks, draft_model=draft_model)
    return BoundPool(name, None, geometry, (_host_pool(component, geometry, None),))


def _check_generic(pool: Any, groups: int) -> None:
    remedy = 'Add "interface_v1": 1 to --hicache-storage-backend-extra-config.'
    if groups > 1:
        raise PoolRefused(
            pool, "its heads are split (tp_lcm_size), and interface_v1 is not set", remedy=remedy
        )
    try:
        pool.get_dummy_flat_data_page()
    except NotImplementedError as error:
        raise PoolRefused(pool, "it has no flat pages, and interface_v1 is not set", remedy=remedy) from error


def _host_pool(component: Component, geometry: Geometry, pool: Any) -> HostPool:
    if geometry.kind == "direct":
        return HostPool(component, geometry.segments, geometry.num_pages, owner=pool)
    if geometry.kind == "logical":
        return HostPool(component, (), geometry.num_pages, owner=pool)
    # No page is reached through this pool: it makes the component known, for exists and probe.
    nbytes = component.page_nbytes
    return HostPool(component, (Segment(nbytes, nbytes, nbytes),), 0, owner=pool)


def _equal_views(tensors: Sequence[Any], nbytes: int) -> list[memoryview]:
    """Look at tensors of one page each, as slices of one view; nothing where one of them is anything else.

    .3 microseconds a page, where torch and numpy take 2.5 for a view of each: a
    third of a batch of 64 KiB.
    """
    if not all(
        isinstance(each, torch.Tensor) and each.nbytes == nbytes and each.is_cpu and each.is_contiguous()
        for each in tensors
    ):
        return []
    addresses = [each.data_ptr() for each in tensors]
    first = min(addresses, default=0)
    memory = _ANYWHERE.from_address(first or 1)
    memory.owner = tensors  # type: ignore[attr-defined]  # a slice keeps the base alive, and with it the tensors
    base = memoryview(memory).cast("B")
    return [base[at - first : at - first + nbytes] for at in addresses]


def _view(tensor: Any) -> memoryview | None:
    """Look at a CPU tensor's memory; None where it cannot be had in one piece."""
    if not isinstance(tensor, torch.Tensor):
        return memoryview(tensor).cast("B") if tensor is not None else None
    if not tensor.is_contiguous() or tensor.device.type != "cpu" or not tensor.numel():
        return None
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _all_ok(answers: Sequence[Sequence[Status]]) -> list[bool]:
    if len(answers) == 1:
        return [status is OK for status in answers[0]]
    return [all(status is OK for status in page) for page in zip(*answers, strict=True)]


def _chosen(items: Sequence[Any], good: Sequence[bool]) -> list[Any]:
    return [item for item, take in zip(items, good, strict=False) if take]


def _spread(good: list[bool], answers: Sequence[bool]) -> list[bool]:
    """Put the answers for the good ones back into their places."""
    if all(good):
        return list(answers)
    remaining = iter(answers)
    return [next(remaining) if take else False for take in good]
