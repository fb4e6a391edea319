"""What becomes of the host pools of SGLang 0.5.23 that the trees do not build; prints one JSON object."""

from __future__ import annotations

import json
import logging
import sys
import types
from typing import Any

import cpu_copies
import sgl_toy
import torch

cpu_copies.apply()

import rare_pools  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo, PageRowBufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool  # noqa: E402
from sglang.srt.mem_cache.page_interleave import PageInterleavePlacement, PageShardSpec  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4IndexKPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.page_interleave import PageInterleaveHostPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.unified import UnifiedPageEnvelopeHostPool  # noqa: E402

from hicache_sglang.adapter import HiCacheSGLang  # noqa: E402
from hicache_sglang.geometry import PoolRefused, geometry_of  # noqa: E402

PAGE, PAGES, ROW = 16, 6, 48
EXTRA = {"backend_name": "dynamic", "interface_v1": 1, "options": sgl_toy.OPTIONS}


def deepseek(layout: str, name: str = "deepseek_v4_c4", layers: int = 3) -> Any:
    return DeepSeekV4PagedHostPool(
        pool_name=name,
        device_buffers=[torch.zeros(PAGES, ROW, dtype=torch.uint8) for _ in range(layers)],
        item_bytes=ROW,
        num_host_pages=PAGES,
        slot_page_size=PAGE,
        layout=layout,
        pin_memory=False,
        page_aligned_only=True,
    )


def envelope() -> Any:
    buffer = torch.zeros(PAGES, 64 * PAGE, dtype=torch.uint8)
    device = types.SimpleNamespace(
        get_page_envelope_buffer=lambda: buffer,
        get_contiguous_buf_infos=lambda: ([buffer.data_ptr()], [buffer.nbytes], [64 * PAGE]),
        grow_direction="up",
        page_size=PAGE,
        size=PAGES * PAGE,
        host_capacity_tokens=None,
        start_layer=0,
        end_layer=1,
        device="cpu",
    )
    return UnifiedPageEnvelopeHostPool(device, 2.0, 0, PAGE, "page_first", pin_memory=False)


def interleaved() -> Any:
    spec = PageShardSpec(
        shard_rank=0, shard_size=2, page_size=PAGE, max_prefix_tokens=PAGE, chunk_tokens=PAGE
    )
    return PageInterleaveHostPool(deepseek("page_first"), PageInterleavePlacement(spec))


def attach(kv: Any, *, is_mla: bool = True, metered: bool = False) -> HiCacheSGLang:
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=is_mla,
        enable_storage_metrics=metered, is_page_first_layout=True, model_name="m", extra_config=dict(EXTRA),
    )  # fmt: skip
    backend = HiCacheSGLang(config, {})
    backend.register_mem_pool_host(kv)
    return backend


def refusal(pool: Any) -> str:
    """What attaching it says; the pool's pages must not be touched."""
    try:
        attach(pool)
    except PoolRefused as error:
        return error.value
    return "served"


def logical_anchor(layout: str) -> str:
    """DeepSeek V4: a KV pool without bytes, and two sidecars that decide."""
    sgl_toy.STORE.clear()
    anchor = LogicalHostPool(PAGES * PAGE, PAGE, layout)
    pools = {"deepseek_v4_c4": deepseek(layout), "swa": deepseek(layout, "swa", 2)}
    backend = attach(anchor)
    for name, pool in {"kv": anchor, **pools}.items():
        backend.register_mem_host_pool_v2(pool, PoolName(name))
    backend.on_host_pools_registered()
    for pool in pools.values():
        for part in pool.kv_buffer if isinstance(pool.kv_buffer, list) else [pool.kv_buffer]:
            part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
    keys = [f"{n:064x}" for n in range(4)]
    at = torch.arange(4 * PAGE)
    c4 = PoolTransfer(name=PoolName.DEEPSEEK_V4_C4, host_indices=at, keys=keys, indices_from_pool=PoolName.KV)
    swa = PoolTransfer(name=PoolName.SWA, host_indices=at[PAGE : 3 * PAGE], keys=keys[1:3],
                       hit_policy=PoolHitPolicy.TRAILING_PAGES)  # fmt: skip
    wanted = [pools["deepseek_v4_c4"].get_data_page(n * PAGE).clone() for n in range(4)]
    empty = backend.batch_exists_v2(keys, [c4, swa])
    stored = backend.batch_set_v2([c4, swa])
    anchored = backend.batch_set_v1(keys, at)
    hit = backend.batch_exists_v2(keys, [c4, swa])
    other = torch.cat([torch.arange(5 * PAGE, 6 * PAGE), torch.arange(4 * PAGE, 5 * PAGE)])
    loaded = backend.batch_get_v2(
        [PoolTransfer(name=PoolName.DEEPSEEK_V4_C4, host_indices=other, keys=keys[:2])]
    )
    got = [pools["deepseek_v4_c4"].get_data_page(n * PAGE) for n in (5, 4)]
    kv = backend.batch_get_v1(keys, at)
    backend.close()
    good = (
        (empty.kv_hit_pages, empty.restorable_prefix_pages) == (0, [])
        and stored == {"deepseek_v4_c4": [True] * 4, "swa": [True] * 2}
        and anchored == kv == [True] * 4
        and (hit.kv_hit_pages, hit.restorable_prefix_pages) == (3, [3])
        and loaded == {"deepseek_v4_c4": [True] * 2}
        and all(map(torch.equal, got, wanted[:2]))
        and not any(".kv_" in key for key in sgl_toy.STORE)
    )
    return "ok" if good else f"FAILED: {empty} {stored} {anchored} {hit} {loaded} {kv}"


def nvfp4(layout: str) -> Any:
    """MiniMax index keys: page rows with payload and scales together."""
    slab = torch.zeros(2, PAGES, ROW, dtype=torch.uint8)
    info = PageRowBufferInfo(slab=slab, rows=tuple(slab), row_bytes=ROW, page_size=PAGE, num_pages=PAGES)
    anchor = types.SimpleNamespace(page_size=PAGE, size=PAGES * PAGE, page_num=PAGES)
    return MiniMaxM3Nvfp4IndexKPoolHost(info, anchor, layout, pin_memory=False, start_layer=0, end_layer=2)


def mamba(*, side_states: bool) -> Any:
    """Mamba slots, with side states of their own element size where asked for."""
    slots = 5
    extra = (torch.zeros(slots, 3, dtype=torch.int32),) if side_states else ()
    info = MambaStateBufferInfo(
        conv=(torch.zeros(2, slots, 4, 3, dtype=torch.bfloat16),),
        temporal=torch.zeros(2, slots, 2, 4, dtype=torch.float32),
        extra_checkpoint_buffers=extra,
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=slots, layout="page_first_direct")


def sidecar(pool: Any, name: PoolName) -> str:
    """Store a pool's pages, overwrite them, read them back: is every byte there, and by which way."""
    sgl_toy.STORE.clear()
    backend = attach(deepseek("page_first"), is_mla=False)
    backend.register_mem_host_pool_v2(pool, name)
    tokens, keys = pool.page_size, [f"{n:064x}" for n in range(3)]
    at = torch.arange(3 * tokens)

    def fill(value: int | None) -> list[bytes]:
        for page in range(3):
            flat = pool.get_dummy_flat_data_page()
            raw = flat.view(torch.uint8)
            raw.copy_(
                torch.randint(0, 256, raw.shape, dtype=torch.uint8)
                if value is None
                else raw.new_full((), value)
            )
            pool.set_from_flat_data_page(page * tokens, flat)
        return flats()

    def flats() -> list[bytes]:
        return [
            pool.get_data_page(n * tokens, flat=True).view(torch.uint8).numpy().tobytes() for n in range(3)
        ]

    wanted = fill(None)
    stored = backend.batch_set_v2([PoolTransfer(name=name, host_indices=at, keys=keys)])
    fill(7)
    loaded = backend.batch_get_v2([PoolTransfer(name=name, host_indices=at, keys=keys)])
    kind = geometry_of(pool).kind
    backend.close()
    good = stored == loaded == {name: [True] * 3} and flats() == wanted
    return f"ok ({kind})" if good else f"FAILED: {stored} {loaded} {kind}"


def split(pool: Any) -> str:
    """Store pages whose parts lie in buffers of their own, read them back elsewhere, compare every part."""
    sgl_toy.STORE.clear()
    backend = attach(pool)
    parts, tokens = rare_pools.parts_of(pool), pool.page_size
    for part in parts:
        raw = part.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    before = [part.view(torch.uint8).clone() for part in parts]
    keys = [f"{n:064x}" for n in range(2)]
    stored = backend.batch_set_v1(keys, torch.arange(2 * tokens))
    elsewhere = torch.cat([torch.arange(4 * tokens, 5 * tokens), torch.arange(2 * tokens, 3 * tokens)])
    loaded = backend.batch_get_v1(keys, elsewhere)
    kind = geometry_of(pool).kind
    backend.close()
    order = [0, 1, 1, 3, 0, *range(5, len(parts[0]))]
    moved = all(
        torch.equal(part.view(torch.uint8), was[order]) for part, was in zip(parts, before, strict=True)
    )
    good = stored == loaded == [True] * 2 and moved
    return f"ok ({kind}, {len(parts)} parts)" if good else f"FAILED: {stored} {loaded} {moved}"


def metrics() -> str:
    """What get_stats gives to SGLang's own collector."""
    backend = attach(deepseek("page_first"), metered=True)
    keys, at = [f"{n:064x}" for n in range(2)], torch.arange(2 * PAGE)
    backend.batch_set_v1(keys, at)
    backend.batch_get_v1(keys, at)
    stats = backend.get_stats()
    backend.close()
    return f"{type(stats).__name__} {stats.backup_pgs} {stats.prefetch_pgs}"


def main() -> None:
    logging.disable(logging.CRITICAL)
    found = {
        "envelope": refusal(envelope()),
        "interleaved": refusal(interleaved()),
        "deepseek segments": [
            len(geometry_of(deepseek(layout)).segments) for layout in ("layer_first", "page_first")
        ],
        "deepseek bytes": geometry_of(deepseek("page_first")).page_nbytes,
        "nvfp4 layer_first": sidecar(nvfp4("layer_first"), PoolName.INDEXER),
        "nvfp4 page_first": sidecar(nvfp4("page_first"), PoolName.INDEXER),
        "mxfp8": refusal(rare_pools.mxfp8()),
        "page_unified": refusal(rare_pools.page_unified()),
        "kv_split": split(rare_pools.kv_split()),
        "kv_split, index keys": split(rare_pools.kv_split(index=True)),
        "kv_split, index keys, scales": split(rare_pools.kv_split(index=True, scales=True)),
        "kv_split, packed fp8": split(rare_pools.kv_split(index=True, scales=True, packed_fp8=True)),
        **{
            f"{name} {layout}": sidecar(make(layout), pool_name)
            for name, make, pool_name in (
                ("k only", rare_pools.k_only, PoolName.INDEXER),
                ("qsa", rare_pools.qsa, PoolName.INDEXER),
            )
            for layout in ("layer_first", "page_first", "page_first_direct")
        },
        "mamba": sidecar(mamba(side_states=False), PoolName.MAMBA),
        "mamba side states": sidecar(mamba(side_states=True), PoolName.MAMBA),
        "metrics": metrics(),
        "anchor layer_first": logical_anchor("layer_first"),
        "anchor page_first": logical_anchor("page_first"),
        "anchor page_first_direct": logical_anchor("page_first_direct"),
    }
    sys.stdout.write("RESULT " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
