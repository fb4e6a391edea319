"""Which pages writers have: a row a lease, its pages in one value, inside the caller's transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Sequence

from hicache_hf3fs._schema import pack_pages, unpack_pages


class Reservations:
    """The database's side of leases; for one thread at a time."""

    def __init__(self, base: sqlite3.Connection) -> None:
        self._base = base

    def all(self) -> Iterator[tuple[int, int, list[int]]]:
        """Give page file, lease and pages of each."""
        for rank, lease, pages in self._base.execute("SELECT rank, lease, pages FROM reservation").fetchall():
            yield rank, lease, unpack_pages(pages)

    def of(self, rank: int, lease: int) -> list[int]:
        """Give the pages that a lease holds."""
        select = "SELECT pages FROM reservation WHERE rank=? AND lease=?"
        row = self._base.execute(select, (rank, lease)).fetchone()
        return unpack_pages(row[0]) if row else []

    def keep(self, rank: int, lease: int, pages: Sequence[int]) -> None:
        """Have a lease hold these pages, and no others."""
        if pages:
            row = (rank, lease, pack_pages(pages))
            self._base.execute("INSERT OR REPLACE INTO reservation VALUES (?, ?, ?)", row)
        else:
            self._base.execute("DELETE FROM reservation WHERE rank=? AND lease=?", (rank, lease))

    def end(self, rank: int, lease: int, pages: Collection[int]) -> None:
        """Have a lease hold these pages no more."""
        if pages:
            gone = set(pages)
            self.keep(rank, lease, [page for page in self.of(rank, lease) if page not in gone])
