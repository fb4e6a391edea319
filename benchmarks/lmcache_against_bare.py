"""hicache-lmcache against LMCache's own calls on the same pages, in one run: set and get, files and Redis.

The bare side is what LMCache's own controller does with an L2 adapter: a copy of
each page into a memory object, submit_store_task, the bell, pop; submit_load_task,
the bell, query, a copy out. Ours is a HiCacheStorage behind HiCache, and the same
with HiCache's bounce over it, whose cost is the third figure. Ours also asks the
store what is there, checksums each page, and never loads what is not there.

``memory`` is LMCache's L1Manager alone (reserve_write, copy, finish_write;
reserve_read, copy, finish_read), which asks no store. ``l1_bytes`` is ours with
that L1: sets that fill it too, and gets of pages that are in it, once their
files are old enough to have a mark.

Run in the environment of .ci/env/lmcache. Goal and floor: 0.8 of the bare calls.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from hicache_core import Component, HiCache, HostPool, Identity, Placement
from hicache_lmcache.native import hush
from hicache_lmcache.redis_server import RedisServer

PAGE_NBYTES, PAGES, FLOOR, WAIT_MS = 1 << 18, 128, 0.8, 30_000
#: After this files have a mark by which their pages may stay in the L1.
SETTLED_S = 0.05

Verb = Callable[[list[str]], None]


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Object:
    """What LMCache's controller hands to an adapter: memory behind ``byte_array``."""

    def __init__(self) -> None:
        self.tensor = torch.empty(PAGE_NBYTES, dtype=torch.uint8)
        self.byte_array = memoryview(self.tensor.numpy())


class BareAdapter:
    """An adapter of LMCache, called as its controller calls it, with memory objects made before."""

    def __init__(self, config: Any, pages: list[torch.Tensor]) -> None:
        from lmcache.v1.distributed.api import ObjectKey
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter

        self._key = lambda name: ObjectKey(name.encode().ljust(16, b"."), "bare", 0)
        self._adapter = create_l2_adapter(config)
        self._pages = pages
        self._objects = [Object() for _ in pages]

    def set(self, names: list[str]) -> None:
        for item, page in zip(self._objects, self._pages, strict=True):
            item.tensor.copy_(page)
        task = self._adapter.submit_store_task([self._key(name) for name in names], self._objects)
        done: dict[int, Any] = {}
        while task not in done:
            self._hear(self._adapter.get_store_event_fd())
            done |= self._adapter.pop_completed_store_tasks()
        if not done[task].is_successful():
            raise SystemExit("the bare adapter stored nothing")

    def get(self, names: list[str]) -> None:
        task = self._adapter.submit_load_task([self._key(name) for name in names], self._objects)
        while (found := self._adapter.query_load_result(task)) is None:
            self._hear(self._adapter.get_load_event_fd())
        if not all(found.test(position) for position in range(len(names))):
            raise SystemExit("the bare adapter loaded less than it stored")
        for item, page in zip(self._objects, self._pages, strict=True):
            page.copy_(item.tensor)

    def close(self) -> None:
        self._adapter.close()

    @staticmethod
    def _hear(bell: int) -> None:
        poller = select.poll()
        poller.register(bell, select.POLLIN)
        if not poller.poll(WAIT_MS):
            raise SystemExit("the bare adapter gave no answer")
        os.read(bell, 8)


class BareMemory:
    """LMCache's L1, with room for all rounds: no eviction is measured."""

    def __init__(self, pages: list[torch.Tensor], rounds: int) -> None:
        from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
        from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
        from lmcache.v1.distributed.l1_manager import L1Manager

        self._key = lambda name: ObjectKey(name.encode().ljust(16, b"."), "bare", 0)
        room = (rounds + 1) * PAGES * PAGE_NBYTES
        memory = L1MemoryManagerConfig(size_in_bytes=room, use_lazy=False, shm_name="")
        self._manager = L1Manager(L1ManagerConfig(memory))
        self._layout = MemoryLayoutDesc([torch.Size([PAGE_NBYTES])], [torch.uint8])
        self._pages = pages
        warm = [self._key(f"w{number}") for number in range(rounds * PAGES)]
        for _, item in self._manager.reserve_write(warm, [False] * len(warm), self._layout).values():
            item.tensor.fill_(1)
        self._manager.finish_write(warm)
        self._manager.delete(warm)

    def set(self, names: list[str]) -> None:
        keys = [self._key(name) for name in names]
        reserved = self._manager.reserve_write(keys, [False] * len(keys), self._layout)
        for key, page in zip(keys, self._pages, strict=True):
            reserved[key][1].tensor.copy_(page)
        self._manager.finish_write(keys)

    def get(self, names: list[str]) -> None:
        keys = [self._key(name) for name in names]
        reserved = self._manager.reserve_read(keys)
        for key, page in zip(keys, self._pages, strict=True):
            page.copy_(reserved[key][1].tensor)
        self._manager.finish_read(keys)

    def close(self) -> None:
        self._manager.close()


def measure(sides: dict[str, tuple[Verb, Verb]], rounds: int) -> dict[str, float]:
    """Give the best seconds of each side and verb; whoever writes last meets the others' dirty pages."""
    best: dict[str, float] = {}
    for number in range(rounds):
        names = [f"r{number}p{i}" for i in range(PAGES)]
        turn = number % len(sides)
        for name, (setting, getting) in [*sides.items()][turn:] + [*sides.items()][:turn]:
            for verb, work in (("set", setting), ("get", getting)):
                if (name, verb) == ("l1_bytes", "get"):
                    time.sleep(SETTLED_S)
                    getting(names)
                seconds = timed(partial(work, names))
                best[f"{name} {verb}"] = min(best.get(f"{name} {verb}", 9e9), seconds)
    return best


@contextmanager
def sides_of(l2: str, rounds: int) -> Iterator[dict[str, tuple[Verb, Verb]]]:
    component = Component("kv", shard="whole", byte_order="opaque", format="u8", page_nbytes=PAGE_NBYTES)
    pool = HostPool.from_buffer(bytearray(os.urandom(PAGE_NBYTES * PAGES)), component)
    locs = pool.pages(range(PAGES))
    pages = [torch.frombuffer(view, dtype=torch.uint8) for view in locs.buffers()]
    with ExitStack() as after:
        root = after.enter_context(tempfile.TemporaryDirectory(prefix="hicache-bench-"))
        options: dict[str, Any] = {"l2": l2}
        if l2 == "fs":
            from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig

            config: Any = FSL2AdapterConfig(f"{root}/bare", relative_tmp_dir="tmp")
            options |= {"root": f"{root}/ours", "network": False}
        else:
            from lmcache.v1.distributed.l2_adapters.resp_l2_adapter import RESPL2AdapterConfig

            server = RedisServer()
            server.start()
            after.callback(server.stop)
            config = RESPL2AdapterConfig("127.0.0.1", server.port, 4, "", "")
            options["port"] = server.port
        adapter, memory = BareAdapter(config, pages), BareMemory(pages, rounds)
        after.callback(adapter.close)
        after.callback(memory.close)
        sides: dict[str, tuple[Verb, Verb]] = {
            "bare": (adapter.set, adapter.get),
            "memory": (memory.set, memory.get),
        }
        for name, more in (
            ("ours", {}),
            ("bounced", {"bounce": True}),
            ("l1_bytes", {"l1_bytes": (rounds + 1) * PAGES * (PAGE_NBYTES + 4096)}),
        ):
            identity = Identity.for_tests(tenant=name)
            cache = after.enter_context(
                HiCache.open(
                    "lmcache",
                    identity=identity,
                    placement=Placement(),
                    pools=[pool],
                    timeout_s=60.0,
                    options=options | more,
                    strict=True,
                )
            )
            sides[name] = (
                lambda names, cache=cache: whole(cache.set(names, locs)),
                lambda names, cache=cache: whole(cache.get(names, locs)),
            )
        yield sides


def whole(statuses: Any) -> None:
    if not all(statuses):
        raise SystemExit(f"hicache answered {[status.name for status in statuses if not status][:3]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    hush()
    below = 0
    for l2 in ("fs", "resp"):
        with sides_of(l2, rounds) as sides:
            best = measure(sides, rounds)
        for verb in ("set", "get"):
            speed = {name: PAGE_NBYTES * PAGES / best[f"{name} {verb}"] / 1e9 for name in sides}
            ratio = speed["ours"] / speed["bare"]
            sys.stdout.write(
                f"{l2} {verb}: bare {speed['bare']:.2f} GB/s, ours {speed['ours']:.2f} ({ratio:.2f}), "
                f"bounced {speed['bounced']:.2f} ({speed['bounced'] / speed['ours']:.2f} of ours), "
                f"with l1_bytes {speed['l1_bytes']:.2f}, LMCache's memory {speed['memory']:.2f}\n"
            )
            below += ratio < FLOOR
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
