"""HiCacheNixl against the bare NIXL calls, on the same buffers and the same disk.

    python benchmarks/nixl_against_bare.py [--io aio|uring] [--pages 128] [--rounds 15] [--folder /mnt/nvme0]

Bare is what a program without any care does: register the files (path mode),
one transfer, deregister, and on set a rename from a temporary name. HiCacheNixl
does the same and adds existence and size checks, a trailer with a checksum a
page, and the statuses. Rounds alternate, so that both meet the same noise; the
ratio is of the fastest round of each, since on a shared machine noise only adds.
Each row is one page size; 1.00 is as fast as bare. It needs nixl, two cores that
do nothing else, and 2 GiB of page cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import mmap
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from hicache_core import Component, HostPool, Identity, Namespace, Placement
from hicache_core.storage import HiCacheStorageConfig
from hicache_nixl._native import load
from hicache_nixl.options import NixlOptions
from hicache_nixl.storage import HiCacheNixl

#: Set and get over bare, at every size; below it the exit status is 1.
FLOOR = 0.9
#: Files are removed when so many bytes lie there. ext4 without a journal passes over inodes that were removed
#: within the last seconds, one by one: a file made after many removals takes ten times as long.
KEPT_NBYTES = 1 << 30
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)


class Bare:
    """The NIXL calls themselves."""

    def __init__(self, io: str, address: int, nbytes: int, page_nbytes: int, count: int) -> None:
        nixl = load("auto")
        sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        self.agent = nixl.nixl_agent("bare", nixl.nixl_agent_config(backends=[], sync_mode=sync))
        self.agent.create_backend("POSIX", {"use_uring" if io == "uring" else "use_aio": "true"})
        self.pool = self.agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        self.page_nbytes = page_nbytes
        slots = [(address + i * page_nbytes, page_nbytes, 0) for i in range(count)]
        self.slots = self.agent.get_xfer_descs(slots, "DRAM")

    def move(self, verb: str, mode: str, paths: list[str]) -> None:
        agent = self.agent
        rows = [(0, self.page_nbytes, i, f"{mode}:{path}") for i, path in enumerate(paths)]
        files = agent.register_memory(rows, "FILE")
        handle = agent.initialize_xfer(verb, self.slots, files.trim(), agent.name)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE"
        agent.release_xfer_handle(handle)
        agent.deregister_memory(files)

    def set(self, paths: list[str]) -> None:
        temporary = [f"{path}.tmp" for path in paths]
        self.move("WRITE", "rw,create", temporary)
        for source, target in zip(temporary, paths, strict=True):
            os.rename(source, target)

    def get(self, paths: list[str]) -> None:
        self.move("READ", "ro", paths)

    def close(self) -> None:
        self.agent.deregister_memory(self.pool)


def contestants(io: str, page_nbytes: int, count: int, folder: str, options: dict) -> Iterator:
    memory = mmap.mmap(-1, page_nbytes * count)
    memory[:] = os.urandom(min(len(memory), 1 << 20)) * (len(memory) >> 20 or 1)
    component = Component(
        "kv", shard="whole", byte_order="page_first", format="bf16", page_nbytes=page_nbytes
    )
    pool = HostPool.from_buffer(memory, component)
    identity = Identity.for_tests()
    config = HiCacheStorageConfig(
        namespace=Namespace.of(identity), identity=identity, placement=Placement(), timeout_s=60.0
    )
    place = f"{folder}/bare"
    os.mkdir(place)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    bare = Bare(io, address, len(memory), page_nbytes, count)
    ours = HiCacheNixl(config, NixlOptions(folders=(f"{folder}/ours",), io=io, **options))
    ours.open([pool])
    pages = pool.pages(range(count))

    def all_ok(statuses: list) -> None:
        assert set(statuses) == {1}

    def round_of(number: int) -> dict[str, Callable[[], None]]:
        paths = [f"{place}/{number}-{i}" for i in range(count)]
        keys = component.keys([f"{number}-{i}" for i in range(count)])
        return {
            "bare set": lambda: bare.set(paths),
            "ours set": lambda: all_ok(ours.batch_set(keys, pages)),
            "bare get": lambda: bare.get(paths),
            "ours get": lambda: all_ok(ours.batch_get(keys, pages)),
        }

    def clear() -> None:
        ours.clear()
        for name in os.listdir(place):
            os.unlink(f"{place}/{name}")

    yield round_of, clear
    ours.close()
    bare.close()


def measure(
    io: str, page_nbytes: int, count: int, rounds: int, folder: str, options: dict
) -> dict[str, float]:
    """Give GiB/s by contestant and verb: the fastest of the rounds, the first one left out."""
    place = tempfile.mkdtemp(prefix="hicache-bench-", dir=folder)
    seconds: dict[str, list[float]] = {}
    try:
        for round_of, clear in contestants(io, page_nbytes, count, place, options):
            for number in range(rounds + 1):
                steps = list(round_of(number).items())
                swapped = [steps[1], steps[0], steps[3], steps[2]] if number % 2 else steps
                for name, step in swapped:
                    started = time.perf_counter()
                    step()
                    if number:
                        seconds.setdefault(name, []).append(time.perf_counter() - started)
                if 2 * (number + 1) * count * page_nbytes % KEPT_NBYTES == 0:
                    clear()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return {name: page_nbytes * count / 2**30 / min(t) for name, t in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--io", choices=("aio", "uring"), default="aio")
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--option", action="append", default=[], metavar="K=V")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    logging.getLogger("nixl").setLevel(logging.ERROR)
    options = dict(each.split("=", 1) for each in given.option)
    rows = []
    for nbytes in SIZES:
        speed = measure(given.io, nbytes, given.pages, given.rounds, given.folder, options)
        ratios = {verb: speed[f"ours {verb}"] / speed[f"bare {verb}"] for verb in ("set", "get")}
        rows.append({"page_nbytes": nbytes, **speed, "set ratio": ratios["set"], "get ratio": ratios["get"]})
        if not given.json:
            sys.stdout.write(
                f"{given.io} {nbytes >> 10:5d} KiB  "
                f"set {speed['ours set']:5.2f} of {speed['bare set']:5.2f} GiB/s = {ratios['set']:.2f}   "
                f"get {speed['ours get']:5.2f} of {speed['bare get']:5.2f} GiB/s = {ratios['get']:.2f}\n"
            )
            sys.stdout.flush()
    if given.json:
        json.dump(rows, sys.stdout, indent=2)
    return int(min(row[f"{verb} ratio"] for row in rows for verb in ("set", "get")) < FLOOR)


if __name__ == "__main__":
    sys.exit(main())
