"""Page hashes: each covers its page's tokens and everything before them.

Equal hash means equal prefix, so a leading run of pages can be looked up
without comparing tokens. ``extra_key`` (a LoRA's content digest, a cache salt)
seeds the chain and keeps otherwise equal prefixes apart.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

#: Names the scheme in an Identity's ``hash_scheme``.
HASH_SCHEME = "hicache-sha256-chained-u64"


def page_hashes(
    tokens: Sequence[int], page_tokens: int, *, extra_key: str | None = None, parent: str | None = None
) -> list[str]:
    """Hash the whole pages of a token sequence; a partial last page has no hash.

    Args:
        tokens: token ids, 0 to 2**64 - 1.
        page_tokens: tokens a page.
        extra_key: what else tells prefixes apart; with a parent it is in there already.
        parent: the hash of the page before the first one.

    Returns: one digest of 64 hex digits a page.
    """
    previous = parent or hashlib.sha256(b"" if extra_key is None else b"k" + extra_key.encode()).hexdigest()
    hashes = []
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        page = array("Q", tokens[start : start + page_tokens])
        previous = hashlib.sha256(previous.encode() + page.tobytes()).hexdigest()
        hashes.append(previous)
    return hashes
