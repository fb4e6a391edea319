"""Models with more than KV pages: SGLang's pool transfers as component queries, and its result.

Source: SGLang 0.5.23, ``mem_cache/hicache_storage.py`` (PoolTransfer, PoolHitPolicy,
PoolTransferResult); ``restorable_prefix_pages`` exists from 0.5.20 on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import sglang.srt.mem_cache.hicache_storage as sglang_storage

from hicache_core import ComponentQuery, HiCache
from hicache_core.probe import Policy
from hicache_sglang.pools import BoundPool

_POLICIES = frozenset({"all_pages", "trailing_pages", "block_groups"})


def probe(cache: HiCache, bound: Mapping[str, BoundPool], hashes: list[str], transfers: Sequence[Any]) -> Any:
    """Answer ``batch_exists_v2``.

    A pool that this adapter does not know has no pages: unless its policy never
    gates, nothing can be restored. Ranks intersect the restorable lengths, since
    each may hold other sidecar pages.
    """
    queries = []
    for transfer in transfers:
        query = _query(transfer)
        if query is None or query.name not in bound:
            if query is None or query.gates:
                return result(0, {}, ())
            continue
        queries.append(query)
    hit = cache.probe(hashes, queries)
    per_pool = {"kv": hit.kv} | dict(hit.per_component)
    usable = hit.restorable[-1] if hit.restorable else 0
    return result(usable, {name: pages for name, pages in per_pool.items() if pages}, hit.restorable)


def result(pages: int, per_pool: dict[str, int], restorable: Iterable[int]) -> Any:
    """Make this release's PoolTransferResult; None on releases without one, which never ask."""
    kind = getattr(sglang_storage, "PoolTransferResult", None)
    if kind is None:
        return None
    fields = {field.name for field in dataclasses.fields(kind)}
    more = {"restorable_prefix_pages": list(restorable)} if "restorable_prefix_pages" in fields else {}
    return kind(kv_hit_pages=pages, extra_pool_hit_pages=per_pool, **more)


def _query(transfer: Any) -> ComponentQuery | None:
    """Read a PoolTransfer of any release; None where its policy or geometry is not known here."""
    name = str(getattr(transfer.name, "value", transfer.name))
    policy = getattr(transfer, "hit_policy", "all_pages")
    policy = str(getattr(policy, "value", policy))
    block, group = (
        int(getattr(transfer, "block_pages", 0) or 1),
        int(getattr(transfer, "group_pages", 0) or 1),
    )
    if policy not in _POLICIES or not 1 <= group <= block:
        return None
    window = max(1, len(transfer.keys or ()))
    return ComponentQuery(
        name=name, policy=cast(Policy, policy), window=window, block_pages=block, group_pages=group
    )
