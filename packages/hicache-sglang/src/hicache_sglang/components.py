"""Which part of the model's state a host pool holds: SGLang's ranks and pool names as Components.

Wrong sharing gives wrong answers, so a pool counts as replicated over the ranks
only where SGLang's own writers treat it so *and* its pages have no head axis;
a name that this module does not know is sharded. Replication is the pool's, not
the model's: Mamba state beside a replicated MLA cache is each rank's own.

Source: SGLang 0.5.23, ``managers/cache_controller.py`` (_generate_storage_config)
and ``mem_cache/hybrid_cache/hybrid_cache_controller.py`` (should_backup).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hicache_core import Component, Placement, Shard
from hicache_sglang.geometry import Geometry

#: Pools that every rank of a rank-replicated (MLA-like) model fills with the same bytes.
REPLICATED_BESIDE_MLA = frozenset(
    {"kv", "swa", "auxiliary_swa", "indexer", "draft", "draft_indexer", "draft_swa"}
)
REPLICATED_PREFIX = "deepseek_v4_"

#: Layouts whose pages hold the same bytes in the same order.
_BYTE_ORDERS = {"layer_first": "layer_page", "page_first_direct": "layer_page"}


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where this process sits, read from whatever fields the release's HiCacheStorageConfig has."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    tp_lcm_size: int = 0
    is_mla: bool = False
    split_heads: bool = False

    @classmethod
    def of(cls, config: Any) -> Ranks:
        """Read a storage config of any release; what it does not have keeps its default.

        With data-parallel attention SGLang's tp_rank counts inside the attention
        group: groups hold equal shards, and dp_rank says only who asks.
        """

        def number(name: str, default: int) -> int:
            value = getattr(config, name, None)
            return default if value is None else int(value)

        return cls(
            tp_rank=number("tp_rank", 0),
            tp_size=number("tp_size", 1),
            pp_rank=number("pp_rank", 0),
            pp_size=number("pp_size", 1),
            dp_rank=number("dp_rank", 0),
            cp_rank=number("attn_cp_rank", 0),
            cp_size=number("attn_cp_size", 1),
            dcp_rank=number("dcp_rank", 0),
            dcp_size=number("dcp_size", 1),
            tp_lcm_size=number("tp_lcm_size", 0),
            is_mla=bool(getattr(config, "is_mla_model", False)),
            split_heads=bool(getattr(config, "should_split_heads", False)),
        )

    @property
    def head_groups(self) -> int:
        """How many head groups a page of this rank is cut into; 1 where it is not cut."""
        return self.tp_lcm_size // self.tp_size if self.split_heads else 1

    def placement(self, pool: Any) -> Placement:
        """Say who asks, from where."""
        return Placement(
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            pp_rank=self.pp_rank,
            pp_size=self.pp_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_rank + 1,
            cp_rank=self.cp_rank,
            cp_size=self.cp_size,
            host_layout=str(getattr(pool, "layout", "page_first")),
        )


def component_of(
    name: str, pool: Any, geometry: Geometry, ranks: Ranks, *, draft_model: str | None = None, group: int = 0
) -> Component:
    """Describe one pool's pages.

    Args:
        name: SGLang's name of the pool, for example ``kv`` or ``mamba``.
        group: which head group of this rank, where ``ranks.split_heads``.
        draft_model: the draft model's identity, where the pool holds any of its layers.
    """
    layout = str(getattr(pool, "layout", "page_first"))
    order = _BYTE_ORDERS.get(layout, layout)
    return Component(
        name,
        shard=_shard(name, pool, layout, ranks, group),
        byte_order=f"flat_{order}" if geometry.kind == "flat" else order,
        format=_format(pool),
        page_nbytes=geometry.page_nbytes,
        draft_model=draft_model if _holds_draft_layers(name, pool) else None,
    )


def is_replicated(name: str, pool: Any, ranks: Ranks) -> bool:
    """Tell whether all tensor-parallel ranks hold equal pages of this pool."""
    if not ranks.is_mla or getattr(pool, "head_num", None) is not None:
        return False
    return name in REPLICATED_BESIDE_MLA or name.startswith(REPLICATED_PREFIX)


def _shard(name: str, pool: Any, layout: str, ranks: Ranks, group: int) -> Shard:
    pp = (ranks.pp_rank, ranks.pp_size) if ranks.pp_size > 1 else None
    cp = (ranks.cp_rank, ranks.cp_size) if ranks.cp_size > 1 else None
    dcp = (ranks.dcp_rank, ranks.dcp_size) if ranks.dcp_size > 1 else None
    if is_replicated(name, pool, ranks):
        return Shard(heads="replicated", pp=pp, cp=cp, dcp=dcp)
    # Ranks of different tensor-parallel sizes meet in head groups of tp_lcm_size.
    if ranks.tp_lcm_size and layout == "page_head" and not ranks.is_mla:
        first = ranks.tp_rank * ranks.head_groups + group
        return Shard(heads=(first, first + 1, ranks.tp_size * ranks.head_groups), pp=pp, cp=cp, dcp=dcp)
    return Shard(tp=(ranks.tp_rank, ranks.tp_size), pp=pp, cp=cp, dcp=dcp)


def _format(pool: Any) -> str:
    """Name how a value is laid out: dtype, SGLang's own tag for a special format, and the kind of pool."""
    dtype = str(getattr(pool, "dtype", "bytes")).removeprefix("torch.")
    tag = getattr(pool, "storage_format_tag", None)
    return "+".join([dtype, *([str(tag)] if tag else []), type(pool).__name__])


def _holds_draft_layers(name: str, pool: Any) -> bool:
    """True for a draft model's pool, and for a pool into which a draft model's layers are packed."""
    layers, target = getattr(pool, "layer_num", None), getattr(pool, "target_layer_num", None)
    return name.startswith("draft") or (target is not None and layers is not None and layers > target)
