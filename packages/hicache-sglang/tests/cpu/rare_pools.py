"""Host pools of SGLang 0.5.23 for hardware and models that no test machine has, as real objects on a CPU.

What an accelerator's pool hands to a host pool is a description of tensors; here
the tensors are the CPU's. MXFP8's host pool insists on a CUDA kernel for its
copies, which no storage needs, so that demand is waived.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    KVScaleBuffers,
    KVScaleLayout,
    MHABufferInfo,
    MLABufferInfo,
    MLASplitBuffers,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKOnlyPool
from sglang.srt.mem_cache.pool_host import mha_mxfp8
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost

LAYERS, PAGES = 2, 5


def mxfp8() -> Any:
    """Block-scaled MHA: fp8 payload, and scales in buffers of their own."""
    page, heads, dim = 128, 2, 64
    tokens = PAGES * page
    k, v = (
        tuple(torch.zeros(tokens, heads, dim, dtype=torch.float8_e4m3fn) for _ in range(LAYERS))
        for _ in range(2)
    )
    scales = tuple(torch.zeros(PAGES, heads, 32, page // 32, dim // 32, dtype=torch.uint8) for _ in k)
    pointers = torch.tensor([each.data_ptr() for each in k], dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.PAGED_NHD
        ),
        page_size=page,
        head_num=heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=torch.float8_e4m3fn,
        device=torch.device("cpu"),
        scales=KVScaleBuffers(k=scales, v=scales, layout=KVScaleLayout.MXFP8_INTERLEAVED),
    )

    class OnCpu(mha_mxfp8.MHATokenToKVPoolMXFP8Host):
        def _init_write_back_staging_buffers(self, *arguments: Any) -> None:
            super()._init_write_back_staging_buffers(*arguments)
            self.can_use_write_back_jit, self.staging_page_capacity = True, 1

    mha_mxfp8.can_use_write_back_jit_kernel = lambda **_: True
    return OnCpu(
        info, 1.0, 0, page, "page_first", pin_memory=False,
        device_capacity_tokens=tokens, start_layer=0, end_layer=LAYERS,
    )  # fmt: skip


def kv_split(*, index: bool = False, scales: bool = False, packed_fp8: bool = False) -> Any:
    """An NPU's MLA: latent and rotary parts apart, with index keys and their scales where asked for."""
    page, rank, rope, width = 16, 32, 8, 16
    dtype = torch.float8_e4m3fn if packed_fp8 else torch.bfloat16
    k_width = rank + 4 + 2 * rope if packed_fp8 else rank
    tokens = PAGES * page

    def rows(layers: int, columns: int, kind: torch.dtype) -> torch.Tensor:
        return torch.zeros(layers, PAGES, page, 1, columns, dtype=kind)

    split = MLASplitBuffers(
        k=rows(LAYERS, k_width, dtype),
        v=rows(LAYERS, 0 if packed_fp8 else rope, torch.bfloat16),
        index_k=rows(1, width, dtype) if index else None,
        index_scales=rows(1, 1, torch.float32) if scales else None,
        index_layer_indices=(1,) if index else (),
        k_width=k_width,
        v_width=0 if packed_fp8 else rope,
        index_width=width if index else 0,
    )
    info = MLABufferInfo(
        buffers=split,
        data_ptrs=None,
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=page,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        kv_cache_dim=k_width,
        dtype=dtype,
        device=torch.device("cpu"),
        packed_fp8=packed_fp8,
        native_buffers=lambda: split,
    )
    return MLATokenToKVPoolHost(
        info, 1.0, 0, page, "page_first_kv_split", pin_memory=False,
        override_kv_cache_dim=k_width if packed_fp8 else None, device_capacity_tokens=tokens,
        start_layer=0, end_layer=LAYERS, target_layer_num=LAYERS,
    )  # fmt: skip


def parts_of(pool: Any) -> list[torch.Tensor]:
    """Give a split pool's buffers that hold something, pages first."""
    names = ("k_buffer", "v_buffer", "index_k_buffer", "index_k_scale_buffer")
    found = [getattr(pool, name, None) for name in names]
    if pool.dsa_kv_cache_store_fp8:
        found[1] = None  # packed into k; SGLang neither moves nor stores it
    return [each for each in found if each is not None]


def _anchor(layout: str) -> Any:
    page = 16
    return types.SimpleNamespace(
        page_size=page, size=PAGES * page, page_num=PAGES, layout=layout, device="cpu", pin_memory=False
    )


def k_only(layout: str) -> Any:
    """MiniMax's index keys, which have no values."""
    device = MHATokenToKOnlyPool(
        size=PAGES * 16, page_size=16, dtype=torch.bfloat16, head_num=1, head_dim=8, layer_num=LAYERS,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    return MHATokenToKOnlyPoolHost(device, _anchor(layout), layout, pin_memory=False)


def qsa(layout: str) -> Any:
    """Compressed keys of QSA: page rows, a quarter as many as tokens."""
    device = types.SimpleNamespace(
        qsa_compress_ratio=4,
        qsa_compressed_k_buffer_pool=[
            torch.zeros(PAGES * 4, 1, 8, dtype=torch.bfloat16) for _ in range(LAYERS)
        ],
    )
    return QSAIndexerPoolHost(device, _anchor(layout))


def page_unified() -> Any:
    """The layout of the topology-free key grid, which no flag of 0.5.23 chooses."""
    page, heads, dim = 16, 2, 8
    k, v = (
        tuple(torch.zeros(PAGES * page, heads, dim, dtype=torch.bfloat16) for _ in range(LAYERS))
        for _ in range(2)
    )
    pointers = torch.tensor([each.data_ptr() for each in k], dtype=torch.uint64)
    info = MHABufferInfo(
        buffers=KVBuffers(k=k, v=v, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD),
        page_size=page, head_num=heads, head_dim=dim, v_head_dim=dim, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        info, 1.0, 0, page, "page_unified", pin_memory=False,
        device_capacity_tokens=PAGES * page, start_layer=0, end_layer=LAYERS,
    )  # fmt: skip
