"""LayerStore: an engine's KV, layer by layer, in LMCache.

What LMCache's LayerwiseConnector does, on the same LMCacheEngine, with three
differences that a cache for production needs: generators run to their end, or
references and pins stay for ever; a store that fails says so; and several
instances in a process share an engine where their keys may meet, and only there,
while each keeps the tables of its own memory.

Facts: lmcache 0.5.6, ``integration/sglang/sglang_adapter.py``,
``v1/cache_engine.py`` (retrieve_layer, store_layer, lookup),
``v1/gpu_connector/gpu_connectors.py`` (SGLangLayerwiseGPUConnector).
"""

from __future__ import annotations

import hashlib
import importlib
import threading
import uuid
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hicache_core.errors import BackendDependencyMissing, BackendUnavailable, InvalidPages
from hicache_lmcache.native import hush

_INSTALL = "Run: pip install 'hicache-lmcache[lmcache,engine]'"
#: The longest wait for a layer that is not wanted any more.
_SETTLE_S = 5.0


@dataclass(frozen=True, slots=True)
class LayerPools:
    """One tensor a layer and half, each of whole rows; row ``slot * rows_per_slot`` is a token's.

    LMCache's layer-wise connector knows K and V of one shape and no MLA. A latent
    row is therefore told as two: its first half as K, its second as V, which is
    the same memory with twice the rows.
    """

    keys: list[Any]
    values: list[Any]
    rows_per_slot: int

    @classmethod
    def of_mha(cls, keys: Sequence[Any], values: Sequence[Any]) -> LayerPools:
        """Take K and V, a tensor (slots, heads, head_dim) a layer each."""
        shapes = {tuple(layer.shape) for layer in (*keys, *values)}
        if len(keys) != len(values) or len(shapes) != 1:
            raise InvalidPages(
                "K and V cannot be stored layer by layer",
                value=f"{len(keys)} and {len(values)} layers, shapes {sorted(shapes)}",
                remedy="Pass as many layers of K as of V, all of one shape.",
            )
        return cls(list(keys), list(values), 1)

    @classmethod
    def of_mla(cls, latents: Sequence[Any]) -> LayerPools:
        """Take the latents, a contiguous tensor (slots, 1, width) a layer, of an even width."""
        if not latents or any(not layer.is_contiguous() or layer.shape[-1] % 2 for layer in latents):
            raise InvalidPages(
                "the latents cannot be stored layer by layer",
                value=f"shapes {[tuple(layer.shape) for layer in latents[:4]]}",
                remedy="Pass contiguous tensors (slots, 1, width) of an even width.",
            )
        halves = [layer.view(layer.shape[0] * 2, 1, layer.shape[-1] // 2) for layer in latents]
        return cls([rows[:-1] for rows in halves], [rows[1:] for rows in halves], 2)

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.keys)


class Loading:
    """One prefix on its way out of LMCache; for one thread at a time."""

    def __init__(self, store: LayerStore, generator: Any, lookup_id: str, num_tokens: int) -> None:
        #: Tokens of the prefix that LMCache holds, as far as they were asked for.
        self.num_tokens = num_tokens
        self.layers_done = 0
        #: It touches no memory any more, and holds nothing of LMCache's.
        self.ended = False
        self._store = store
        self._generator = generator
        self._lookup_id = lookup_id
        self._held: list[Any] = []

    def step(self) -> None:
        """Load the next layer; after the last one let go of everything. Raises whatever LMCache raised."""
        with self._store.native:
            coming = None
            try:
                if not self.layers_done:
                    next(self._generator)
                    self._held = self._local("to_count_down", [])
                coming = self._local("task", None)
                next(self._generator)
                self.layers_done += 1
                if self.layers_done == self._store.pools.num_layers:
                    self._let_go(whole=True, coming=None)
            except BaseException:
                self._let_go(whole=False, coming=coming)
                raise

    def abandon(self) -> None:
        """Load no further layer and let go of everything."""
        with self._store.native:
            if not self.ended:
                self._let_go(whole=False, coming=self._local("task", None) if self.layers_done else None)

    def _local(self, name: str, default: Any) -> Any:
        """Look at a variable of LMCache's generator: what it must give back is known nowhere else."""
        frame = self._generator.gi_frame
        while frame is not None and name not in frame.f_locals:
            inner = frame.f_locals.get("gen")  # torch's inference_mode wraps generators in one of its own
            frame = getattr(inner, "gi_frame", None)
        return default if frame is None else frame.f_locals[name]

    def _let_go(self, *, whole: bool, coming: Any) -> None:
        """Do what LMCache does at the end of a load, which it reaches for no SGLang connector (it raises
        StopIteration there), and for none that failed or was given up.
        """
        self.ended = True
        self._generator.close()
        held = list(self._held)
        if coming is not None:  # asked of its store already, for the next layer
            arrived = _arrived(coming)
            held += [memory for memory in arrived if not any(memory is other for other in held)]
        for memory in held:
            if not whole:
                memory.ref_count_down()
            if memory.is_pinned:
                memory.unpin()
        self._held = []
        self._store.unpin(self._lookup_id)


def _arrived(coming: Any) -> list[Any]:
    try:
        return [memory for memory in coming.result(_SETTLE_S) if memory is not None]
    except Exception:  # noqa: BLE001 - whatever LMCache's stores raise: then nothing arrived
        return []


class LayerStore:
    """One instance's view of an LMCache engine.

    Args:
        namespace: whose KV this is; part of every key.
        chunk_tokens: LMCache's chunk.
        cpu_nbytes: LMCache's memory, for all instances that share the engine.
    """

    def __init__(
        self, pools: LayerPools, namespace: str, *, chunk_tokens: int, cpu_nbytes: int, remote_url: str = ""
    ) -> None:
        self.pools = pools
        self.chunk_tokens = chunk_tokens
        self._torch = _import("torch")
        self._shared = _join(_describe(pools, namespace, chunk_tokens, cpu_nbytes, remote_url))
        #: LMCache's engine is for one thread at a time; held for one layer, never for a whole prefix.
        self.native = self._shared.native
        self._tables = self._shared.make_tables()

    def begin_load(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        offset: int,
        extra_key: str | None = None,
        lowest_common: Callable[[int], int] = int,
    ) -> Loading | None:
        """Look a prefix up, pin it and prepare its load; None where LMCache has nothing beyond ``offset``.

        Args:
            slots: one a token; negative ones are left out (they are there already).
            offset: tokens of whole chunks at the start that are not wanted.
            extra_key: the prefix is another one under another key.
            lowest_common: what all tensor-parallel ranks hold, from what this one does.
        """
        engine, lookup_id = self._shared.engine, f"hicache-{uuid.uuid4()}"
        with self.native:
            ids, tags = self._tensor(tokens), _tags(extra_key)
            try:
                held = int(engine.lookup(ids, lookup_id=lookup_id, pin=True, request_configs=tags))
                found = lowest_common(held) // self.chunk_tokens * self.chunk_tokens
            except BaseException:
                self.unpin(lookup_id)
                raise
            if found <= offset:
                self.unpin(lookup_id)
                return None
            mask = self._torch.ones(found, dtype=self._torch.bool)
            mask[:offset] = False
            engine.gpu_connector = self._tables
            generator = engine.retrieve_layer(
                ids[:found],
                mask=mask,
                slot_mapping=self._rows(slots[:found]),
                offset=offset,
                **self._memory(),
            )
            return Loading(self, generator, lookup_id, found)

    def store(self, tokens: Sequence[int], slots: Sequence[int], extra_key: str | None = None) -> None:
        """Store the whole chunks of a prefix that LMCache lacks; raises whatever LMCache raised."""
        engine = self._shared.engine
        with self.native:
            engine.gpu_connector = self._tables
            ids = self._tensor(tokens)
            mask = self._torch.ones_like(ids, dtype=self._torch.bool)
            layers = engine.store_layer(
                ids,
                mask=mask,
                slot_mapping=self._rows(slots),
                offset=0,
                request_configs=_tags(extra_key),
                **self._memory(),
            )
            for _ in layers:
                pass

    def unpin(self, lookup_id: str) -> None:
        """Undo a lookup's pins; ``native`` is held."""
        self._shared.engine.lookup_unpin(lookup_id)

    @property
    def pinned(self) -> int:
        """Lookups whose pins are held."""
        return len(self._shared.engine.lookup_pins)

    def clear(self) -> None:
        """Forget everything, of all instances that share the engine."""
        with self.native:
            self._shared.engine.clear()

    def close(self) -> None:
        """Leave the engine; the last one to leave ends it."""
        _leave(self._shared)

    def _memory(self) -> dict[str, Any]:
        return {"kvcaches": [self.pools.keys, self.pools.values], "sync": False}

    def _tensor(self, tokens: Sequence[int]) -> Any:
        return self._torch.tensor(list(tokens), dtype=self._torch.int64)

    def _rows(self, slots: Sequence[int]) -> Any:
        device = self.pools.keys[0].device
        rows = self._torch.tensor(list(slots), dtype=self._torch.int64, device=device)
        return rows * self.pools.rows_per_slot


def _tags(extra_key: str | None) -> dict[str, str]:
    """Put an extra key into LMCache's keys, as a digest: it takes neither ``@`` nor ``%``."""
    if extra_key is None:
        return {}
    return {"lmcache.tag.extra": hashlib.sha256(extra_key.encode()).hexdigest()[:32]}


def chunk_hash(link: tuple[int, tuple[int, ...], tuple[object, ...]]) -> int:
    """Hash a chunk of tokens and its prefix's hash to 128 bits of SHA-256.

    LMCache's own choice without vLLM is Python's ``hash``: 64 bits that can be
    made to collide by whoever chooses the tokens, and then one user is given
    another's KV.
    """
    prefix, tokens, _ = link
    text = prefix.to_bytes(16, "little") + array("q", tokens).tobytes()
    return int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


class _Shared:
    """One LMCacheEngine and its users."""

    def __init__(self, key: tuple[Any, ...], config: Any, metadata: Any, modules: dict[str, Any]) -> None:
        self.key = key
        self.users = 0
        self.native = threading.Lock()
        self._modules = modules
        self._config, self._metadata = config, metadata
        self._name = f"hicache-{uuid.uuid4()}"
        builder = modules["engine"].LMCacheEngineBuilder
        utils = modules["utils"]
        # Telemetry is on by default, its switch a variable of the environment, which is not ours to change.
        for module in (modules["usage"], modules["usage_later"]):
            module.is_usage_tracking_enabled = lambda: False
        self.engine: Any = builder.get_or_create(
            self._name,
            config,
            metadata,
            self.make_tables(),
            utils.mock_up_broadcast_fn,
            utils.mock_up_broadcast_object_fn,
        )
        self.engine.token_database.hash_func = chunk_hash
        self.engine.post_init()

    def make_tables(self) -> Any:
        """Make what LMCache calls a GPU connector: it remembers the memory of the last call."""
        kind = self._modules["utils"].EngineType.SGLANG
        return self._modules["connector"].CreateGPUConnector(self._config, self._metadata, kind)

    def close(self) -> None:
        self._modules["engine"].LMCacheEngineBuilder.destroy(self._name)


_lock = threading.Lock()
_engines: dict[tuple[Any, ...], _Shared] = {}


def _describe(
    pools: LayerPools, namespace: str, chunk_tokens: int, cpu_nbytes: int, remote_url: str
) -> tuple[Any, ...]:
    layer = pools.keys[0]
    heads, width = int(layer.shape[-2]), int(layer.shape[-1])
    place = (str(layer.device), layer.dtype)
    return (namespace, pools.num_layers, heads, width, *place, chunk_tokens, cpu_nbytes, remote_url)


def _join(key: tuple[Any, ...]) -> _Shared:
    with _lock:
        shared = _engines.get(key)
        if shared is None:
            shared = _engines[key] = _make(key)
        shared.users += 1
        return shared


def _leave(shared: _Shared) -> None:
    with _lock:
        shared.users -= 1
        if not shared.users:
            del _engines[shared.key]
            shared.close()


def _make(key: tuple[Any, ...]) -> _Shared:
    namespace, layers, heads, width, device, dtype, chunk_tokens, cpu_nbytes, remote_url = key
    names = {
        "engine": "lmcache.v1.cache_engine",
        "config": "lmcache.v1.config",
        "metadata": "lmcache.v1.metadata",
        "connector": "lmcache.v1.gpu_connector",
        "utils": "lmcache.utils",
        "usage": "lmcache.usage_telemetry.context",
        "usage_later": "lmcache.usage_telemetry.continuous",
    }
    hush()
    modules = {name: _import(module) for name, module in names.items()}
    hush()
    settings: dict[str, Any] = {
        "chunk_size": chunk_tokens,
        "local_cpu": True,
        "max_local_cpu_size": cpu_nbytes / (1 << 30),
        "use_layerwise": True,
        "py_enable_gc": True,  # or LMCache switches the interpreter's garbage collection off
    }
    settings |= {"remote_url": remote_url} if remote_url else {}
    try:
        config = modules["config"].LMCacheEngineConfig.from_dict(settings)
        config.validate()
        rank = int(device.partition(":")[2] or 0)
        metadata = modules["metadata"].LMCacheMetadata(
            model_name=f"hicache-{namespace}",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=rank,
            kv_dtype=dtype,
            kv_shape=(layers, 2, chunk_tokens, heads, width),
            use_mla=False,
        )
        return _Shared(key, config, metadata, modules)
    except (RuntimeError, ValueError, TypeError, OSError, AssertionError) as error:
        raise BackendUnavailable(
            "starting LMCache's engine",
            value=f"{type(error).__name__}: {error}",
            remedy="Check chunk_tokens, cpu_nbytes and remote_url.",
        ) from error


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BackendDependencyMissing("lmcache", str(error.name), remedy=_INSTALL) from error
