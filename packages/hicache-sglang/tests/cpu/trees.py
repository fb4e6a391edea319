"""The real UnifiedRadixCache and HybridCacheController of SGLang 0.5.23 over small CPU pools.

One life of a prefix: insert it, let the tree back it up to host memory and to
storage, throw tree and pools away, ask a fresh tree for it, load it back, and
compare every byte on the device.
"""

# ruff: noqa: E402 - the tree core is chosen, and the copies replaced, before SGLang is imported
from __future__ import annotations

import json
import os
import threading
import time
from array import array
from typing import Any

os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")

import cpu_copies
import torch

cpu_copies.apply()

from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.components import mamba as mamba_component
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

PAGES, LAYERS, SIZE = 40, 2, 4096
IO = {"layer_first": "direct", "page_first": "kernel", "page_first_direct": "direct", "page_head": "kernel"}


# Both ask the model's config, of which there is none here.
mamba_component.mamba_cache_chunk_size = lambda: 16
mamba_component.mamba_checkpoint_grid = lambda tree_page: 16


class Tree:
    """One tree with its pools, storage attached."""

    def __init__(
        self, kind: str, layout: str, backend: str, extra: dict[str, Any], *, rank: int = 0, size: int = 1
    ) -> None:
        self.page = 64 if kind == "dsa" else 16
        self.tokens = list(range(1, 1 + self.page * PAGES))
        arguments = ServerArgs(
            model_path="dummy",
            device="cpu",
            page_size=self.page,
            hicache_io_backend=IO[layout],
            hicache_mem_layout=layout,
            hicache_write_policy="write_through",
            hicache_storage_backend=backend,
            hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 1, **extra}),
            hicache_storage_prefetch_policy="wait_complete",
            hicache_ratio=1.5,
        )
        be_rank()
        set_global_server_args_for_scheduler(arguments)
        be_rank(rank, size)
        self.has_mamba = kind.endswith("mamba")
        self.requests = mamba_requests() if self.has_mamba else plain_requests()
        self.pool = device_pool(kind, self.page, self.requests)
        self.allocator = TokenToKVPoolAllocator(
            size=SIZE, dtype=torch.bfloat16, device="cpu", kvcache=self.pool, need_sort=False
        )
        params = CacheInitParams(
            req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
            disable=False,
            enable_mamba_extra_buffer=self.has_mamba,
            tree_components=(ComponentType.FULL, *([ComponentType.MAMBA] if self.has_mamba else [])),
        )
        self.tree = UnifiedRadixCache(params=params)
        self.tree.init_hicache(arguments, params)

    @property
    def controller(self) -> Any:
        return self.tree.cache_controller

    def insert(self, *, randomise: bool = True) -> list[torch.Tensor]:
        """Put random state on the device and its tokens into the tree; wait until it is in storage."""
        at = self.allocator.alloc(len(self.tokens))
        slot = self.requests.mamba_allocator.alloc(1) if self.has_mamba else None
        if randomise:
            self.randomise([*self.kv(), *self.states()])
        self.tree.insert(InsertParams(key=self.key(), value=at, mamba_value=slot))
        node = self.tree.match_prefix(MatchPrefixParams(key=self.key())).last_device_node
        core = self.tree.tree_core
        if not core.is_backuped(node):
            self.tree._execute_and_commit_kv_backup(
                BackupKV(node_ids=core.build_backup_node_ids(node, False)), False
            )
        self.until(lambda: core.is_backuped(node))
        self.until(lambda: not self.tree.ongoing_backup)
        return self.taken(at, slot)

    def prefetch(self) -> tuple[int, list[torch.Tensor]]:
        """Ask storage for the prefix and load it back; returns the tokens found and their state."""
        handle = CacheRequestHandle("r", 0)
        match = self.tree.match_prefix(MatchPrefixParams(key=self.key()))
        self.tree.prefetch_from_storage(handle, match.last_host_node, array("q", self.tokens), None, None)
        self.until(lambda: self.tree.check_prefetch_progress(handle))
        match = self.tree.match_prefix(MatchPrefixParams(key=self.key()))
        found = match.host_hit_length
        if not found:
            return 0, []
        self.tree.load_back_threshold = 0
        self.tree.load_back(match.last_host_node)
        self.tree.ready_to_load_host_cache()
        self.until(lambda: not self.tree.ongoing_load_back)
        node = self.tree.match_prefix(MatchPrefixParams(key=self.key())).last_device_node
        slot = None
        if self.has_mamba:
            slot = self.tree.tree_core.get_component_device_value(node, ComponentType.MAMBA)
        return found, self.taken(self.tree.path_device_indices(node), slot)

    def randomise(self, tensors: list[torch.Tensor]) -> None:
        for rows in tensors:
            raw = rows.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))

    def taken(self, at: torch.Tensor, slot: torch.Tensor | None) -> list[torch.Tensor]:
        """Copy out what the prefix has on the device: KV, index keys, Mamba state."""
        pages = at[:: self.page] // self.page
        kv = [rows[at].clone() for rows in kv_rows(self.pool)]
        index = [rows[pages].clone() for rows in getattr(self.pool, "index_k_with_scale_buffer", ())]
        return kv + index + [state[:, slot].clone() for state in self.states()]

    def kv(self) -> list[torch.Tensor]:
        return [*kv_rows(self.pool), *getattr(self.pool, "index_k_with_scale_buffer", ())]

    def states(self) -> list[torch.Tensor]:
        if not self.has_mamba:
            return []
        cache = self.requests.mamba_pool.mamba_cache
        return [*cache.conv, cache.temporal]

    def key(self) -> RadixKey:
        return RadixKey(array("q", self.tokens))

    def until(self, condition: Any, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self.tree.check_hicache_events()
            if condition():
                return
            if time.monotonic() > deadline:
                raise TimeoutError("the tree did not get there")
            threading.Event().wait(0.001)

    def close(self) -> None:
        self.tree.shutdown()
        self.tree.release_host_resources()


def kv_rows(pool: Any) -> list[torch.Tensor]:
    pool = getattr(pool, "full_kv_pool", pool)
    if isinstance(pool, MLATokenToKVPool):
        return list(pool.kv_buffer)
    return [*pool.k_buffer, *pool.v_buffer]


def plain_requests() -> Any:
    return ReqToTokenPool(size=4, max_context_len=SIZE, device="cpu", enable_memory_saver=False)


def mamba_requests() -> Any:
    """Two Mamba layers beside two attention layers."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=16,
        n_groups=1,
        num_heads=2,
        head_dim=8,
        state_size=4,
        conv_kernel=4,
    )
    return HybridReqToTokenPool(
        size=4,
        mamba_size=8,
        mamba_spec_state_size=0,
        max_context_len=SIZE,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]),
        mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=True,
    )


def device_pool(kind: str, page: int, requests: Any) -> Any:
    common = dict(size=SIZE, page_size=page, dtype=torch.bfloat16, device="cpu", enable_memory_saver=False)
    mla = dict(kv_lora_rank=16, qk_rope_head_dim=8)
    if kind == "dsa":
        return DSATokenToKVPool(layer_num=LAYERS, index_head_dim=128, kv_cache_dim=24, **mla, **common)
    if kind.endswith("mamba"):
        return HybridLinearKVPool(
            head_num=2,
            head_dim=8,
            full_attention_layer_ids=[1, 3],
            mamba_pool=requests.mamba_pool,
            use_mla=kind.startswith("mla"),
            **(mla if kind.startswith("mla") else {}),
            **common,
        )
    if kind == "mla":
        return MLATokenToKVPool(layer_num=LAYERS, **mla, **common)
    v_head_dim = {"v_head_dim": 16} if kind == "asymmetric" else {}
    return MHATokenToKVPool(layer_num=LAYERS, head_num=2, head_dim=8, **v_head_dim, **common)


def life(kind: str, layout: str, backend: str, extra: dict[str, Any]) -> str:
    """Run one life; says what went wrong, or ``ok`` with the functions that SGLang chose."""
    torch.manual_seed(len(kind) + len(layout))
    first = Tree(kind, layout, backend, extra)
    way = first.controller.page_get_func.__name__.strip("_")
    wanted = first.insert()
    first.close()
    second = Tree(kind, layout, backend, extra)
    found, got = second.prefetch()
    second.close()
    equal = len(got) == len(wanted) and all(map(torch.equal, map(_raw, got), map(_raw, wanted)))
    if found != len(first.tokens) or not equal:
        return f"FAILED: {found} of {len(first.tokens)} tokens, equal: {equal}"
    return f"ok ({way})"


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


_rank = None


def be_rank(rank: int = 0, size: int = 1) -> None:
    """Make this process this rank of a tensor-parallel group, as far as SGLang's storage config asks."""
    global _rank
    if _rank is not None:
        _rank.__exit__(None, None, None)
    attention = {"attn_tp_size": size, "attn_tp_rank": rank, "moe_tp_size": size} if size > 1 else {}
    _rank = get_parallel().override(tp_rank=rank, tp_size=size, pp_rank=0, pp_size=1, **attention)
    _rank.__enter__()


def two_ranks(layout: str, backend: str, extra: dict[str, Any]) -> str:
    """MLA beside Mamba on two ranks: KV is written by the first for both, each has a state of its own."""
    wanted = []
    for rank in (0, 1):
        tree = Tree("mla_mamba", layout, backend, extra, rank=rank, size=2)
        torch.manual_seed(7)
        tree.randomise(tree.kv())
        torch.manual_seed(70 + rank)
        tree.randomise(tree.states())
        wanted.append(tree.insert(randomise=False))
        tree.close()
    outcomes = []
    for rank in (0, 1):
        tree = Tree("mla_mamba", layout, backend, extra, rank=rank, size=2)
        found, got = tree.prefetch()
        whole = found == len(tree.tokens) and all(map(torch.equal, map(_raw, got), map(_raw, wanted[rank])))
        tree.close()
        outcomes.append(whole)
    states = [rank[-2:] for rank in wanted]
    differ = not any(map(torch.equal, map(_raw, states[0]), map(_raw, states[1])))
    return "ok" if outcomes == [True, True] and differ else f"FAILED: {outcomes}, states differ: {differ}"
