"""open_layers: an instance on a namespace's LMCache engine, which a canary has proven.

LMCache's calls are not public: their names, what they yield and when, what they
hold. A version that changed one would show as misses at best. So the first
instance of an engine sends one chunk through it before an engine's KV goes.
"""

from __future__ import annotations

from hicache_core.errors import BackendIncompatible, BackendUnavailable, HiCacheError
from hicache_lmcache.engines import EngineKey, SharedEngine, join, leave, load
from hicache_lmcache.layers import LayerPools, LayerStore

_CANARY = "hicache canary"
_BLOCK_NBYTES = 4096


def open_layers(
    pools: LayerPools, namespace: str, *, chunk_tokens: int, cpu_nbytes: int, remote_url: str = ""
) -> LayerStore:
    """Open an instance on a namespace's engine, which is made when this process has none.

    The first instance proves the engine: one chunk is stored, found, loaded layer by layer and removed, so
    that a version whose calls mean something else is refused.

    Args:
        namespace: whose KV this is; part of every key.
        chunk_tokens: LMCache's chunk.
        cpu_nbytes: LMCache's memory, for all instances that share the engine.

    Raises: BackendDependencyMissing, BackendIncompatible, BackendUnavailable.
    """
    layer = pools.keys[0]
    heads, width = int(layer.shape[-2]), int(layer.shape[-1])
    key = EngineKey(
        namespace,
        pools.num_layers,
        heads,
        width,
        str(layer.device),
        layer.dtype,
        chunk_tokens,
        cpu_nbytes,
        remote_url,
    )
    shared = join(key)
    try:
        with shared.proving:
            if not shared.proven:
                _sing(shared)
            shared.proven = True
        return LayerStore(pools, shared)
    except BaseException:
        leave(shared)
        raise


def _sing(shared: SharedEngine) -> None:
    torch, key = load("torch"), shared.key
    row_nbytes = key.heads * key.width * key.dtype.itemsize
    # LMCache's staging buffer is as large as the memory, and hands out blocks of 4 KiB.
    shape = (key.chunk_tokens + -(-_BLOCK_NBYTES // row_nbytes), key.heads, key.width)
    memory = [torch.zeros(shape, dtype=key.dtype, device=key.device) for _ in range(2 * key.num_layers)]
    said = [
        (torch.arange(half.nbytes, dtype=torch.int64, device=key.device) + number).to(torch.uint8)
        for number, half in enumerate(memory)
    ]
    canary = LayerStore(LayerPools(memory[: key.num_layers], memory[key.num_layers :], 1), shared)
    tokens, slots = [-1 - i for i in range(key.chunk_tokens)], range(key.chunk_tokens)
    heard = [half.view(torch.uint8).view(-1) for half in memory]
    chunk_nbytes = key.chunk_tokens * row_nbytes
    try:
        for bytes_of, wanted in zip(heard, said, strict=True):
            bytes_of.copy_(wanted)
        stored = canary.store(tokens, slots, _CANARY)
        for bytes_of in heard:
            bytes_of.zero_()
        loading = canary.begin_load(tokens, slots, 0, _CANARY) if stored else None
        if loading is not None:
            for _ in range(key.num_layers):
                loading.step()
        canary.forget(tokens, _CANARY)
    except HiCacheError:
        raise
    except Exception as error:
        raise _strange(f"{type(error).__name__}: {error}") from error
    if not stored:
        raise BackendUnavailable(
            "starting LMCache's engine",
            value=f"it could not store one chunk in {key.cpu_nbytes} bytes",
            remedy="Raise cpu_nbytes, or lower chunk_tokens.",
        )
    same = [
        torch.equal(one[:chunk_nbytes], other[:chunk_nbytes]) for one, other in zip(heard, said, strict=True)
    ]
    if not all(same) or canary.pinned:
        raise _strange(f"stored {stored} of {len(tokens)} tokens, {canary.pinned} pinned")


def _strange(value: str) -> BackendIncompatible:
    return BackendIncompatible(
        "lmcache",
        "a chunk that was stored did not come back the same",
        value=value,
        remedy="Run: pip install 'lmcache==0.5.6'",
    )
