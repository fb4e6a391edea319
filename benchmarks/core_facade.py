"""What core itself costs: HiCache in front of a backend, and a page's segments as views or addresses.

    python benchmarks/core_facade.py [--rounds 3] [--json]

- ``facade``: HiCache.get of 128 pages over a backend that does nothing, against
  one preadv of 128 pages of 64 KiB, 2 segments a page, from a file in the page
  cache. What counts is its share of that time.
- ``growth``: the same get after a million pages were set, against before.
- ``views``, ``addresses``: 128 pages of 128 segments (layer_first), against a
  bare loop that slices or adds up the same.

The contestants take turns; printed is the ratio of their best times (``--json``
has the ratio of each round). Below a floor the exit status is 1.

What limits each: of the facade's 22 us a third checks the hashes, a quarter makes
the keys (one string a page), an eighth checks the statuses; the rest are gate,
watch and counters. The views are 16,384 memoryview slices: CPython's own price
for making them, and for tracking them by its garbage collector.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hicache_core import (
    BackendSpec,
    Capabilities,
    Component,
    HiCache,
    HiCacheStorage,
    HostPool,
    Identity,
    Pages,
    Placement,
    Segment,
    Status,
    StorageBackendFactory,
    Usage,
)

BATCH = 128
PAGE_NBYTES = 64 << 10
SEGMENTS = 128
STORED = 1_000_000


class NullStorage(HiCacheStorage):
    """Says OK to everything and touches nothing."""

    spec = BackendSpec(
        name="null",
        api=1,
        target=f"{__name__}:NullStorage",
        options="hicache_core.options:Options",
        capabilities=Capabilities(deadline="hold"),
    )

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        return [Status.OK] * len(keys)

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return [Status.OK] * len(keys)

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return [Status.OK] * len(keys)

    def usage(self) -> Usage:
        return Usage(0, 0, 0, None)


@dataclass(frozen=True)
class Row:
    """One question's answer: the ratio of the best times, and that of each round."""

    what: str
    ours_us: float
    against_us: float
    ratio: float
    ratios: tuple[float, ...]
    floor: float
    stretch: float


def microseconds(work: Callable[[], Any], calls: int) -> float:
    """Give the shortest of so many calls: what it costs when nobody else wants the core."""
    shortest = float("inf")
    for _ in range(calls):
        began = time.perf_counter()
        work()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest * 1e6


def compare(
    what: str,
    ours: Callable[[], Any],
    against: Callable[[], Any],
    *,
    calls: int,
    rounds: int,
    floor: float,
    stretch: float,
) -> Row:
    """Take turns, and give the ratio of the best times."""
    ours(), against()
    taken = []
    for number in range(rounds):
        pair = [(0, ours), (1, against)]
        times = {at: microseconds(work, calls) for at, work in (pair if number % 2 else pair[::-1])}
        taken.append((times[0] / times[1], times[0], times[1]))
    mine, theirs = min(each[1] for each in taken), min(each[2] for each in taken)
    return Row(what, mine, theirs, mine / theirs, tuple(each[0] for each in taken), floor, stretch)


def two_segments() -> tuple[HostPool, HostPool]:
    """Give a pool of 128 pages with K and V apart, and one of 128 segments a page."""
    memory = mmap.mmap(-1, BATCH * PAGE_NBYTES)
    whole = HostPool.from_buffer(memory, component(PAGE_NBYTES))
    base, half = whole.segments[0].address, PAGE_NBYTES // 2
    k_and_v = (Segment(base, half, half), Segment(base + BATCH * half, half, half))
    part = PAGE_NBYTES // SEGMENTS
    layers = tuple(Segment(base + at * BATCH * part, part, part) for at in range(SEGMENTS))
    return (
        HostPool(whole.component, k_and_v, BATCH, owner=whole),
        HostPool(component(PAGE_NBYTES, "layers"), layers, BATCH, owner=whole),
    )


def component(nbytes: int, name: str = "kv") -> Component:
    return Component(name, "whole", "page_first", "bf16", nbytes)


def hashes_of(round_number: int) -> list[str]:
    return [hashlib.sha256(b"%d-%d" % (round_number, at)).hexdigest() for at in range(BATCH)]


def facade(pool: HostPool, rounds: int) -> list[Row]:
    """Compare HiCache.get with one preadv, and after many pages with one that is new."""
    StorageBackendFactory.register_backend("null", __name__, "NullStorage")
    pages, hashes = pool.pages(range(BATCH)), hashes_of(0)

    def opened() -> HiCache:
        return HiCache.open("null", identity=Identity.for_tests(), placement=Placement(), pools=[pool])

    with tempfile.TemporaryFile() as file, opened() as new, opened() as used:
        file.write(bytes(BATCH * PAGE_NBYTES))
        file.flush()
        buffers, fd = pages.buffers(), file.fileno()
        for number in range(STORED // BATCH):
            used.set(hashes_of(number), pages)
        return [
            compare(
                "facade: HiCache.get of 128 pages of 64 KiB, against one preadv",
                lambda: used.get(hashes, pages),
                lambda: os.preadv(fd, buffers, 0),
                calls=100,
                rounds=rounds,
                floor=0.10,
                stretch=0.05,
            ),
            compare(
                f"growth: the same after {STORED:,} pages, against a new one",
                lambda: used.get(hashes, pages),
                lambda: new.get(hashes, pages),
                calls=1000,
                rounds=rounds,
                floor=1.2,
                stretch=1.05,
            ),
        ]


def segments(pool: HostPool, rounds: int) -> list[Row]:
    """Compare views and addresses of 128 segments a page with bare loops over the same."""
    order = [(at * 37) % BATCH for at in range(BATCH)]
    pages = pool.pages(order)
    low = pool.segments[0].address
    base = pages.take([order.index(0)]).buffers()[0].obj
    window = memoryview(base).cast("B")
    places = [(s.address - low, s.stride, s.nbytes) for s in pool.segments]

    def bare_views() -> list[memoryview]:
        found = []
        for page in order:
            for first, stride, nbytes in places:
                start = first + stride * page
                found.append(window[start : start + nbytes])
        return found

    def bare_addresses() -> tuple[list[int], list[int]]:
        starts, sizes = [], []
        for page in order:
            for first, stride, nbytes in places:
                starts.append(low + first + stride * page)
                sizes.append(nbytes)
        return starts, sizes

    def views() -> list[list[memoryview]]:
        return [pages.views(at) for at in range(BATCH)]

    def addresses() -> tuple[list[int], list[int]]:
        return pages[:].addresses()  # pages of their own: they remember

    assert pages.buffers() == bare_views()
    assert pages.addresses() == bare_addresses()
    goal: dict[str, Any] = {"calls": 20, "rounds": rounds, "floor": 1.5, "stretch": 1.1}
    return [
        compare("views: buffers() of 128 x 128 segments", pages.buffers, bare_views, **goal),
        compare("views: views(i) page by page", views, bare_views, **goal),
        compare("addresses: addresses() of 128 x 128 segments", addresses, bare_addresses, **goal),
    ]


def main() -> int:
    """Measure, print, and say by the exit status whether every floor holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    pairs, layers = two_segments()
    rows = facade(pairs, arguments.rounds) + segments(layers, arguments.rounds)
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    else:
        for row in rows:
            sys.stdout.write(
                f"{row.what}: {row.ours_us:.0f} us, {row.ratio:.3f} of {row.against_us:.0f} us; "
                f"floor {row.floor:g}, stretch {row.stretch:g}\n"
            )
    return int(any(row.ratio > row.floor for row in rows))


if __name__ == "__main__":
    sys.modules.setdefault("core_facade", sys.modules["__main__"])
    sys.exit(main())
