"""LMCache engines in this process: made quiet and safe, shared by the instances whose keys may meet.

One engine serves all instances that agree in namespace, shape, chunk and stores;
each of them keeps its own memory. What is changed of LMCache 0.5.6 when one is
made, each shown by tests/test_layers.py:

- Telemetry is off; its switch is a variable of the environment, which is not ours.
- Chunks are known by 128 bits of SHA-256 (``chunk_hash``).
- Finalizers free nothing. A memory object that the interpreter's collector finds
  is freed by LMCache there and then, under locks that the interrupted code may
  hold: that thread then waits for itself, for ever. Here such objects wait in a
  queue for the next call (``free_orphans``). LMCache's own way out is to switch
  the collector off, for the whole process.

Facts: ``v1/cache_engine.py`` (LMCacheEngineBuilder), ``v1/memory_management.py``
(TensorMemoryObj.__del__), ``utils.py`` (thread_safe).
"""

from __future__ import annotations

import hashlib
import importlib
import threading
import uuid
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from hicache_core.errors import BackendDependencyMissing, BackendUnavailable
from hicache_lmcache.native import check_version, hush

_INSTALL = "Run: pip install 'hicache-lmcache[lmcache,engine]'"


@dataclass(frozen=True, slots=True)
class EngineKey:
    """What instances agree in that share an engine."""

    namespace: str
    num_layers: int
    heads: int
    width: int
    device: str
    dtype: Any
    chunk_tokens: int
    cpu_nbytes: int
    remote_url: str


def chunk_hash(link: tuple[int, tuple[int, ...], tuple[object, ...]]) -> int:
    """Hash a chunk of tokens and its prefix's hash to 128 bits of SHA-256.

    LMCache's own choice without vLLM is Python's ``hash``: 64 bits that can be
    made to collide by whoever chooses the tokens, and then one user is given
    another's KV.
    """
    prefix, tokens, _ = link
    text = prefix.to_bytes(16, "little") + array("q", tokens).tobytes()
    return int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


_orphans: SimpleQueue[Any] = SimpleQueue()


def finalize(memory: Any, put: Callable[[Any], None] = _orphans.put) -> None:
    """Be LMCache's ``__del__``: called anywhere, it takes no lock; SimpleQueue.put is made for that."""
    if memory.parent_allocator is not None and memory.is_valid():
        put(memory)


def free_orphans() -> int:
    """Free what the collector found, outside of all of LMCache's locks; tell how many there were."""
    freed = 0
    while True:
        try:
            memory = _orphans.get_nowait()
        except Empty:
            return freed
        memory.parent_allocator.free(memory)
        freed += 1


class SharedEngine:
    """One LMCacheEngine and its users."""

    def __init__(self, key: EngineKey, config: Any, metadata: Any, modules: dict[str, Any]) -> None:
        self.key = key
        self.users = 0
        #: LMCache's engine is for one thread at a time; held for one layer, never for a whole prefix.
        self.native = threading.Lock()
        #: Held while a canary shows that LMCache's calls mean what they meant; ``proven`` after it.
        self.proving = threading.Lock()
        self.proven = False
        self._modules = modules
        self._config, self._metadata = config, metadata
        self._name = f"hicache-{uuid.uuid4()}"
        builder = modules["engine"].LMCacheEngineBuilder
        utils = modules["utils"]
        modules["memory"].TensorMemoryObj.__del__ = finalize
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
_engines: dict[EngineKey, SharedEngine] = {}


def join(key: EngineKey) -> SharedEngine:
    """Give the engine of a key, made when this process has none; ``leave`` ends it.

    Raises: BackendDependencyMissing, BackendIncompatible, BackendUnavailable.
    """
    with _lock:
        shared = _engines.get(key)
        if shared is None:
            shared = _engines[key] = _make(key)
        shared.users += 1
        return shared


def leave(shared: SharedEngine) -> None:
    """Leave an engine; the last one to leave ends it."""
    with _lock:
        shared.users -= 1
        if not shared.users:
            del _engines[shared.key]
            shared.close()
            free_orphans()


def _make(key: EngineKey) -> SharedEngine:
    check_version()
    names = {
        "engine": "lmcache.v1.cache_engine",
        "config": "lmcache.v1.config",
        "metadata": "lmcache.v1.metadata",
        "connector": "lmcache.v1.gpu_connector",
        "memory": "lmcache.v1.memory_management",
        "utils": "lmcache.utils",
        "usage": "lmcache.usage_telemetry.context",
        "usage_later": "lmcache.usage_telemetry.continuous",
    }
    hush()
    modules = {name: load(module) for name, module in names.items()}
    hush()
    settings: dict[str, Any] = {
        "chunk_size": key.chunk_tokens,
        "local_cpu": True,
        "max_local_cpu_size": key.cpu_nbytes / (1 << 30),
        "use_layerwise": True,
        "py_enable_gc": True,  # or LMCache switches the interpreter's garbage collection off
    }
    settings |= {"remote_url": key.remote_url} if key.remote_url else {}
    try:
        config = modules["config"].LMCacheEngineConfig.from_dict(settings)
        config.validate()
        rank = int(key.device.partition(":")[2] or 0)
        metadata = modules["metadata"].LMCacheMetadata(
            model_name=f"hicache-{key.namespace}",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=rank,
            kv_dtype=key.dtype,
            kv_shape=(key.num_layers, 2, key.chunk_tokens, key.heads, key.width),
            use_mla=False,
        )
        return SharedEngine(key, config, metadata, modules)
    except (RuntimeError, ValueError, TypeError, OSError, AssertionError) as error:
        raise BackendUnavailable(
            "starting LMCache's engine",
            value=f"{type(error).__name__}: {error}",
            remedy="Check chunk_tokens, cpu_nbytes and remote_url.",
        ) from error


def load(module: str) -> Any:
    """Import a module of LMCache's environment.

    Raises: BackendDependencyMissing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BackendDependencyMissing("lmcache", str(error.name), remedy=_INSTALL) from error
