"""Reading records by their numbers: from memory where a lane has the segment open, else from its journal."""

from __future__ import annotations

import os

import numpy as np

from hicache_file._format import RECORD_NBYTES
from hicache_file._journal import SEAL, WORDS, Words, parse, seals_of
from hicache_file._segment import Segment


def read_rows(segment: Segment, idx: int, numbers: np.ndarray) -> Words:
    """Read records by ascending numbers, repeats allowed; one that is damaged reads as zeros.

    Raises:
        OSError.
    """
    low, high, count = int(numbers[0]), int(numbers[-1]), len(numbers)
    run = high - low + 1 == count and bool((numbers[1:] > numbers[:-1]).all())
    table = segment.table
    if table is not None:
        return table[low : high + 1] if run else table[numbers]
    start = segment.header.records_start
    if high - low >= 8 * count + 64:
        found = [_rows(segment, idx, start, n, n) for n in numbers.tolist()]
        return np.concatenate(found)
    rows = _rows(segment, idx, start, low, high)
    return rows if run else rows[numbers - low]


def _rows(segment: Segment, idx: int, start: int, low: int, high: int) -> Words:
    nbytes = (high + 1 - low) * RECORD_NBYTES
    raw = os.pread(idx, nbytes, start + low * RECORD_NBYTES).ljust(nbytes, b"\0")
    rows = np.frombuffer(raw, "<u8").reshape(-1, WORDS)
    good = rows[:, SEAL] == seals_of(rows, segment.header.id, low)
    return rows if good.all() else np.where(good[:, None], rows, np.uint64(0))


def read_records(segment: Segment, idx: int, first: int, last: int) -> Words:
    """Read records [first, last] of a segment.

    Raises:
        OSError; ValueError when they are no longer what they were.
    """
    table = segment.table
    if table is not None:
        return table[first : last + 1]
    start = segment.header.records_start + first * RECORD_NBYTES
    want = last + 1 - first
    records = parse(os.pread(idx, want * RECORD_NBYTES, start), segment.header.id, first)
    if len(records) != want:
        raise ValueError("a journal that has lost records")
    return records
