"""What a replayed page holds: cheap to make, cheap to verify wholly, different for every hash.

A page is a slice of one fixed random block at an offset drawn from its hash,
with the hash's first 16 bytes at both ends. Making one costs a memcpy and
verifying one a memcmp, so that the backend is what a replay measures.
"""

from __future__ import annotations

import hashlib
import random

from hicache_core.errors import InvalidArgument

#: Bytes of the hash at each end of a page.
MARK_NBYTES = 16
MIN_PAGE_NBYTES = 2 * MARK_NBYTES
#: Distinct starts of a slice; the block is this and one page long.
_SPREAD = 4 << 20
#: Slices start at multiples of this, as pages in an engine's pool do.
_ALIGNMENT = 64


class PageBytes:
    """Makes and verifies the pages of one size; read-only after construction, so any thread may use it.

    Raises:
        InvalidArgument: a page too small to hold its hash twice.
    """

    def __init__(self, page_nbytes: int) -> None:
        if page_nbytes < MIN_PAGE_NBYTES:
            raise InvalidArgument(
                "a page is too small to be verified",
                value=f"{page_nbytes} bytes",
                remedy=f"Use at least {MIN_PAGE_NBYTES} bytes a page.",
            )
        self.page_nbytes = page_nbytes
        self._block = random.Random(page_nbytes).randbytes(_SPREAD + page_nbytes)
        self._view = memoryview(self._block)

    @staticmethod
    def hash_of(block: int | str) -> str:
        """Give the page hash of a trace's block id: 64 hex digits, as engines use."""
        return hashlib.sha256(repr(block).encode()).hexdigest()

    def fill(self, slot: memoryview, page_hash: str) -> None:
        """Write the page of this hash into a slot."""
        mark = bytes.fromhex(page_hash[: 2 * MARK_NBYTES])
        offset = self._offset(mark)
        slot[:] = self._view[offset : offset + self.page_nbytes]
        self.stamp(slot, page_hash)

    def stamp(self, slot: memoryview, page_hash: str) -> None:
        """Turn the page in a slot into this hash's without moving its middle; see ``matches``."""
        mark = bytes.fromhex(page_hash[: 2 * MARK_NBYTES])
        slot[:MARK_NBYTES] = mark
        slot[-MARK_NBYTES:] = mark

    def matches(self, slot: memoryview, page_hash: str, filled_as: str = "") -> bool:
        """Compare every byte of a slot with the page of this hash.

        ``filled_as`` is the hash that the slot was filled with before it was stamped with another one.
        """
        mark = bytes.fromhex(page_hash[: 2 * MARK_NBYTES])
        origin = bytes.fromhex(filled_as[: 2 * MARK_NBYTES]) if filled_as else mark
        # startswith is a memcmp in place; memoryview == memoryview goes by items and takes 40 times as long.
        return (
            slot[:MARK_NBYTES] == mark
            and slot[-MARK_NBYTES:] == mark
            and self._block.startswith(slot[MARK_NBYTES:-MARK_NBYTES], self._offset(origin) + MARK_NBYTES)
        )

    @staticmethod
    def _offset(mark: bytes) -> int:
        return int.from_bytes(mark[:8], "little") % (_SPREAD // _ALIGNMENT) * _ALIGNMENT
