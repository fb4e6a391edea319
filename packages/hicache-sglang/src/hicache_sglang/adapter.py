"""HiCacheSGLang: SGLang's storage interface, answered by any hicache backend.

The order of things in SGLang (0.5.5 to 0.5.23): the factory constructs the class
with a storage config and no pool, so the constructor validates and touches
nothing; ``register_mem_pool_host`` brings the first pool, and the cache opens
there; sidecar pools come by ``register_mem_host_pool_v2``, some of them late;
then three threads call at once (queries, reads, writes) until ``close``.

SGLang's threads must go on whatever happens: a short answer is an IndexError
there, an exception a lost prefetch, on decode nodes a dead scheduler. So every
call gives an aligned, complete answer and never raises; what went wrong is one
rate-limited log line. Only what happens at attach raises: options that are not
valid, a backend that cannot be loaded, a pool whose pages cannot be stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as SGLangHiCacheStorage

from hicache_core import HiCache, StorageBackendFactory
from hicache_core.errors import InvalidOptions
from hicache_core.notices import Notices
from hicache_sglang import hybrid, watch
from hicache_sglang.components import Ranks
from hicache_sglang.geometry import anchor_of
from hicache_sglang.identity import Server, hashes_are_seeded, refuse_unseeded, server_arguments
from hicache_sglang.metrics import CallRecord
from hicache_sglang.pools import BoundPool, bind, loose_pool, named_by_key
from hicache_sglang.settings import Settings, backend_named, read_settings
from hicache_sglang.weights import Weights

T = TypeVar("T")

_log = logging.getLogger("hicache")

KV = "kv"


class HiCacheSGLang(SGLangHiCacheStorage):
    """Any hicache backend behind an unmodified SGLang; made by SGLang's own factory.

    Threads: calls may come from any thread once a pool is registered; registering
    and closing happen on the scheduler's.
    """

    #: What ``--hicache-storage-backend dynamic`` copies into "interface_v1"; read by people and tests.
    interface_v1 = True

    def __init__(self, storage_config: Any, kwargs: Any = None, **_: Any) -> None:
        """Validate options and identity; no I/O.

        Args:
            storage_config: SGLang's HiCacheStorageConfig of any release.
            kwargs: the empty dict that the dynamic factory passes.

        Raises:
            InvalidOptions, BackendLoadError: at launch they stop the server, at a
                runtime attach they are its answer.
        """
        extra: dict[str, Any] = dict(getattr(storage_config, "extra_config", None) or {})
        self._prepare(
            storage_config, extra, backend_named(extra.get("backend_name")), bool(extra.get("interface_v1"))
        )

    @classmethod
    def from_plugin(cls, storage_config: Any, name: str) -> HiCacheSGLang:
        """Make an instance for ``--hicache-storage-backend hicache.<name>``; it gets the zero-copy calls."""
        self = cls.__new__(cls)
        extra = dict(getattr(storage_config, "extra_config", None) or {})
        self._prepare(storage_config, extra, backend_named(name), zero_copy=True)
        return self

    def _prepare(self, storage_config: Any, extra: dict[str, Any], backend: str, zero_copy: bool) -> None:
        self.storage_config = storage_config
        self.registered_pools: dict[Any, Any] = {}
        self._backend = backend
        self._zero_copy = zero_copy
        self._settings: Settings = read_settings(extra)
        self._options = self._settings.options | ({"bounce": True} if self._settings.bounce else {})
        StorageBackendFactory.load(backend, self._options)
        self._ranks = Ranks.of(storage_config)
        arguments, seeded = server_arguments(), hashes_are_seeded()
        refuse_unseeded(self._settings, arguments, seeded=seeded)
        self._server = Server(arguments, self._settings, getattr(storage_config, "model_name", None), seeded)
        self._metered = bool(getattr(storage_config, "enable_storage_metrics", False))
        self._calls = CallRecord()
        self._notices = Notices()
        self._admin = threading.RLock()
        self._bound: dict[str, BoundPool] = {}
        self._cache: HiCache | None = None
        self._weights: Weights | None = None

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Serve the KV pool; the cache opens here.

        Raises:
            PoolRefused: its pages cannot be stored, with the reason.
            HiCacheError: what HiCache.open raises; an unreachable store does not.
        """
        self.mem_pool_host = mem_pool_host
        self._register(KV, anchor_of(mem_pool_host))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Serve one pool under its name, ``kv`` included; the same one twice is one. Raises as above."""
        self.registered_pools[host_pool_name] = host_pool
        self._register(_plain_name(host_pool_name), anchor_of(host_pool))

    def on_host_pools_registered(self) -> None:
        """Say once what is served."""
        served = [
            f"{pool.name} ({pool.geometry.kind}, {pool.nbytes} bytes a page)" for pool in self._bound.values()
        ]
        _log.info("hicache '%s' serves %s", self._backend, ", ".join(served))

    def _register(self, name: str, pool: Any) -> None:
        with self._admin:
            known = self._bound.get(name)
            if known is not None and known.pool is pool:
                return
            draft_model = self._server.draft_model() if self._server.arguments is not None else None
            bound = bind(name, pool, self._ranks, zero_copy=self._zero_copy, draft_model=draft_model)
            if self._cache is None:
                self._open(bound)
            else:
                for host_pool in bound.host_pools:
                    self._cache.add_pool(host_pool)
                for host_pool in known.host_pools if known is not None else ():
                    self._cache.drop_pool(host_pool)
            self._bound = self._bound | {name: bound}

    def _open(self, bound: BoundPool) -> None:
        kv_dtype = str(getattr(bound.pool, "dtype", "unknown")).removeprefix("torch.")
        weights = Weights(self._server, kv_dtype=kv_dtype, page_tokens=bound.geometry.page_tokens)
        try:
            identity = weights.identity()
        except LookupError as error:
            raise InvalidOptions(
                "sglang", [("lora_paths", f"{error}, so its pages cannot be told apart", "")]
            ) from error
        cache = HiCache.open(
            self._backend,
            identity=identity,
            placement=self._ranks.placement(bound.pool),
            pools=bound.host_pools,
            timeout_s=self._settings.timeout_s,
            options=self._options,
        )
        weights.serve(cache)
        self._cache, self._weights = cache, weights
        deaf = watch.listen(weights)
        if deaf and self._server.arguments is not None:
            _log.warning("hicache: cannot hear of %s in this SGLang; restart after them", " and ".join(deaf))
        if not self._zero_copy:
            _log.warning(
                'hicache: "interface_v1" is not set, so SGLang copies each page twice; '
                'add "interface_v1": 1 to the extra config (SGLang 0.5.6 and later)'
            )

    # Zero-copy calls.

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None, **_: Any
    ) -> list[bool]:
        """Read pages into the KV pool; one truth a key, in order."""
        return self._transfer(KV, "get", keys, host_indices)

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: Any, extra_info: Any = None, **_: Any
    ) -> list[bool]:
        """Store pages of the KV pool; one truth a key, in order."""
        return self._transfer(KV, "set", keys, host_indices)

    # Calls for several pools.

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None, **_: Any
    ) -> Any:
        """Tell how much of a prefix can be restored, as SGLang's PoolTransferResult."""
        hashes, transfers = list(keys or ()), list(pool_transfers or ())
        nothing = hybrid.result(0, {}, ())
        return self._answer(
            "exists", nothing, lambda cache: hybrid.probe(cache, self._bound, hashes, transfers)
        )

    def batch_get_v2(self, transfers: Any, extra_info: Any = None, **_: Any) -> dict[Any, list[bool]]:
        """Read each pool's pages; a list a pool, one truth a key."""
        return self._transfer_all("get", transfers)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None, **_: Any) -> dict[Any, list[bool]]:
        """Store each pool's pages likewise."""
        return self._transfer_all("set", transfers)

    # Generic calls.

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None, **_: Any) -> int:
        """Count the leading pages that are stored."""
        hashes = list(keys or ())
        return self._answer("exists", 0, lambda cache: cache.exists(hashes, KV))

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None, **_: Any
    ) -> list[Any]:
        """Read pages into flat tensors; gives each tensor back, or None where the page is not there."""
        hashes, tensors = list(keys or ()), list(target_locations if target_locations is not None else ())
        good = self._answer(
            "get", [False] * len(hashes), lambda cache: self._loose("get", cache, hashes, tensors)
        )
        return [tensors[i] if there else None for i, there in enumerate(good)]

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
        **_: Any,
    ) -> bool:
        """Store flat tensors; True when every one is stored now or was before."""
        given = values if values is not None else target_locations
        hashes, tensors = list(keys or ()), list(given if given is not None else ())
        return all(
            self._answer(
                "set", [False] * len(hashes), lambda cache: self._loose("set", cache, hashes, tensors)
            )
        )

    def exists(self, key: str) -> bool:
        """Tell whether a page is stored."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read one page into a flat tensor; None where it is not there."""
        return self.batch_get([key], [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one flat tensor."""
        return self.batch_set([key], [value if value is not None else target_location])

    # The rest.

    def clear(self) -> bool:
        """Remove every page of this model's namespace; the engine's own caches stay.

        Raises:
            HiCacheError: the backend cannot, or cannot be reached; SGLang reports it to the operator.
        """
        cache = self._cache
        if cache is None:
            return False
        removed = cache.clear()
        _log.info("hicache '%s': removed %d pages", self._backend, removed)
        return True

    def get_stats(self) -> Any:
        """Give SGLang's StorageMetrics of the calls since the last time; None without --enable-metrics."""
        return self._calls.drain() if self._metered else None

    def close(self) -> None:
        """Close the cache; idempotent. Later calls answer misses."""
        with self._admin:
            cache, self._cache = self._cache, None
            weights, self._weights = self._weights, None
        if weights is not None:
            watch.forget(weights)
        if cache is not None:
            cache.close()

    @property
    def cache(self) -> HiCache | None:
        """The HiCache behind this, for tools; None before the first pool and after close."""
        return self._cache

    # One way in for all calls.

    def _transfer_all(self, verb: str, transfers: Any) -> dict[Any, list[bool]]:
        return {
            transfer.name: self._transfer(
                _plain_name(transfer.name), verb, transfer.keys, transfer.host_indices
            )
            for transfer in transfers or ()
        }

    def _transfer(self, name: str, verb: str, keys: Sequence[str] | None, host_indices: Any) -> list[bool]:
        hashes = list(keys or ())
        bound = self._bound.get(name)
        if bound is None:
            self._notices.warn(
                f"hicache '{self._backend}'", f"pool {name}", f"no pool '{name}' is registered"
            )
            return [False] * len(hashes)
        move = bound.get if verb == "get" else bound.set
        started = time.perf_counter()
        good = self._answer(verb, [False] * len(hashes), lambda cache: move(cache, hashes, host_indices))
        if self._metered and name == KV:
            self._count(verb, bound, good, started)
        return good

    def _loose(self, verb: str, cache: HiCache, keys: list[str], tensors: list[Any]) -> list[bool]:
        if not keys:
            return []
        name, first = named_by_key(keys[0])  # a call is about one pool
        hashes = keys if first == keys[0] else [named_by_key(key)[1] for key in keys]
        bound = self._bound.get(name) or self._loose_pool(name, cache, tensors)
        started = time.perf_counter()
        good = (bound.get_loose if verb == "get" else bound.set_loose)(cache, hashes, tensors)
        if self._metered and name == KV:
            self._count(verb, bound, good, started)
        return good

    def _loose_pool(self, name: str, cache: HiCache, tensors: list[Any]) -> BoundPool:
        with self._admin:
            bound = self._bound.get(name)
            if bound is None:
                draft_model = self._server.draft_model()
                bound = loose_pool(name, tensors[0], self._bound[KV], self._ranks, draft_model=draft_model)
                cache.add_pool(bound.host_pools[0])
                self._bound = self._bound | {name: bound}
            return bound

    def _count(self, verb: str, bound: BoundPool, good: list[bool], started: float) -> None:
        count = self._calls.read if verb == "get" else self._calls.wrote
        count(sum(good), sum(good) * bound.nbytes, started)

    def _answer(self, verb: str, nothing: T, ask: Callable[[HiCache], T]) -> T:
        """Ask the cache; whatever goes wrong, give ``nothing`` and one log line."""
        cache, weights = self._cache, self._weights
        if cache is None or weights is None or weights.off:
            return nothing
        try:
            return ask(cache)
        except Exception as error:  # noqa: BLE001 - SGLang's threads must go on; on decode nodes it is the scheduler's
            self._notices.warn(f"hicache '{self._backend}' {verb}", type(error).__name__, repr(error))
            return nothing


def _plain_name(name: Any) -> str:
    """Give a pool's name as text; SGLang's PoolName is an enumeration of texts."""
    return str(getattr(name, "value", name))
