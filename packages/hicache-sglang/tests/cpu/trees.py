"""The real UnifiedRadixCache and HybridCacheController of SGLang 0.5.23 over small CPU pools.

One life of a prefix: insert it, let the tree back it up to host memory and to
storage, throw tree and pools away, ask a fresh tree for it, load it back, and
compare every byte on the device.
"""

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

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

PAGE, PAGES, LAYERS, SIZE = 16, 40, 2, 2048
TOKENS = list(range(1, 1 + PAGE * PAGES))
IO = {"layer_first": "direct", "page_first": "kernel", "page_first_direct": "direct", "page_head": "kernel"}


class Tree:
    """One tree with its pools, storage attached."""

    def __init__(self, kind: str, layout: str, backend: str, extra: dict[str, Any]) -> None:
        arguments = ServerArgs(
            model_path="dummy",
            device="cpu",
            page_size=PAGE,
            hicache_io_backend=IO[layout],
            hicache_mem_layout=layout,
            hicache_write_policy="write_through",
            hicache_storage_backend=backend,
            hicache_storage_backend_extra_config=json.dumps({"prefetch_threshold": 1, **extra}),
            hicache_storage_prefetch_policy="wait_complete",
            hicache_ratio=1.5,
        )
        set_global_server_args_for_scheduler(arguments)
        self.kind = kind
        self.pool = device_pool(kind)
        self.allocator = TokenToKVPoolAllocator(
            size=SIZE, dtype=torch.bfloat16, device="cpu", kvcache=self.pool, need_sort=False
        )
        params = CacheInitParams(
            req_to_token_pool=ReqToTokenPool(
                size=4, max_context_len=SIZE, device="cpu", enable_memory_saver=False
            ),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            disable=False,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = UnifiedRadixCache(params=params)
        self.tree.init_hicache(arguments, params)

    @property
    def controller(self) -> Any:
        return self.tree.cache_controller

    def insert(self) -> list[torch.Tensor]:
        """Put random KV on the device and its tokens into the tree; wait until it is in storage."""
        at = self.allocator.alloc(len(TOKENS))
        for rows in self.buffers():
            rows[at] = torch.randint(0, 256, rows[at].view(torch.uint8).shape, dtype=torch.uint8).view(rows.dtype)
        self.tree.insert(InsertParams(key=key(), value=at))
        node = self.tree.match_prefix(MatchPrefixParams(key=key())).last_device_node
        core = self.tree.tree_core
        if not core.is_backuped(node):
            self.tree._execute_and_commit_kv_backup(BackupKV(node_ids=core.build_backup_node_ids(node, False)), False)
        self.until(lambda: core.is_backuped(node))
        self.until(lambda: not self.tree.ongoing_backup)
        return [rows[at].clone() for rows in self.buffers()]

    def prefetch(self) -> tuple[int, list[torch.Tensor]]:
        """Ask storage for the prefix and load it back; returns the tokens found and their KV."""
        handle = CacheRequestHandle("r", 0)
        match = self.tree.match_prefix(MatchPrefixParams(key=key()))
        self.tree.prefetch_from_storage(handle, match.last_host_node, array("q", TOKENS), None, None)
        self.until(lambda: self.tree.check_prefetch_progress(handle))
        match = self.tree.match_prefix(MatchPrefixParams(key=key()))
        found = match.host_hit_length
        if not found:
            return 0, []
        self.tree.load_back_threshold = 0
        self.tree.load_back(match.last_host_node)
        self.tree.ready_to_load_host_cache()
        self.until(lambda: not self.tree.ongoing_load_back)
        at = self.tree.path_device_indices(self.tree.match_prefix(MatchPrefixParams(key=key())).last_device_node)
        return found, [rows[at] for rows in self.buffers()]

    def buffers(self) -> list[torch.Tensor]:
        if isinstance(self.pool, MLATokenToKVPool):
            return list(self.pool.kv_buffer)
        return [*self.pool.k_buffer, *self.pool.v_buffer]

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


def key() -> RadixKey:
    return RadixKey(array("q", TOKENS))


def device_pool(kind: str) -> Any:
    common = dict(size=SIZE, page_size=PAGE, dtype=torch.bfloat16, layer_num=LAYERS, device="cpu", enable_memory_saver=False)
    if kind == "mla":
        return MLATokenToKVPool(kv_lora_rank=16, qk_rope_head_dim=8, **common)
    v_head_dim = {"v_head_dim": 16} if kind == "asymmetric" else {}
    return MHATokenToKVPool(head_num=2, head_dim=8, **v_head_dim, **common)


def life(kind: str, layout: str, backend: str, extra: dict[str, Any]) -> str:
    """Run one life; says what went wrong, or ``ok`` with the functions that SGLang chose."""
    first = Tree(kind, layout, backend, extra)
    way = first.controller.page_get_func.__name__.strip("_")
    wanted = first.insert()
    first.close()
    second = Tree(kind, layout, backend, extra)
    found, got = second.prefetch()
    second.close()
    equal = len(got) == len(wanted) and all(map(torch.equal, map(_raw, got), map(_raw, wanted)))
    if found != len(TOKENS) or not equal:
        return f"FAILED: {found} of {len(TOKENS)} tokens, equal: {equal}"
    return f"ok ({way})"


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


_rank = None


def be_rank(rank: int = 0, size: int = 1) -> None:
    """Make this process this rank of a tensor-parallel group, as far as SGLang's storage config asks."""
    global _rank
    if _rank is not None:
        _rank.__exit__(None, None, None)
    _rank = get_parallel().override(tp_rank=rank, tp_size=size, pp_rank=0, pp_size=1)
    _rank.__enter__()
