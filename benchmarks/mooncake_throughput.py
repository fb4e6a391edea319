"""The Mooncake backend's throughput beside the library itself, and beside SGLang's own class.

    python benchmarks/mooncake_throughput.py [--pages 64kib,256kib,1mib,4mib] [--scale 1.0] [--sglang]

Raw is ``batch_put_from`` and ``batch_get_into`` of the same client, the same
registered memory and the same segment, 128 pages a call, results looked at by nobody. The
contestants take turns, in an order that rotates. ``ratio`` compares the fastest
quarter of each one's calls, since whatever else runs on the machine only ever adds
time; ``median`` is the median of the ratios within a round. As in an engine, a
prefix has been asked for before it is set, so a set need not ask again; ``set,
unasked`` is a set of keys of which nothing is known.

``--sglang`` adds SGLang 0.5.23's MooncakeStore on a master of its own with a
segment of the same size, through its zero-copy calls, in the default layout
(page_first, a K and a V part a page). It needs the files of the wheel
(``pip install --no-deps sglang==0.5.23``) and torch; what the class's module
imports for GPUs is replaced by empty stand-ins.

Everything runs on this machine: objects lie in the process's own segment, and
bytes move by memory copies. Exit status 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hicache_core import (
    Component,
    HiCacheStorageConfig,
    HostPool,
    Identity,
    Namespace,
    Placement,
    Segment,
    Status,
    StorageBackendFactory,
)
from hicache_core.buffers import address_of, flat_view
from hicache_core.options import parse_size
from hicache_mooncake._servers import Master

BATCH = 128
#: A batch of the largest pages must fit below the master's watermark of 0.9, twice in a row.
SEGMENT = 1 << 30
GOAL_RAW = 0.95
GOAL_SGLANG = 1.0
#: Rounds a page size: more where a call is short.
ROUNDS = {64 << 10: 60, 256 << 10: 30, 1 << 20: 16, 4 << 20: 10}
WARM_UP = 3

Timed = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One verb, one page size, one opponent."""

    what: str
    page_kib: int
    opponent_gib_s: float
    ours_gib_s: float
    ratio: float
    median: float
    goal: float | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", default="64kib,256kib,1mib,4mib")
    parser.add_argument("--scale", type=float, default=1.0, help="times the number of rounds")
    parser.add_argument("--sglang", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    sizes = [parse_size(text) for text in given.pages.split(",")]
    master = Master(lease_ms=10_000).start()
    other = Master(lease_ms=10_000).start() if given.sglang else None
    rows: list[Row] = []
    try:
        for nbytes in sizes:
            rounds = max(4, round(ROUNDS.get(nbytes, 16) * given.scale))
            for row in measured(nbytes, rounds, master, other):
                rows.append(row)
                if not given.json:
                    show(row)
    finally:
        master.stop()
        if other is not None:
            other.stop()
    if given.json:
        print(json.dumps([asdict(row) for row in rows]))  # noqa: T201
    missed = [row for row in rows if row.goal is not None and row.ratio < row.goal]
    return 1 if missed else 0


def show(row: Row) -> None:
    verdict = "ok" if row.goal is None or row.ratio >= row.goal else "MISSED"
    goal = "" if row.goal is None else f"  goal {row.goal:.2f}  {verdict}"
    speeds = f"opponent {row.opponent_gib_s:6.2f} ours {row.ours_gib_s:6.2f} GiB/s"
    print(  # noqa: T201
        f"{row.what:20}{row.page_kib:5} KiB {speeds}  ratio {row.ratio:.3f} (median {row.median:.2f}){goal}",
        flush=True,
    )


def measured(nbytes: int, rounds: int, master: Master, other: Master | None) -> Iterator[Row]:
    """Run the contestants of one page size."""
    memory = mmap.mmap(-1, BATCH * nbytes)
    memory[:] = os.urandom(1 << 16) * (BATCH * nbytes >> 16)
    ours = Ours(memory, nbytes, master, segments=1)
    try:
        yield from compared(nbytes, rounds, ours, Raw(ours), ("set", "get"), "raw", GOAL_RAW)
        yield from compared(nbytes, rounds, ours, Raw(ours), ("unasked",), "raw", None)
    finally:
        ours.close()
    if other is None:
        return
    ours = Ours(memory, nbytes, master, segments=2)
    try:
        theirs = Sglang(memory, nbytes, other)
        yield from compared(nbytes, rounds, ours, theirs, ("set", "get"), "sglang", GOAL_SGLANG)
        theirs.close()
    finally:
        ours.close()


def compared(
    nbytes: int, rounds: int, ours: Any, theirs: Any, verbs: tuple[str, ...], name: str, goal: float | None
) -> Iterator[Row]:
    """Let two contestants take turns, and give the ratios of each verb."""
    found: dict[str, list[tuple[float, float]]] = {verb: [] for verb in verbs}
    for number in range(rounds + WARM_UP):
        times: dict[Any, Timed] = {}
        for contestant in (ours, theirs) if number % 2 else (theirs, ours):
            times[contestant] = contestant.round(f"{name}{number}", asked="unasked" not in verbs)
        for verb in verbs if number >= WARM_UP else ():
            kind = "get" if verb == "get" else "set"
            found[verb].append((times[theirs][kind], times[ours][kind]))
    gib = BATCH * nbytes / (1 << 30)
    for verb, pairs in found.items():
        yield Row(
            what=f"{'set, unasked' if verb == 'unasked' else verb} / {name}",
            page_kib=nbytes >> 10,
            opponent_gib_s=gib / fast(opponent for opponent, _ in pairs),
            ours_gib_s=gib / fast(own for _, own in pairs),
            ratio=fast(opponent for opponent, _ in pairs) / fast(own for _, own in pairs),
            median=statistics.median(opponent / own for opponent, own in pairs),
            goal=goal,
        )


def fast(times: Iterable[float]) -> float:
    """Give the mean of the fastest quarter."""
    best = sorted(times)
    return statistics.fmean(best[: max(1, len(best) // 4)])


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Time one call."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


class Ours:
    """The backend itself, without the layer above."""

    def __init__(self, memory: mmap.mmap, nbytes: int, master: Master, segments: int) -> None:
        self.component = Component(
            "kv", shard="whole", byte_order="page_first", format="bf16", page_nbytes=nbytes
        )
        self.address = address_of(flat_view(memory))
        part = nbytes // segments
        # As page_first lays it out: all of K, then all of V.
        places = tuple(Segment(self.address + i * BATCH * part, part, part) for i in range(segments))
        pool = HostPool(self.component, places, BATCH, owner=memory)
        self.pages = pool.pages(range(BATCH))
        identity = Identity.for_tests(tenant=f"bench-{nbytes}-{segments}")
        config = HiCacheStorageConfig(
            namespace=Namespace.of(identity), identity=identity, placement=Placement(), timeout_s=30.0
        )
        options = {"master": master.address, "metrics": master.metrics, "segment_size": SEGMENT}
        self.storage = StorageBackendFactory.create_backend("mooncake", config, [pool], **options)
        self.nbytes = nbytes

    def round(self, label: str, *, asked: bool) -> Timed:
        """Set and get one batch of new keys."""
        keys = self.component.keys([f"{label}{i:050x}" for i in range(BATCH)])
        storage, pages = self.storage, self.pages
        if asked:
            assert storage.batch_contains(keys).count(Status.MISS) == BATCH
        set_s, stored = timed(lambda: storage.batch_set(keys, pages))
        get_s, got = timed(lambda: storage.batch_get(keys, pages))
        assert stored.count(Status.OK) == got.count(Status.OK) == BATCH
        # By force, as the opponents do: the backend's own removal would keep this memory from the next round.
        storage._client.native.batch_remove(storage._names.of(keys), True)
        return {"set": set_s, "get": get_s}

    def close(self) -> None:
        self.storage.close()


class Raw:
    """The library's own calls on the client of ``Ours``."""

    def __init__(self, ours: Ours) -> None:
        self.native = ours.storage._client._native
        self.prefix = ours.storage._names.prefix
        self.component = ours.component
        self.addresses, self.sizes = ours.pages.addresses()

    def round(self, label: str, *, asked: bool) -> Timed:
        """Put and get one batch of new names, of the length of ours."""
        keys = self.component.keys([f"r{label}{i:049x}" for i in range(BATCH)])
        names = [self.prefix + key for key in keys]
        native, addresses, sizes = self.native, self.addresses, self.sizes
        if asked:
            assert native.batch_is_exist(names) == [0] * BATCH
        set_s, stored = timed(lambda: native.batch_put_from(names, addresses, sizes))
        get_s, got = timed(lambda: native.batch_get_into(names, addresses, sizes))
        assert stored == [0] * BATCH
        assert got == sizes
        native.batch_remove(names, True)
        return {"set": set_s, "get": get_s}


class Sglang:
    """SGLang's MooncakeStore, its zero-copy calls."""

    def __init__(self, memory: mmap.mmap, nbytes: int, master: Master) -> None:
        import torch

        module, config_class = light_sglang()
        extra = {
            "master_server_address": master.address,
            "local_hostname": "127.0.0.1",
            "global_segment_size": str(SEGMENT),
            "protocol": "tcp",
        }
        config = config_class(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench/model",
            extra_config=extra,
        )
        self.store = module.MooncakeStore(config)
        self.store.register_mem_pool_host(PagesOf(memory, nbytes, torch))
        self.indices = torch.arange(BATCH, dtype=torch.int64)

    def round(self, label: str, *, asked: bool) -> Timed:
        """Set and get one batch of new keys; they have been asked for, as its engine does."""
        keys = [f"{label}{i:050x}" for i in range(BATCH)]
        if asked:
            assert self.store.batch_exists(keys) == 0
        set_s, stored = timed(lambda: self.store.batch_set_v1(keys, self.indices))
        get_s, got = timed(lambda: self.store.batch_get_v1(keys, self.indices))
        assert all(stored)
        assert all(got)
        self.store.store.remove_all(True)
        return {"set": set_s, "get": get_s}

    def close(self) -> None:
        self.store.store.close()


class PagesOf:
    """What the class asks of a host pool: one token a page, K before V."""

    page_size = 1
    layout = "page_first"

    def __init__(self, memory: mmap.mmap, nbytes: int, torch: Any) -> None:
        self.kv_buffer = torch.frombuffer(memory, dtype=torch.uint8)
        self._half = nbytes // 2

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Give two parts a page, as page_first does."""
        base = self.kv_buffer.data_ptr()
        values = base + BATCH * self._half
        pointers = [start + i * self._half for i in indices.tolist() for start in (base, values)]
        return pointers, [self._half] * len(pointers)

    def get_ksize_per_token(self) -> int:
        return self._half


@cache
def light_sglang() -> tuple[Any, Any]:
    """Import the class without the GPU side of its package."""
    found = importlib.util.find_spec("sglang")
    root = Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None
    if root is None:
        raise SystemExit("sglang is not installed; run: pip install --no-deps sglang==0.5.23")
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage"):
        package = ModuleType(name)
        package.__path__ = [str(root.parent / name.replace(".", "/"))]
        sys.modules.setdefault(name, package)
    base = "sglang.srt.mem_cache"
    stand_in(f"{base}.hybrid_cache.linker_pool_assembler", "DevicePoolEntry")
    stand_in(f"{base}.pool_host", "HostKVCache", "HostTensorAllocator")
    stand_in(f"{base}.pool_host.mla", "MLATokenToKVPoolHost")
    stand_in("sglang.srt.observability.metrics_collector", "StorageMetrics")
    module = importlib.import_module(f"{base}.storage.mooncake_store.mooncake_store")
    return module, importlib.import_module(f"{base}.hicache_storage").HiCacheStorageConfig


def stand_in(name: str, *classes: str) -> None:
    """Put an empty module in the place of one that needs a GPU's libraries."""
    module = ModuleType(name)
    module.__path__ = []
    for each in classes:
        setattr(module, each, type(each, (), {}))
    sys.modules[name] = module


if __name__ == "__main__":
    sys.exit(main())
