"""One SGLang release on a machine that has torch and little else.

``sglang/__init__.py`` imports half a GPU stack, so it is not run: the package is
put in place by hand and modules below ``sglang.srt`` are imported on their own.
What cannot be imported so (controllers, host pools) is taken from the release's
own source, method by method: the functions that run are SGLang's, only the
object that they are called on is ours.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import logging
import sys
import types
from pathlib import Path
from typing import Any

import torch
from sgl_release_source import functions_of


def prepare() -> Path:
    """Make ``sglang.srt`` importable without running ``sglang/__init__.py``; returns the package's folder."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed here", name="sglang")
    folder = Path(next(iter(spec.submodule_search_locations)))
    package = types.ModuleType("sglang")
    package.__path__ = [str(folder)]
    package.__spec__ = spec
    sys.modules["sglang"] = package
    source = (folder / "srt/mem_cache/hicache_storage.py").read_text()
    if (
        "from sglang.srt.mem_cache.memory_pool_host import HostKVCache" in source
        and "TYPE_CHECKING" not in source
    ):
        stand_in = types.ModuleType("sglang.srt.mem_cache.memory_pool_host")
        stand_in.HostKVCache = object
        sys.modules[stand_in.__name__] = stand_in
    return folder


def methods(path: Path, class_name: str, names: list[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """Compile methods of a class out of a source file, to run in a namespace of our choice."""
    wanted = [node for name, node in functions_of(path, class_name).items() if name in names]
    body = [ast.parse("from __future__ import annotations").body[0], *wanted]
    exec(compile(ast.Module(body=body, type_ignores=[]), str(path), "exec"), namespace)
    return {node.name: namespace[node.name] for node in wanted}


_POOL_METHODS = [
    "get_data_page",
    "get_dummy_flat_data_page",
    "set_from_flat_data_page",
    "get_page_buffer_meta",
    "get_split_heads_page_buffer_meta",
    "_storage_page_index",
]


def host_pool(
    folder: Path,
    kind: str,
    layout: str,
    *,
    pages: int = 8,
    page_size: int = 4,
    layers: int = 3,
    heads: int = 2,
) -> Any:
    """Make a host pool whose page accessors are the release's own; ``kind`` is ``mha`` or ``mla``."""
    class_name = "MHATokenToKVPoolHost" if kind == "mha" else "MLATokenToKVPoolHost"
    split = folder / f"srt/mem_cache/pool_host/{kind}.py"
    path = split if split.exists() else folder / "srt/mem_cache/memory_pool_host.py"
    found = methods(path, class_name, _POOL_METHODS, {"torch": torch, "Optional": Any})
    pool = type(class_name, (), dict(found))()
    dim, rank, rope = 8, 12, 4
    pool.__dict__.update(
        layout=layout,
        page_size=page_size,
        page_num=pages,
        size=pages * page_size,
        dtype=torch.bfloat16,
        device="cpu",
        pin_memory=False,
        layer_num=layers,
        start_layer=0,
        end_layer=layers,
    )
    if kind == "mha":
        pool.__dict__.update(
            head_num=heads, head_dim=dim, v_head_dim=dim, size_per_token=2 * heads * dim * layers * 2
        )
        shape = {
            "layer_first": (2, layers, pool.size, heads, dim),
            "page_first": (2, pool.size, layers, heads, dim),
            "page_first_direct": (2, pages, layers, page_size, heads, dim),
            "page_head": (2, pages, heads, page_size, layers, dim),
        }[layout]
    else:
        width = rank + rope
        pool.__dict__.update(
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            kv_cache_dim=width,
            size_per_token=width * layers * 2,
            dcp_size=1,
            dcp_rank=0,
            logical_page_size=page_size,
        )
        shape = {
            "layer_first": (layers, pool.size, 1, width),
            "page_first": (pool.size, layers, 1, width),
            "page_first_direct": (pages, layers, page_size, 1, width),
        }[layout]
    pool.kv_buffer = torch.zeros(shape, dtype=torch.bfloat16)
    return pool


def fill(pool: Any, seed: int = 1) -> None:
    """Fill a pool's memory with bytes that differ everywhere."""
    generator = torch.Generator().manual_seed(seed)
    raw = pool.kv_buffer.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def indices_of(pages: list[int], page_size: int) -> torch.Tensor:
    """Give the host indices of whole pages."""
    return torch.cat(
        [torch.arange(page * page_size, (page + 1) * page_size, dtype=torch.int64) for page in pages]
    )


def storage_config(extra_config: dict[str, Any], **values: Any) -> Any:
    """Make the release's HiCacheStorageConfig, each of its fields as its controller fills it."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    filled = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True,
        "model_name": "org/model", "tp_lcm_size": None, "should_split_heads": False, "dp_rank": 0,
        "dcp_size": 1, "dcp_rank": 0, "logical_page_size": None,
    } | values  # fmt: skip
    names = [field.name for field in dataclasses.fields(HiCacheStorageConfig)]
    return HiCacheStorageConfig(
        **{name: filled[name] for name in names if name in filled}, extra_config=extra_config
    )


_CONTROLLER_METHODS = [
    "_generic_page_get",
    "_generic_page_set",
    "_page_get_zero_copy",
    "_page_set_zero_copy",
    "_page_transfer",
    "_page_transfer_kv_batch",
    "_page_backup",
    "_storage_hit_query",
]


class _Operation:
    """What the controllers' methods use of their operations."""

    def __init__(self, host_indices: torch.Tensor, token_ids: list[int]) -> None:
        self.request_id = "r"
        self.host_indices = host_indices
        self.token_ids = token_ids
        self.last_hash = None
        self.prefix_keys = None
        self.pool_transfers = None
        self.hash_value: list[str] = []
        self.completed_tokens = 0
        self.terminated = False

    def increment(self, tokens: int) -> bool:
        self.completed_tokens += tokens
        return True

    def mark_terminate(self) -> None:
        self.terminated = True

    def is_terminated(self) -> bool:
        return self.terminated


class Controller:
    """The release's own storage path of HiCacheController, on an object of ours."""

    def __init__(self, folder: Path, storage: Any, pool: Any, *, zero_copy: bool) -> None:
        import hashlib

        from sglang.srt.mem_cache import hicache_storage

        def hashes(tokens: Any, prior: str | None = None, page_size: int | None = None) -> Any:
            """SHA-256 chained over pages: the pure form of the releases' native one."""

            def one(part: Any, before: str | None) -> str:
                digest = hashlib.sha256(bytes.fromhex(before) if before else b"")
                for token in part:
                    digest.update(int(token).to_bytes(4, "little"))
                return digest.hexdigest()

            if page_size is None:
                return one(tokens, prior)
            chain = []
            for start in range(0, len(tokens), page_size):
                prior = one(tokens[start : start + page_size], prior)
                chain.append(prior)
            return chain

        namespace = dict(vars(hicache_storage)) | {
            "torch": torch,
            "logger": logging.getLogger("controller"),
            "STORAGE_BATCH_SIZE": 128,
            "get_storage_hash_str": hashes,
            "PrefetchAck": lambda **fields: types.SimpleNamespace(**fields),
        }
        self._methods = methods(
            folder / "srt/managers/cache_controller.py", "HiCacheController", _CONTROLLER_METHODS, namespace
        )
        for name, function in self._methods.items():
            setattr(self, name, types.MethodType(function, self))
        self.storage_backend = storage
        self.mem_pool_host = self.storage_host_pool = pool
        self.page_size = pool.page_size
        self.storage_batch_size = 128
        self.has_draft = False
        self.get_hash_str = hashes
        self.prefetch_sync_queue = types.SimpleNamespace(put=lambda ack: None)
        self.append_host_mem_release = lambda indices, extra=None: None
        self.page_get_func = self._page_get_zero_copy if zero_copy else self._generic_page_get
        self.page_set_func = self._page_set_zero_copy if zero_copy else self._generic_page_set

    def backup(self, tokens: list[int], pages: list[int]) -> int:
        """Write pages as the backup thread does; returns the tokens that it counts as stored."""
        operation = _Operation(indices_of(pages, self.page_size), tokens)
        operation.hash_value = self.get_hash_str(tokens, None, self.page_size)
        self._page_backup(operation)
        return operation.completed_tokens

    def prefetch(self, tokens: list[int], pages: list[int]) -> tuple[int, int]:
        """Ask and read as the prefetch threads do; returns the tokens found and the tokens read."""
        operation = _Operation(indices_of(pages, self.page_size), tokens)
        operation.hash_value, found = self._storage_hit_query(operation)
        operation.host_indices = operation.host_indices[:found]
        completed = self._page_transfer(operation)
        return found, operation.completed_tokens if completed is None else completed * self.page_size
