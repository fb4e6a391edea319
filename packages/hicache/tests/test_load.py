from __future__ import annotations

import hashlib
from itertools import islice

from hicache_cli.load import conversations
from hicache_cli.trace import BLOCK_TOKENS


def test_the_same_seed_gives_the_same_load_on_every_python():
    first = list(islice(conversations(7), 500))
    assert first == list(islice(conversations(7), 500))
    assert first != list(islice(conversations(8), 500))
    digest = hashlib.sha256(repr(first).encode()).hexdigest()
    assert digest[:16] == "f23754d01229130c"


def test_blocks_cover_the_tokens_and_only_a_partial_last_block_is_not_shared():
    requests = list(islice(conversations(0), 500))
    for request in requests:
        assert len(request.blocks) == -(-request.tokens // BLOCK_TOKENS)
        assert len(set(request.blocks)) == len(request.blocks)


def test_equal_ids_mean_equal_prefixes():
    parent: dict[int, int | None] = {}
    for request in islice(conversations(3), 1000):
        before = None
        for block in request.blocks:
            assert parent.setdefault(block, before) == before
            before = block
