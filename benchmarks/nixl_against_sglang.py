"""HiCacheNixl of hicache against SGLang's class of the same name, over the same NIXL and the same disk.

    SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR=DIR python benchmarks/nixl_against_sglang.py --folder DIR

Both write and read 128 pages a call of the same pool, through the page cache and
(``--direct``, SGLang's default) past it. SGLang's verifies nothing and renames
nothing; ours does both. Rounds alternate; the fastest of each counts. It needs
nixl and a SGLang that can be imported; the stand-ins of
packages/hicache-sglang/tests (light and cpu on PYTHONPATH) do. Exit status 1
where ours is slower anywhere.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import mmap
import os
import shutil
import sys
import tempfile
import time

import torch

from hicache_core import Component, HostPool, Identity, Namespace, Placement
from hicache_core.storage import HiCacheStorageConfig
from hicache_nixl.options import NixlOptions
from hicache_nixl.storage import HiCacheNixl
from hicache_sglang.reverse import PoolOfOurs

SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
PAGES = 128
FLOOR = 1.0
STORAGE_DIR = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"


class AlignedPool(PoolOfOurs):
    """A host pool as SGLang 0.5.23 knows one."""

    def is_stride_page_aligned(self, nbytes: int) -> bool:
        return not any((s.address | s.stride) % nbytes for s in self._pool.segments)


def theirs_on(pool: HostPool, direct: bool) -> object:
    interface = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    module = importlib.import_module("sglang.srt.mem_cache.storage.nixl.hicache_nixl")
    values = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True,
        "model_name": "bench",
        "extra_config": {"plugin": {"posix": {"active": "true"}}, "use_direct_io": direct},
    }  # fmt: skip
    fields = interface.HiCacheStorageConfig.__dataclass_fields__
    config = interface.HiCacheStorageConfig(**{k: v for k, v in values.items() if k in fields})
    made = module.HiCacheNixl(config)
    made.register_mem_pool_host(AlignedPool(pool))
    return made


def measure(nbytes: int, rounds: int, folder: str, direct: bool) -> dict[str, float]:
    memory = mmap.mmap(-1, nbytes * PAGES)
    memory[:] = os.urandom(1 << 20) * (len(memory) >> 20)
    component = Component("kv", shard="whole", byte_order="page_first", format="bf16", page_nbytes=nbytes)
    pool = HostPool.from_buffer(memory, component)
    identity = Identity.for_tests()
    config = HiCacheStorageConfig(
        namespace=Namespace.of(identity), identity=identity, placement=Placement(), timeout_s=60.0
    )
    ours = HiCacheNixl(config, NixlOptions(folders=(f"{folder}/ours",), direct_io=direct))
    ours.open([pool])
    theirs = theirs_on(pool, direct)
    pages, indices = pool.pages(range(PAGES)), torch.arange(PAGES)
    best: dict[str, float] = {}
    for number in range(rounds + 1):
        hashes = [f"{nbytes}-{number}-{i}" for i in range(PAGES)]
        keys = component.keys(hashes)
        steps = {
            "theirs set": lambda hashes=hashes: theirs.batch_set_v1(hashes, indices),
            "ours set": lambda keys=keys: ours.batch_set(keys, pages),
            "theirs get": lambda hashes=hashes: theirs.batch_get_v1(hashes, indices),
            "ours get": lambda keys=keys: ours.batch_get(keys, pages),
        }
        order = list(steps.items())
        for name, step in [order[at] for at in (1, 0, 3, 2)] if number % 2 else order:
            started = time.perf_counter()
            answers = step()
            took = time.perf_counter() - started
            assert len(answers) == PAGES, name
            assert all(answers), name
            if number:
                best[name] = min(best.get(name, took), took)
        ours.clear()
        theirs.clear()
    ours.close()
    theirs.close()
    return {name: nbytes * PAGES / 2**30 / seconds for name, seconds in best.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--direct", action="store_true")
    given = parser.parse_args()
    if not os.environ.get(STORAGE_DIR, "").startswith(given.folder):
        parser.error(f"set {STORAGE_DIR} to a folder below --folder, so that both use one disk")
    logging.disable(logging.WARNING)
    place = tempfile.mkdtemp(prefix="hicache-bench-", dir=given.folder)
    worst = float("inf")
    try:
        for nbytes in SIZES:
            speed = measure(nbytes, given.rounds, place, given.direct)
            ratios = [speed[f"ours {verb}"] / speed[f"theirs {verb}"] for verb in ("set", "get")]
            worst = min(worst, *ratios)
            sys.stdout.write(
                f"{nbytes >> 10:5d} KiB  "
                f"set {speed['ours set']:5.2f} of {speed['theirs set']:5.2f} GiB/s = {ratios[0]:.2f}   "
                f"get {speed['ours get']:5.2f} of {speed['theirs get']:5.2f} GiB/s = {ratios[1]:.2f}\n"
            )
            sys.stdout.flush()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return int(worst < FLOOR)


if __name__ == "__main__":
    sys.exit(main())
