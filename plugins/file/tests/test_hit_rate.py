"""How good eviction is: hits on a log of real requests beside plain LRU's (C15).

The trace is Mooncake's public conversation trace, 12,031 requests; where it is
not there, a seeded load of conversations takes its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_core import Status

OK = Status.OK
NBYTES = 16384


def trace() -> list[list[int]]:
    for parent in Path(__file__).resolve().parents:
        path = parent / "shared" / "traces" / "conversation_trace.jsonl"
        if path.exists():
            return [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()]
    return conversations(7, 6000)


def conversations(seed: int, requests: int) -> list[list[int]]:
    """Make turns of conversations that begin alike, grow, and are left."""
    rng = random.Random(seed)
    fresh = iter(range(1, 1 << 40))
    open_ones: list[list[int]] = []
    log = []
    for _ in range(requests):
        if not open_ones or rng.random() < 0.35:
            open_ones.append([0, *(next(fresh) for _ in range(rng.randrange(4, 30)))])
        at = max(0, len(open_ones) - 1 - int(rng.expovariate(0.02)))
        open_ones[at] = [*open_ones[at], *(next(fresh) for _ in range(rng.randrange(1, 8)))]
        log.append(list(open_ones[at]))
    return log


def lru_hits(log: list[list[int]], capacity: int) -> int:
    """Count the leading runs that plain LRU hits, touching pages in prefix order."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in log:
        run = 0
        while run < len(blocks) and blocks[run] in cache:
            run += 1
        hits += run
        for block in blocks:
            if block in cache:
                cache.move_to_end(block)
            else:
                cache[block] = None
                if len(cache) > capacity:
                    cache.popitem(last=False)
    return hits


class Player:
    """Sends requests to a store; each page's first and last bytes tell whose it is."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.hits = 0
        self.wrong = 0
        self.most_bytes = 0

    def play(self, blocks: list[int]) -> None:
        hashes = [hashlib.sha256(str(b).encode()).hexdigest() for b in blocks]
        keys = self.store.component.keys(hashes)
        pages = self.store.pool.pages(range(len(keys)))
        run = self.store.storage.batch_exists(keys)
        if run:
            got = self.store.storage.batch_get(keys[:run], pages[:run])
            run = next((i for i, status in enumerate(got) if status is not OK), run)
            for i in range(run):
                page = self.store.buffer[i * NBYTES : (i + 1) * NBYTES]
                self.wrong += page[:64] != hashes[i].encode() or page[-64:] != hashes[i].encode()
        self.hits += run
        rest = keys[run:]
        for i, page_hash in enumerate(hashes[run:]):
            self.store.buffer[i * NBYTES : i * NBYTES + 64] = page_hash.encode()
            self.store.buffer[(i + 1) * NBYTES - 64 : (i + 1) * NBYTES] = page_hash.encode()
        for start in range(0, len(rest), 128):
            chunk = rest[start : start + 128]
            self.store.storage.batch_set(chunk, pages[start : start + len(chunk)])


@pytest.mark.slow
@pytest.mark.clause("C15")
@pytest.mark.parametrize(("pages", "least"), [(10_000, 0.98), (30_000, 1.0)])
def test_c15_hits_are_those_of_lru(make: Callable[..., Any], pages: int, least: float) -> None:
    log = trace()
    longest = max(map(len, log))
    capacity = pages * NBYTES
    store = make(capacity=capacity, slots=longest)
    player = Player(store)
    for number, blocks in enumerate(log):
        player.play(blocks)
        if number % 50 == 0:
            player.most_bytes = max(player.most_bytes, store.storage.usage().store_bytes)
    wanted = lru_hits(log, pages)
    assert player.wrong == 0
    assert player.most_bytes <= capacity + capacity // 128
    assert player.hits >= least * wanted, f"{player.hits} hits, LRU has {wanted}: {player.hits / wanted:.4f}"


@pytest.mark.slow
@pytest.mark.clause("C15")
def test_c15_four_workers_on_one_root_have_nearly_the_hits_of_lru(
    make: Callable[..., Any], root: str
) -> None:
    log = trace()
    longest = max(map(len, log))
    capacity = 10_000 * NBYTES
    make(capacity=capacity).close()
    tickets, fill = os.pipe()
    os.set_blocking(fill, False)
    assert os.write(fill, b"".join(n.to_bytes(4, "little") for n in range(len(log)))) == 4 * len(log)
    os.close(fill)
    readers, pids = [], []
    for _ in range(4):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                player = Player(make(slots=longest))
                while ticket := os.read(tickets, 4):
                    player.play(log[int.from_bytes(ticket, "little")])
                os.write(write_end, f"{player.hits} {player.wrong}".encode())
                player.store.close()
                code = 0
            finally:
                os._exit(code)
        os.close(write_end)
        readers.append(os.fdopen(read_end))
        pids.append(pid)
    os.close(tickets)
    told = [tuple(map(int, reader.read().split())) for reader in readers]
    for reader, pid in zip(readers, pids, strict=True):
        reader.close()
        assert os.waitpid(pid, 0)[1] == 0
    hits, wrong = map(sum, zip(*told, strict=True))
    wanted = lru_hits(log, 10_000)
    assert wrong == 0
    assert hits >= 0.95 * wanted, f"{hits} hits, LRU has {wanted}: {hits / wanted:.4f}"
