"""Journal records: built, checked and taken apart many at a time; pure.

A record is eight little-endian 64-bit words, so that numpy handles a batch or a
whole journal in a few calls:

====  ==========================================================
0, 1  xxh3-128 of the key
2     xxh64 of the key: an unrelated function, checked by get
3     offset of the page in the .seg file
4     length of the page
5     xxh3-64 of the page, when the flag says so
6     flags
7     check word over the seven others, the segment and the position
====  ==========================================================

The check word is a sum of products with odd constants, finished by a mix: any
one wrong word is found for certain, any other damage but once in 2^64; a record
copied from another place or segment, and a hole of zeros, do not match.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

Words = NDArray[np.uint64]

WORDS = 8
DIGEST_LOW, DIGEST_HIGH, CHECK, OFFSET, LENGTH, SUM, FLAGS, SEAL = range(WORDS)
#: Flag of a record: word 5 holds the page's checksum.
HAS_SUM = 1

#: Odd constants from the digits of pi, one a word; part of the format.
_FACTORS = np.array(
    [
        0x243F6A8885A308D3,
        0x13198A2E03707345,
        0xA4093822299F31D1,
        0x082EFA98EC4E6C89,
        0x452821E638D01377,
        0xBE5466CF34E90C6D,
        0xC0AC29B7C97C50DD,
    ],
    dtype=np.uint64,
)
_POSITION = np.uint64(0x3F84D5B5B5470917)
_FINISH = np.uint64(0x9216D5D98979FB1B)
_SHIFT = np.uint64(32)


def digests_of(encoded: Iterable[bytes]) -> list[bytes]:
    """Digest keys for the index."""
    return list(map(xxhash.xxh3_128_digest, encoded))


def checks_of(encoded: Sequence[bytes]) -> NDArray[np.uint64]:
    """Digest keys once more, by an unrelated function."""
    return np.frombuffer(b"".join(map(xxhash.xxh64_digest, encoded)), ">u8").astype("<u8")


def seals_of(records: Words, segment_id: bytes, first: int) -> Words:
    """Compute the check words of consecutive records.

    Args:
        records: (n, 8).
        segment_id: whose they are.
        first: position of the first one in its journal.
    """
    seed = int.from_bytes(segment_id[:8], "little") ^ int.from_bytes(segment_id[8:], "little")
    positions = np.arange(first, first + len(records), dtype=np.uint64)
    mixed = records[:, :SEAL] @ _FACTORS
    positions *= _POSITION
    mixed += positions
    mixed += np.uint64(seed)
    mixed ^= mixed >> _SHIFT
    mixed *= _FINISH
    mixed ^= mixed >> _SHIFT
    return mixed


def build(
    segment_id: bytes,
    first: int,
    digests: Sequence[bytes],
    checks: NDArray[np.uint64],
    *,
    offset: int,
    nbytes: int,
    sums: Sequence[int] | None,
) -> Words:
    """Make the records of n pages of equal size that lie one behind the other."""
    count = len(digests)
    records = np.empty((count, WORDS), dtype="<u8")
    records[:, :CHECK] = np.frombuffer(b"".join(digests), dtype="<u8").reshape(count, 2)
    records[:, CHECK] = checks
    records[:, OFFSET] = np.arange(offset, offset + count * nbytes, nbytes, dtype=np.uint64)
    records[:, LENGTH] = nbytes
    if sums is None:
        records[:, SUM:SEAL] = 0
    else:
        records[:, SUM] = sums
        records[:, FLAGS] = HAS_SUM
    records[:, SEAL] = seals_of(records, segment_id, first)
    return records


def parse(raw: bytes | memoryview, segment_id: bytes, first: int = 0) -> Words:
    """Read records up to the first bad one (R2).

    Args:
        raw: journal bytes that begin with record ``first``; a piece at the end is ignored.
    """
    count = len(raw) // (WORDS * 8)
    records = np.frombuffer(raw, dtype="<u8", count=count * WORDS).reshape(count, WORDS)
    good = records[:, SEAL] == seals_of(records, segment_id, first)
    good &= records[:, LENGTH] > 0
    if count and not good.all():
        return records[: int(good.argmin())]
    return records


def reseal(records: Words, segment_id: bytes) -> Words:
    """Copy records for a new segment that holds these pages one behind the other, sums unchanged (R6)."""
    moved = records.copy()
    ends = np.cumsum(moved[:, LENGTH], dtype=np.uint64)
    moved[:, OFFSET] = ends - moved[:, LENGTH]
    moved[:, SEAL] = seals_of(moved, segment_id, 0)
    return moved
