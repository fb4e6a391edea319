"""Rows of pages, read from the database: by key, and ahead of any question."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from hicache_hf3fs._recent import ROW_COLUMNS, Recent, Row
from hicache_hf3fs._rooms import KEYS_A_STATEMENT, marks, padded

#: Rows read ahead at a time.
_ROWS_AT_ONCE = 4096


def read_rows(base: sqlite3.Connection, space: int, digests: Sequence[bytes]) -> dict[bytes, Row]:
    """Find the rows of keys; 128 take 0.2 ms."""
    found: dict[bytes, Row] = {}
    for start in range(0, len(digests), KEYS_A_STATEMENT):
        part = padded(digests[start : start + KEYS_A_STATEMENT])
        rows = base.execute(
            f"SELECT {ROW_COLUMNS} FROM page WHERE space=? AND key IN ({marks(len(part))})", (space, *part)
        )
        found.update([(row[0], row) for row in rows])
    return found


def read_ahead(base: sqlite3.Connection, recent: Recent) -> None:
    """Remember as many rows as there is room for: 2 us each."""
    left = recent.most
    for (space,) in base.execute("SELECT id FROM space WHERE live").fetchall():
        rows = base.execute(f"SELECT {ROW_COLUMNS} FROM page WHERE space=? LIMIT ?", (space, left))
        while some := rows.fetchmany(_ROWS_AT_ONCE):
            recent.keep(space, some)
            left -= len(some)
