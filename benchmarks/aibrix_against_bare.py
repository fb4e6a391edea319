"""hicache-aibrix against AIBrix's own calls on the same pages, in one run: set and get, RocksDB and SHFS.

The bare side is what an engine's connector does: allocate_for, a copy into each
block, put; acquire, a copy out of each block, release. Ours is a HiCacheStorage,
and the same behind HiCache's bounce, whose cost is the third figure. What limits
both is the library: a thread pool's round trip a page, and one more copy (tobytes,
fill). Ours also checksums each page, and asks before a set whether it is there.

Run in the environment of .ci/env/aibrix. Goal and floor: 0.8 of the bare calls.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from typing import Any

import torch

from hicache_aibrix.making import attributes, load, settings_of
from hicache_aibrix.options import AibrixOptions
from hicache_core import Component, HiCache, HostPool, Identity, Placement

PAGE_NBYTES, PAGES, FLOOR = 1 << 18, 128, 0.8


def bare(kind: str, root: str) -> Any:
    """Make a manager whose blocks are pages."""
    native = load()
    package = native.package
    wanted = settings_of(AibrixOptions(backend=kind, root=root), "bare", 30.0)  # type: ignore[arg-type]
    wanted |= {"AIBRIX_KV_CACHE_OL_CHUNK_SIZE": PAGES, "AIBRIX_KV_CACHE_OL_L2_CACHE_OP_BATCH": 32}
    with attributes(native.envs, wanted):
        tensor = package.KVCacheTensorSpec(heads=[0], layers=[0], head_size=PAGE_NBYTES // 2)
        block = package.KVCacheBlockSpec(1, torch.uint8, package.KVCacheBlockLayout.NCLD, tensor)
        return package.BaseKVCacheManager(package.KVCacheConfig(block, package.ModelSpec(PAGES)))


def bare_set(manager: Any, hashes: Any, source: list[torch.Tensor]) -> None:
    handle = manager.allocate_for(None, hashes).get()
    for block, page in zip(handle.to_tensors(), source, strict=True):
        block.view(-1).copy_(page)
    assert manager.put(None, hashes, handle).get() == PAGES


def bare_get(manager: Any, hashes: Any, target: list[torch.Tensor]) -> None:
    count, handle = manager.acquire(None, hashes).get()
    assert count == PAGES
    for block, page in zip(handle.to_tensors(), target, strict=True):
        page.copy_(block.view(-1))
    handle.release()


def timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(kind: str, rounds: int) -> dict[str, float]:
    """Give the best seconds of each side and verb."""
    component = Component("kv", shard="whole", byte_order="opaque", format="u8", page_nbytes=PAGE_NBYTES)
    pool = HostPool.from_buffer(bytearray(os.urandom(PAGE_NBYTES * PAGES)), component)
    locs = pool.pages(range(PAGES))
    tensors = [torch.frombuffer(view, dtype=torch.uint8) for view in locs.buffers()]
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as root:
        from aibrix_kvcache import BlockHashes

        manager = bare(kind, f"{root}/bare")
        caches = {
            name: HiCache.open(
                "aibrix",
                identity=Identity.for_tests(),
                placement=Placement(),
                pools=[pool],
                timeout_s=60.0,
                options={
                    "backend": kind,
                    "root": f"{root}/{name}",
                    "network": False,
                    "bounce": name == "bounced",
                },
                strict=True,
            )
            for name, extra in (("ours", {}), ("bounced", {"bounce": True}))
        }
        for number in range(rounds):
            keys = [f"r{number}p{i}" for i in range(PAGES)]
            hashes = BlockHashes(keys, 1)
            sides: dict[str, tuple[Any, Any]] = {
                "bare": (
                    lambda hashes=hashes: bare_set(manager, hashes, tensors),
                    lambda hashes=hashes: bare_get(manager, hashes, tensors),
                )
            }
            for name, cache in caches.items():
                sides[name] = (
                    lambda cache=cache, keys=keys: cache.set(keys, locs),
                    lambda cache=cache, keys=keys: cache.get(keys, locs),
                )
            turn = number % len(sides)  # whoever writes last meets the others' dirty pages
            for name, (setting, getting) in [*sides.items()][turn:] + [*sides.items()][:turn]:
                for verb, work in (("set", setting), ("get", getting)):
                    best[f"{name} {verb}"] = min(best.get(f"{name} {verb}", 9e9), timed(work))
        for cache in caches.values():
            cache.close()
        manager.close()
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    below = 0
    for kind in ("rocksdb", "shfs"):
        best = measure(kind, rounds)
        for verb in ("set", "get"):
            speed = {
                name: PAGE_NBYTES * PAGES / best[f"{name} {verb}"] / 1e9
                for name in ("bare", "ours", "bounced")
            }
            ratio = speed["ours"] / speed["bare"]
            sys.stdout.write(
                f"{kind} {verb}: bare {speed['bare']:.2f} GB/s, ours {speed['ours']:.2f} ({ratio:.2f}), "
                f"bounced {speed['bounced']:.2f} ({speed['bounced'] / speed['ours']:.2f} of ours)\n"
            )
            below += ratio < FLOOR
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
