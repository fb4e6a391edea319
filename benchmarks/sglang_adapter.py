"""What the SGLang adapter costs: hicache's file backend behind it, beside SGLang's own file backend.

The same pages, the same calls, the same file system, one run; best of three for each cell:

    python benchmarks/sglang_adapter.py [--root FOLDER] [--megabytes 256] [--pages '1 MiB,4 MiB'] [--rounds 3]

``generic`` are the calls that SGLang makes of its own file backend, a flat tensor a
page; ``v2`` those for sidecar pools, which both know. ``pool`` is the whole way between
pool and store that SGLang takes: with its own file backend the generic calls and the
copies into flat tensors and out of them, with the adapter the v1 calls on pages in
place. Needs SGLang 0.5.23, importable as by .ci/env/sglang. The goal: faster in every
cell from 64 KiB to 4 MiB.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "packages/hicache-sglang/tests"
sys.path[:0] = [str(TESTS), str(TESTS / "cpu")]

import sgl_release  # noqa: E402
import stand_ins  # noqa: E402, F401 - importing it is all

FOLDER = sgl_release.prepare()

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName, PoolTransfer  # noqa: E402

from hicache_sglang.adapter import HiCacheSGLang  # noqa: E402

#: Layers that make pages of 64 KiB to 4 MiB at 16 tokens, 64 heads of 8 elements.
LAYERS = {"64 KiB": 2, "256 KiB": 8, "1 MiB": 32, "4 MiB": 128}
PAGE_TOKENS, HEADS = 16, 64
#: SGLang moves at most so many pages a call.
BATCH = 128
ROUNDS = 3
#: A call that moves no pages is over in microseconds, so it is made so many times.
EXISTS_CALLS = 20


class Store:
    """One backend with its pool, and the three verbs through one generation of calls."""

    def __init__(self, backend: Any, pool: Any, calls: str) -> None:
        self.backend, self.pool, self.calls = backend, pool, calls
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, PoolName.KV)

    def prepare(self, keys: list[str], at: torch.Tensor) -> list[torch.Tensor]:
        """Make the tensors of the generic calls, as SGLang's controller does."""
        if self.calls not in ("generic", "copied"):
            return []
        return [self.pool.get_data_page(at[i * PAGE_TOKENS]).clone() for i in range(len(keys))]

    def set(self, keys: list[str], at: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
        if self.calls == "generic":
            return bool(self.backend.batch_set(keys, tensors))
        if self.calls == "copied":
            pages = [self.pool.get_data_page(at[i * PAGE_TOKENS]) for i in range(len(keys))]
            return bool(self.backend.batch_set(keys, pages))
        if self.calls == "v1":
            return all(self.backend.batch_set_v1(keys, at))
        transfer = PoolTransfer(name=PoolName.KV, host_indices=at, keys=keys)
        return all(self.backend.batch_set_v2([transfer])[PoolName.KV])

    def exists(self, keys: list[str], at: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
        for _ in range(EXISTS_CALLS):
            if self.calls == "v2":
                found = self.backend.batch_exists_v2(keys, []).kv_hit_pages
            else:
                found = self.backend.batch_exists(keys)
            if found != len(keys):
                return False
        return True

    def get(self, keys: list[str], at: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
        if self.calls == "generic":
            return all(page is not None for page in self.backend.batch_get(keys, tensors))
        if self.calls == "copied":
            pages = self.backend.batch_get(keys, [self.pool.get_dummy_flat_data_page() for _ in keys])
            for i, page in enumerate(pages):
                self.pool.set_from_flat_data_page(at[i * PAGE_TOKENS], page)
            return True
        if self.calls == "v1":
            return all(self.backend.batch_get_v1(keys, at))
        transfer = PoolTransfer(name=PoolName.KV, host_indices=at, keys=keys)
        return all(self.backend.batch_get_v2([transfer])[PoolName.KV])

    def close(self) -> None:
        if hasattr(self.backend, "close"):
            self.backend.close()


def theirs(root: str, pool: Any, calls: str) -> Store:
    config = sgl_release.storage_config({"file_storage_path": root})
    return Store(HiCacheFile(config), pool, calls)


def ours(root: str, pool: Any, calls: str) -> Store:
    config = sgl_release.storage_config(
        {"backend_name": "file", "interface_v1": 1, "weights": "none", "options": {"root": root}}
    )
    return Store(HiCacheSGLang(config, {}), pool, calls)


def measure(
    make: Callable[..., Store], calls: str, pool: Any, where: Path, batches: list[Any]
) -> dict[str, float]:
    """Time the three verbs over all batches on a store of their own; seconds each."""
    root = tempfile.mkdtemp(dir=where)
    store = make(root, pool, calls)
    seconds = {}
    given = [(keys, at, store.prepare(keys, at)) for keys, at in batches]
    for verb in ("set", "exists", "get"):
        gc.collect()
        move = getattr(store, verb)
        started = time.perf_counter()
        good = all([move(*batch) for batch in given])
        seconds[verb] = (time.perf_counter() - started) / (EXISTS_CALLS if verb == "exists" else 1)
        assert good, (calls, verb)
    store.close()
    shutil.rmtree(root)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--pages", default=",".join(LAYERS), help="page sizes, such as '1 MiB,4 MiB'")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    out = sys.stdout.write
    out("| page | calls | verb | SGLang's file | hicache file | times |\n|---|---|---|---|---|---|\n")
    slower = 0
    for name in given.pages.split(","):
        layers = LAYERS[name]
        nbytes = 2 * layers * PAGE_TOKENS * HEADS * 8 * 2
        pages = max(16, given.megabytes * 1_000_000 // nbytes)
        pool = sgl_release.host_pool(
            FOLDER, "mha", "page_first", pages=pages, page_size=PAGE_TOKENS, layers=layers, heads=HEADS
        )
        sgl_release.fill(pool)
        batches = []
        for start in range(0, pages, BATCH):
            some = list(range(start, min(start + BATCH, pages)))
            keys = [f"{layers:032x}{page:032x}" for page in some]
            batches.append((keys, sgl_release.indices_of(some, PAGE_TOKENS)))
        best: dict[tuple[str, str, str], float] = {}
        for _ in range(given.rounds):
            for who, make, calls in (
                ("theirs", theirs, "generic"), ("ours", ours, "generic"),
                ("theirs", theirs, "v2"), ("ours", ours, "v2"),
                ("theirs", theirs, "copied"), ("ours", ours, "v1"),
            ):  # fmt: skip
                for verb, seconds in measure(make, calls, pool, given.root, batches).items():
                    key = (who, calls, verb)
                    best[key] = min(best.get(key, seconds), seconds)
        for calls in ("generic", "v2", "pool"):
            for verb in ("set", "exists", "get"):
                slower += row(out, name, calls, verb, best, pages, nbytes)
    out(f"\n{slower} cells slower than SGLang's own.\n")
    sys.exit(bool(slower))


def row(
    out: Callable[[str], Any],
    name: str,
    calls: str,
    verb: str,
    best: dict[Any, float],
    pages: int,
    nbytes: int,
) -> int:
    """Write one cell; 1 where it is slower."""
    mine = best["ours", "v1" if calls == "pool" else calls, verb]
    other = best["theirs", "copied" if calls == "pool" else calls, verb]

    def shown(seconds: float) -> str:
        return (
            f"{pages / seconds:,.0f} keys/s"
            if verb == "exists"
            else f"{pages * nbytes / seconds / 1e9:.2f} GB/s"
        )

    out(f"| {name} | {calls} | {verb} | {shown(other)} | {shown(mine)} | {other / mine:.2f} |\n")
    return int(mine > other)


if __name__ == "__main__":
    main()
