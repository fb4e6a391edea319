"""The file backend beside SGLang 0.5.23's HiCacheFile and NIXL 1.5.1's POSIX plugin, in one run.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 nixl-cu12==1.5.1 core/ plugins/file/
    VENV/bin/pip install --no-deps sglang==0.5.23
    VENV/bin/pip install orjson psutil pybase64 requests triton packaging pillow starlette msgspec pyzmq
    VENV/bin/python benchmarks/file_against.py [--pages 64kib,...] [--rounds 3] [--json]

Same bytes, same memory, 128 pages a batch, page cache warm, order rotating,
each on a fresh folder. Set and get of every page; contains of stored ones.
Ours verifies checksums, theirs have none. HiCacheFile is used through its own
batch verbs with a tensor a page, NIXL as its users do: a file a page, registered
by path for the batch, one transfer, deregistered; it has no contains beside
query_memory. Contestants that are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from file_throughput import BATCH, Work, opened, warmed

from hicache_core.options import parse_size

#: Bytes moved in one measurement.
MOVED_NBYTES = 256 << 20


class Ours:
    """hicache-file with its defaults: checksums, two lanes."""

    name = "hicache-file"

    def __init__(self, work: Work, path: str) -> None:
        self.work = work
        self.storage = opened(work, root=path)

    def set(self, n: int) -> bool:
        return self.storage.batch_set(self.work.keys[n], self.work.slots[n]).count(1) == BATCH

    def get(self, n: int) -> bool:
        return self.storage.batch_get(self.work.keys[n], self.work.slots[n]).count(1) == BATCH

    def contains(self, n: int) -> bool:
        return self.storage.batch_exists(self.work.keys[n]) == BATCH

    def close(self) -> None:
        self.storage.close()


class SGLang:
    """SGLang's HiCacheFile, imported without the engine around it."""

    name = "SGLang HiCacheFile"

    def __init__(self, work: Work, path: str) -> None:
        import torch

        module = _sglang_storage()
        config = module.HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=True,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="m",
        )
        self.work = work
        self.storage = module.HiCacheFile(config, path)
        whole = torch.frombuffer(work.buffer, dtype=torch.uint8)
        self.pages = [
            list(whole.split(work.nbytes))[n * BATCH : (n + 1) * BATCH] for n in range(work.batches)
        ]

    def set(self, n: int) -> bool:
        return bool(self.storage.batch_set(self.work.keys[n], self.pages[n]))

    def get(self, n: int) -> bool:
        return None not in self.storage.batch_get(self.work.keys[n], self.pages[n])

    def contains(self, n: int) -> bool:
        return bool(self.storage.batch_exists(self.work.keys[n]) == BATCH)

    def close(self) -> None:
        pass


class Nixl:
    """NIXL's POSIX plugin (AIO, its default): a file a page, by path."""

    name = "NIXL POSIX"

    def __init__(self, work: Work, path: str) -> None:
        import nixl_cu12._api as api

        self.work, self.path = work, path
        config = api.nixl_agent_config(backends=[])
        self.agent = api.nixl_agent(f"bench-{os.getpid()}-{time.time_ns()}", config)
        self.agent.create_backend("POSIX", {})
        self.regions = work.pool.regions()
        self.memory = self.agent.register_memory([(a, n, 0, "") for a, n in self.regions], "DRAM")

    def set(self, n: int) -> bool:
        return self._move("WRITE", "rw,create", n)

    def get(self, n: int) -> bool:
        return self._move("READ", "ro", n)

    def contains(self, n: int) -> bool:
        queries = [(0, 0, 0, f"{self.path}/{key}") for key in self.work.keys[n]]
        return None not in self.agent.query_memory(queries, "POSIX", "FILE")

    def close(self) -> None:
        self.agent.deregister_memory(self.memory)

    def _move(self, direction: str, mode: str, n: int) -> bool:
        work, agent = self.work, self.agent
        files = [(0, work.nbytes, i, f"{mode}:{self.path}/{key}") for i, key in enumerate(work.keys[n])]
        registered = agent.register_memory(files, "FILE")
        addresses, sizes = work.slots[n].addresses()
        slots = agent.get_xfer_descs([(a, s, 0) for a, s in zip(addresses, sizes, strict=True)], "DRAM")
        handle = agent.initialize_xfer(direction, slots, registered.trim(), agent.name)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        agent.deregister_memory(registered)
        return bool(state == "DONE")


def _sglang_storage() -> types.ModuleType:
    """Import the storage module below packages of our own making, so that the engine is not."""
    logging.disable(logging.WARNING)
    if "sglang" not in sys.modules:
        spec = find_spec("sglang")
        base = Path(next(iter(spec.submodule_search_locations or ()))) if spec else Path()
        for name, where in (("sglang", base), ("sglang.srt", base / "srt")):
            package = types.ModuleType(name)
            package.__path__ = [str(where)]
            sys.modules[name] = package
    from sglang.srt.mem_cache import hicache_storage

    return hicache_storage


def seconds(call: Callable[[int], bool], batches: int) -> float:
    began = time.perf_counter()
    for n in range(batches):
        if not call(n):
            raise RuntimeError("a contestant did not do its work")
    return time.perf_counter() - began


def measured(contestant: type, work: Work) -> dict[str, float]:
    """Set, look up and get everything on a fresh folder; check a sample of the bytes."""
    path = tempfile.mkdtemp(prefix="hicache-against-", dir=os.environ.get("HICACHE_BENCH_DIR"))
    try:
        one = contestant(work, path)
        wanted = bytes(work.buffer[-work.nbytes :])
        times = {"set": seconds(one.set, work.batches), "contains": seconds(one.contains, work.batches)}
        work.buffer[-work.nbytes :] = bytes(work.nbytes)
        times["get"] = seconds(one.get, work.batches)
        if bytes(work.buffer[-work.nbytes :]) != wanted:
            raise RuntimeError(f"{contestant.name} gave other bytes")
        one.close()
        return times
    finally:
        shutil.rmtree(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", default="64kib,256kib,1mib,4mib")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    contestants: list[type] = [Ours]
    contestants += [SGLang] if find_spec("sglang") and find_spec("torch") else []
    contestants += [Nixl] if find_spec("nixl_cu12") else []
    rows, lost = [], 0
    for text in given.pages.split(","):
        work = Work(parse_size(text), MOVED_NBYTES)
        taken: dict[str, list[dict[str, float]]] = {c.name: [] for c in contestants}
        for number in range(given.rounds):
            turn = number % len(contestants)
            for contestant in contestants[turn:] + contestants[:turn]:
                taken[contestant.name].append(warmed(lambda c=contestant, w=work: measured(c, w)))
        for verb in ("set", "get", "contains"):
            row: dict[str, object] = {"page KiB": work.nbytes >> 10, "verb": verb}
            for contestant in contestants:
                best = min(t[verb] for t in taken[contestant.name])
                row[contestant.name] = (
                    f"{best / work.batches * 1e6:.0f} us a batch"
                    if verb == "contains"
                    else f"{work.total / best / 2**30:.2f} GiB/s"
                )
                if contestant is not Ours:
                    pairs = zip(taken[Ours.name], taken[contestant.name], strict=True)
                    ratio = statistics.median(theirs[verb] / ours[verb] for ours, theirs in pairs)
                    row[f"times {contestant.name}"] = round(ratio, 2)
                    lost += ratio < 1
            rows.append(row)
    if given.json:
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        names = list(rows[0])
        sys.stdout.write("| " + " | ".join(names) + " |\n|" + "---|" * len(names) + "\n")
        for row in rows:
            sys.stdout.write("| " + " | ".join(str(row[name]) for name in names) + " |\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
