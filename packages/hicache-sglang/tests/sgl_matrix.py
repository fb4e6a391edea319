"""What works on the SGLang release that is importable here; prints one JSON object.

Run by test_releases.py in a process of its own for each release, and by
make_docs.py, so the table in the documentation is what the tests saw.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

import sgl_release as release
import sgl_toy
import torch

LAYOUTS = {
    "mha": ("layer_first", "page_first", "page_first_direct", "page_head"),
    "mla": ("layer_first", "page_first", "page_first_direct"),
}
PAGE_TOKENS = 4
TOKENS = list(range(1, 1 + 4 * PAGE_TOKENS))
FROM, TO = [4, 1, 6, 2], [0, 7, 3, 5]


def main() -> None:
    logging.disable(logging.CRITICAL)
    folder = release.prepare()
    sys.stdout.write(json.dumps({"version": importlib.metadata.version("sglang"), **rows(folder)}) + "\n")


def rows(folder: Path) -> dict[str, Any]:
    zero_copy = '"interface_v1"' in (folder / "srt/managers/cache_controller.py").read_text()
    found: dict[str, Any] = {"zero_copy": zero_copy}
    for kind, layouts in LAYOUTS.items():
        for layout in layouts:
            if not has_layout(folder, kind, layout):
                found[f"{kind} {layout}"] = "not in this release"
                continue
            found[f"{kind} {layout}"] = round_trip(folder, kind, layout, zero_copy=False)
            if zero_copy:
                found[f"{kind} {layout}"] += f"; {round_trip(folder, kind, layout, zero_copy=True)}"
    found["layouts share pages"] = share_layouts(folder, zero_copy=zero_copy)
    found["hole"] = hole(folder, zero_copy=zero_copy)
    found["answers"] = answers(folder)
    found["v2"] = sidecars(folder) if has_v2() else "not in this release"
    found["seeded"] = lora(folder)
    found["plugin"] = plugin(folder)
    return found


def has_layout(folder: Path, kind: str, layout: str) -> bool:
    pool = release.host_pool(folder, kind, layout)
    try:
        pool.get_page_buffer_meta(release.indices_of([0], PAGE_TOKENS))
    except ValueError:
        return False
    return True


def has_v2() -> bool:
    from sglang.srt.mem_cache import hicache_storage

    return hasattr(hicache_storage, "PoolTransfer")


def extra(*, zero_copy: bool, **more: Any) -> dict[str, Any]:
    return {
        "backend_name": "dynamic",
        "module_path": "hicache_sglang",
        "class_name": "HiCacheSGLang",
        "options": sgl_toy.OPTIONS,
        **({"interface_v1": 1} if zero_copy else {}),
        **more,
    }


def attach(pool: Any, *, kind: str = "mha", zero_copy: bool = True, **values: Any) -> Any:
    """Attach as the release's controller does: its factory, then the pool."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config = release.storage_config(extra(zero_copy=zero_copy), is_mla_model=kind == "mla", **values)
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    backend.register_mem_pool_host(pool)
    return backend


def write(folder: Path, kind: str, layout: str, *, zero_copy: bool) -> tuple[int, list[bytes]]:
    sgl_toy.STORE.clear()
    pool = release.host_pool(folder, kind, layout)
    release.fill(pool)
    backend = attach(pool, kind=kind, zero_copy=zero_copy)
    stored = release.Controller(folder, backend, pool, zero_copy=zero_copy).backup(TOKENS, FROM)
    backend.close()
    return stored, [flat(pool, page) for page in FROM]


def read(
    folder: Path, kind: str, layout: str, *, zero_copy: bool
) -> tuple[tuple[int, int], list[bytes], bool]:
    pool = release.host_pool(folder, kind, layout)
    release.fill(pool, seed=2)
    before = [flat(pool, page) for page in range(pool.page_num)]
    backend = attach(pool, kind=kind, zero_copy=zero_copy)
    counts = release.Controller(folder, backend, pool, zero_copy=zero_copy).prefetch(TOKENS, TO)
    backend.close()
    others = [page for page in range(pool.page_num) if page not in TO]
    untouched = all(flat(pool, page) == before[page] for page in others)
    return counts, [flat(pool, page) for page in TO], untouched


def flat(pool: Any, page: int) -> bytes:
    return pool.get_data_page(page * PAGE_TOKENS, flat=True).contiguous().view(torch.uint8).numpy().tobytes()


def round_trip(folder: Path, kind: str, layout: str, *, zero_copy: bool) -> str:
    way = "zero-copy" if zero_copy else "generic"
    stored, wanted = write(folder, kind, layout, zero_copy=zero_copy)
    counts, got, untouched = read(folder, kind, layout, zero_copy=zero_copy)
    whole = len(TOKENS)
    good = stored == whole and counts == (whole, whole) and got == wanted and untouched
    return f"{way} ok" if good else f"{way} FAILED: {stored} {counts} {got == wanted} {untouched}"


def share_layouts(folder: Path, *, zero_copy: bool) -> str:
    """What layer_first writes by zero-copy calls, page_first_direct reads by generic ones."""
    _, wanted = write(folder, "mha", "layer_first", zero_copy=zero_copy)
    counts, got, untouched = read(folder, "mha", "page_first_direct", zero_copy=False)
    good = counts == (len(TOKENS), len(TOKENS)) and got == wanted and untouched
    return "ok" if good else f"FAILED: {counts} {got == wanted} {untouched}"


def hole(folder: Path, *, zero_copy: bool) -> str:
    """The controller counts the pages before the missing one and goes on."""
    write(folder, "mha", "page_first", zero_copy=zero_copy)
    del sgl_toy.STORE[list(sgl_toy.STORE)[2]]
    counts, _, untouched = read(folder, "mha", "page_first", zero_copy=zero_copy)
    return "ok" if counts == (2 * PAGE_TOKENS, 2 * PAGE_TOKENS) and untouched else f"FAILED: {counts}"


def answers(folder: Path) -> str:
    """Every call answers each key, whatever it is given."""
    sgl_toy.STORE.clear()
    pool = release.host_pool(folder, "mha", "page_first")
    backend = attach(pool)
    keys = ["a" * 64, "b" * 64]
    two = release.indices_of([0, 1], PAGE_TOKENS)
    page = pool.get_dummy_flat_data_page()
    got = [
        backend.batch_exists(keys),
        backend.batch_get_v1(keys, two),
        backend.batch_get_v1(keys, two[:-1], extra_info=None),
        backend.batch_get(keys, [page, page.clone()]),
        backend.batch_get(keys, [page]),
        backend.batch_set_v1(keys[:1], two[:PAGE_TOKENS]),
        backend.batch_set(["c" * 64], [page]),
        backend.batch_exists(["no/key"]),
        backend.batch_get_v1([], two[:0]),
        backend.exists("c" * 64),
        backend.exists("d" * 64),
    ]
    backend.close()
    got += [backend.batch_exists(keys), backend.batch_get_v1(keys, two), backend.batch_set_v1(keys, two)]
    wanted = [0, [False] * 2, [False] * 2, [None] * 2, [None] * 2, [True], True, 0, [], True, False]
    wanted += [0, [False] * 2, [False] * 2]
    return "ok" if got == wanted else f"FAILED: {got}"


def sidecars(folder: Path) -> str:
    """KV with two sidecars: one page a KV page, and one at the end of a prefix."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    sgl_toy.STORE.clear()
    pools = {
        name: release.host_pool(folder, "mla", "page_first", layers=n)
        for name, n in (("kv", 3), ("indexer", 2))
    }
    pools["mamba"] = release.host_pool(folder, "mha", "page_first", layers=1, page_size=1)
    for seed, pool in enumerate(pools.values()):
        release.fill(pool, seed)
    backend = attach(pools["kv"], kind="mla")
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, PoolName(name))
    if hasattr(backend, "on_host_pools_registered"):
        backend.on_host_pools_registered()
    keys = [f"{n:064x}" for n in range(4)]
    at = release.indices_of([0, 1, 2, 3], PAGE_TOKENS)
    indexer = PoolTransfer(name=PoolName.INDEXER, host_indices=at, keys=keys)
    state = PoolTransfer(name=PoolName.MAMBA, host_indices=torch.tensor([5]), keys=keys[2:3],
                         hit_policy=PoolHitPolicy.TRAILING_PAGES)  # fmt: skip
    stored = backend.batch_set_v2([indexer, state], extra_info=None)
    kv = backend.batch_set_v1(keys, at)
    hit = backend.batch_exists_v2(keys, [indexer, state], None)
    restorable = getattr(hit, "restorable_prefix_pages", [3])
    pools["mamba"].kv_buffer.zero_()
    loaded = backend.batch_get_v2([state])
    backend.close()
    good = (
        stored == {"indexer": [True] * 4, "mamba": [True]}
        and kv == [True] * 4
        and (hit.kv_hit_pages, hit.extra_pool_hit_pages, restorable)
        == (3, {"kv": 4, "indexer": 4, "mamba": 3}, [3])
        and loaded == {"mamba": [True]}
        and bool(pools["mamba"].kv_buffer[:, 5].view(torch.uint8).any())
    )
    return "ok" if good else f"FAILED: {stored} {kv} {hit} {loaded}"


def lora(folder: Path) -> str:
    """LoRA and salts: refused where the hashes leave them out."""
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    from hicache_core.errors import InvalidOptions

    arguments = types.SimpleNamespace(model_path="org/model", enable_lora=True, lora_paths=None)
    name = (
        "sglang.srt.runtime_context"
        if (folder / "srt/runtime_context.py").exists()
        else "sglang.srt.server_args"
    )
    getter = "get_server_args" if name.endswith("context") else "get_global_server_args"
    module = types.ModuleType(name)
    setattr(module, getter, lambda: arguments)
    kept = sys.modules.get(name)
    outcomes = []
    for enable_lora, salts in ((True, False), (False, True)):
        arguments.enable_lora = enable_lora
        sys.modules[name] = module
        try:
            config = release.storage_config(extra(zero_copy=True, cache_salts=salts))
            StorageBackendFactory.create_backend("dynamic", config, None)
            outcomes.append("served")
        except InvalidOptions:
            outcomes.append("refused")
        finally:
            sys.modules.pop(name, None)
            if kept is not None:
                sys.modules[name] = kept
    return f"LoRA {outcomes[0]}, salts {outcomes[1]}"


def plugin(folder: Path) -> str:
    """The entry point's names: constructed by the factory, its own names as before."""
    if not (folder / "srt/plugins/hook_registry.py").exists():
        return "not in this release"
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    from sglang.srt.plugins.hook_registry import HookRegistry

    from hicache_core import StorageBackendFactory as Ours
    from hicache_sglang import plugin as entry_point

    builtin = set(StorageBackendFactory._registry)
    Ours.register_backend("toy", "sgl_toy", "ToyStore")
    entry_point.register()
    HookRegistry.apply_hooks()
    pool = release.host_pool(folder, "mha", "page_first")
    backend = StorageBackendFactory.create_backend("hicache.toy", release.storage_config({}), pool)
    backend.register_mem_pool_host(pool)
    kept = builtin <= set(StorageBackendFactory._registry)
    good = kept and backend.batch_set_v1(["a" * 64], release.indices_of([0], PAGE_TOKENS)) == [True]
    backend.close()
    return "ok" if good else "FAILED"


if __name__ == "__main__":
    main()
