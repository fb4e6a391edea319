"""How much of a prefix can be restored when a model has more than KV pages.

Hybrid models keep sidecar state beside KV pages: an indexer a page, Mamba state
at the end of a prefix, a second compressed form of whole blocks. Each says by a
policy which of its pages must be there. These functions are pure: HiCache asks
the store, this module combines the answers.

Source of the policies: SGLang 0.5.23, ``mem_cache/hicache_storage.py``
(PoolHitPolicy, PoolTransferResult).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hicache_core.errors import InvalidArgument

Policy = Literal["all_pages", "trailing_pages", "block_groups"]
_POLICIES = ("all_pages", "trailing_pages", "block_groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentQuery:
    """What one sidecar component needs for a prefix to be usable."""

    name: str
    """The component's name; all components of this name must have the page."""
    policy: Policy = "all_pages"
    """``all_pages``: every page of the prefix. ``trailing_pages``: the last ``window``
    pages of it. ``block_groups``: for every whole block of ``block_pages`` pages from the
    start, its last ``group_pages`` pages; reported, never a reason to shorten the prefix."""
    window: int = 1
    block_pages: int = 1
    group_pages: int = 1

    def __post_init__(self) -> None:
        if self.policy not in _POLICIES:
            raise InvalidArgument(
                f"component '{self.name}' has an unknown policy",
                value=repr(self.policy),
                remedy=f"Use one of: {', '.join(_POLICIES)}.",
            )
        counts = (self.window, self.block_pages, self.group_pages)
        whole = all(type(count) is int for count in counts)
        if not whole or self.window < 1 or not 1 <= self.group_pages <= self.block_pages:
            window, block, group = map(repr, counts)
            raise InvalidArgument(
                f"the query of component '{self.name}' is not well formed",
                value=f"window={window}, block_pages={block}, group_pages={group}",
                remedy="window is at least 1, and 1 <= group_pages <= block_pages.",
            )

    @property
    def gates(self) -> bool:
        """True where a missing page shortens the usable prefix."""
        return self.policy != "block_groups"


@dataclass(frozen=True, slots=True)
class Hit:
    """What of a prefix is in the store."""

    kv: int
    """Leading pages whose KV is there, sidecars aside; for a logical anchor, the longest restorable."""
    per_component: Mapping[str, int] = field(default_factory=dict)
    """For each sidecar, the longest prefix (in pages) that it alone would allow."""
    restorable: tuple[int, ...] = ()
    """Every length that all gating components allow, ascending. Ranks hold different
    sidecar pages, so an engine intersects these sets instead of taking a minimum."""


def reach(query: ComponentQuery, present: Sequence[bool]) -> tuple[int, ...]:
    """Give every prefix length (1 to n, ascending) that this component allows.

    Args:
        present: whether the component has page i, for each of the n pages asked.
    """
    n = len(present)
    if query.policy == "all_pages":
        return tuple(range(1, leading_run(present) + 1))
    if query.policy == "trailing_pages":
        lengths = []
        run = 0
        for page in range(n):
            run = run + 1 if present[page] else 0
            if run >= min(query.window, page + 1):
                lengths.append(page + 1)
        return tuple(lengths)
    blocks = 0
    while (blocks + 1) * query.block_pages <= n:
        end = (blocks + 1) * query.block_pages
        if not all(present[end - query.group_pages : end]):
            break
        blocks += 1
    return tuple(query.block_pages * (block + 1) for block in range(blocks))


def combine(kv_run: int | None, pages: int, reached: Sequence[tuple[ComponentQuery, tuple[int, ...]]]) -> Hit:
    """Join the KV run and the sidecars' lengths into one answer.

    Args:
        kv_run: leading KV pages in the store; None where KV is a logical anchor,
            which is present exactly where its required siblings are.
        pages: how many were asked.
        reached: each query with the lengths that ``reach`` gave for it.
    """
    gating = [set(lengths) for query, lengths in reached if query.gates]
    if kv_run is None and not gating:
        allowed: list[int] = []
    else:
        limit = pages if kv_run is None else kv_run
        allowed = [length for length in range(1, limit + 1) if all(length in lengths for lengths in gating)]
    kv = (allowed[-1] if allowed else 0) if kv_run is None else kv_run
    per_component = {query.name: (lengths[-1] if lengths else 0) for query, lengths in reached}
    return Hit(kv, per_component, tuple(allowed))


def leading_run(present: Sequence[object]) -> int:
    """Count the leading true values."""
    for count, value in enumerate(present):
        if not value:
            return count
    return len(present)
