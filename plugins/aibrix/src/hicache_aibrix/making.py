"""How a manager of aibrix_kvcache is made: with our settings, and the environment as it was."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hicache_aibrix.options import AibrixOptions
from hicache_core.errors import BackendDependencyMissing, BackendIncompatible, BackendUnavailable

VERSIONS = ((0, 8), (0, 9))
_INSTALL = "Run: pip install 'hicache-aibrix[aibrix]'"
_PREFIX = "AIBRIX_KV_CACHE_OL_"
#: More keys than any call has, so that the library attempts all of them instead of stopping at a bad batch.
_ALL_AT_ONCE = 1 << 20
_TOUCHED = ("_exists", "_get", "_put", "_delete")


@dataclass(frozen=True, slots=True)
class Native:
    package: ModuleType
    envs: ModuleType
    torch: ModuleType
    allocator: ModuleType


def load() -> Native:
    try:
        package = importlib.import_module("aibrix_kvcache")
        envs = importlib.import_module("aibrix_kvcache.envs")
        torch = importlib.import_module("torch")
        allocator = importlib.import_module("aibrix_kvcache.memory.allocator")
    except ModuleNotFoundError as error:
        raise BackendDependencyMissing("aibrix", str(error.name), remedy=_INSTALL) from error
    version = str(getattr(package, "__version__", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        raise BackendIncompatible(
            "aibrix",
            "this version of aibrix-kvcache is not known",
            value=f"{version}, known are 0.8.x",
            remedy=_INSTALL,
        )
    if not package.MemoryRegion.use_compact_layout():
        raise BackendIncompatible(
            "aibrix",
            "the library was told to store tokens with its blocks, which excludes keys that are hashes",
            value=f"{_PREFIX}TOKEN_VALIDATION_ENABLED is set",
            remedy=f"Unset {_PREFIX}TOKEN_VALIDATION_ENABLED.",
        )
    return Native(package, envs, torch, allocator)


def prepare_root(options: AibrixOptions) -> None:
    """Make the root and see that it can be written: SHFS opens whatever it is given, and fails later."""
    try:
        os.makedirs(options.root, mode=0o700, exist_ok=True)
        problem = "" if os.access(options.root, os.R_OK | os.W_OK | os.X_OK) else "permission denied"
    except OSError as error:
        problem = str(error)
    if problem:
        raise BackendUnavailable(
            f"opening 'aibrix' ({options.backend}) in {options.root}",
            value=problem,
            remedy=f"Give user {os.getuid()} a folder that it can write.",
        )


def make_manager(native: Native, options: AibrixOptions, namespace: str, timeout_s: float) -> Any:
    package, uint8 = native.package, native.torch.uint8
    manager = package.BaseKVCacheManager.__new__(package.BaseKVCacheManager)
    wanted = settings_of(options, namespace, timeout_s)
    quiet = {"tqdm": lambda slabs, *_: slabs}  # the allocator draws a progress bar on stderr
    with attributes(native.envs, wanted), attributes(native.allocator, quiet):
        # The library's own blocks are never used (see Record): the smallest that it accepts.
        tensor = package.KVCacheTensorSpec(heads=[0], layers=[0], head_size=8)
        block = package.KVCacheBlockSpec(1, uint8, package.KVCacheBlockLayout.NCLD, tensor)
        config = package.KVCacheConfig(block, package.ModelSpec(max_model_len=1), multi_threaded=True)
        try:
            manager.__init__(config)
            _check(manager)
        except BackendIncompatible:
            _undo(manager)
            raise
        except Exception as error:
            _undo(manager)
            raise BackendUnavailable(
                f"opening 'aibrix' ({options.backend}) in {options.root}",
                value=" ".join(str(error).split()),
                remedy="RocksDB admits one process: choose another root, or backend='shfs'."
                if "lock" in str(error).lower()
                else "See that the root can be written.",
            ) from error
    return manager


def settings_of(options: AibrixOptions, namespace: str, timeout_s: float) -> dict[str, Any]:
    settings = {
        "DEVICE": "cpu:0",  # with "cpu" the library asks for pinned memory, which needs an accelerator
        "BLOCK_SIZE": -1,
        "CHUNK_SIZE": 4,
        "MAX_SEQ_LEN": -1,
        "L1_CACHE_ENABLED": False,
        "L2_CACHE_BACKEND": options.backend.upper(),
        "L2_CACHE_NAMESPACE": f"hicache-{namespace}",
        "L2_CACHE_OP_BATCH": _ALL_AT_ONCE,
        "L2_CACHE_KEY_BUILDER": "RAW",
        # A block has one token here.
        "L2_CACHE_PER_TOKEN_TIMEOUT_MS": math.ceil(timeout_s * 1000),
        "L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS": 0,  # a put returns when it is done
        "L2_CACHE_NUM_ASYNC_WORKERS": options.workers,
        "META_SERVICE_BACKEND": "",
        "PROFILING_ENABLED": False,
        # HiCache measures each call; the library keeps every figure in a list (library.py bounds the others).
        "TIME_MEASUREMENT_ENABLED": False,
        "BREAKDOWN_MEASUREMENT_ENABLED": False,
        "ROCKSDB_ROOT": options.root,
        "ROCKSDB_TTL_S": options.ttl_s,
        "ROCKSDB_WRITE_BUFFER_SIZE": options.write_buffer,
        "SHFS_ROOT": options.root,
    }
    return {_PREFIX + name: value for name, value in settings.items()}


@contextlib.contextmanager
def attributes(module: ModuleType, wanted: dict[str, Any]) -> Iterator[None]:
    """Have a module of the library see these values while ``_making`` is held. Its settings are such:
    attributes go before the ``__getattr__`` that reads the environment.
    """
    space = vars(module)
    before = {name: space[name] for name in wanted if name in space}
    space.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            space.pop(name, None)
        space.update(before)


def _check(manager: Any) -> None:
    connector = getattr(getattr(manager, "_l2_cache", None), "_backend", None)
    lacking = [name for name in _TOUCHED if not callable(getattr(connector, name, None))]
    if lacking or not hasattr(manager, "_event_loop"):
        raise BackendIncompatible(
            "aibrix",
            "the library is not built as it was when this was written",
            value=f"{type(connector).__name__} lacks {', '.join(lacking) or 'its event loop'}",
            remedy=_INSTALL,
        )


def _undo(manager: Any) -> None:
    """End the threads of a manager that was made half-way; the library leaves them."""
    loop, thread = getattr(manager, "_event_loop", None), getattr(manager, "_thread", None)
    executor = getattr(manager, "_executor", None)
    if loop is not None and thread is not None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
    if executor is not None:
        executor.shutdown(wait=True)
    close_loop(loop)


def close_loop(loop: Any) -> None:
    if loop is not None and not loop.is_running():
        loop.close()
