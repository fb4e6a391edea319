"""Room for new pages: where it comes from, in the order of what it costs, and the books that are kept of it.

Never used, free, of a cleared namespace, of somebody (eviction). Every function runs inside the caller's
transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from hicache_hf3fs._clock import Clock, Holds
from hicache_hf3fs._recent import Recent
from hicache_hf3fs.metadata import PageFileLabel

#: Keys a statement: one look-up of 128 costs 0.17 ms, one after another 0.59 ms.
KEYS_A_STATEMENT = 128
#: Pages of a cleared namespace that become free at a time: 9 ms.
_REAPED_AT_ONCE = 1024
#: How often that is done for one writer. They may all lie in other files, and everybody waits meanwhile.
_MOST_REAPS = 4


@dataclass(slots=True)
class PageFileState:
    """A page file as the metadata knows it."""

    id: int
    name: str
    label: PageFileLabel
    fresh: int
    """Pages from here on were never given to anybody."""
    clock: Clock


class Rooms:
    """Finds pages for writers; a page that is held is given to nobody.

    Args:
        quiet_until: until then only pages that nobody ever had are given out.
    """

    def __init__(self, base: sqlite3.Connection, holds: Holds, recent: Recent, quiet_until: float) -> None:
        self.evicted = 0
        self._base = base
        self._holds = holds
        self._recent = recent
        self._quiet_until = quiet_until

    def allocate(self, file: PageFileState, count: int, now: float) -> list[int]:
        """Give up to ``count`` pages that belong to nobody now."""
        pages = self._from_fresh(file, count)
        if len(pages) == count or now < self._quiet_until:
            return pages
        pages += self._from_free(file, count - len(pages))
        for _ in range(_MOST_REAPS + count // _REAPED_AT_ONCE):
            if len(pages) == count or not self._reap():
                break
            pages += self._from_free(file, count - len(pages))
        if len(pages) < count:
            pages += self._evict(file, count - len(pages))
        return pages

    def free(self, rank: int, pages: Iterable[int]) -> None:
        """Make pages free that belonged to somebody."""
        self._base.executemany(
            "INSERT INTO free (rank, idx) VALUES (?, ?)", [(rank, index) for index in pages]
        )

    def count(self, space: int, pages: int, nbytes: int) -> None:
        """Add to what a space holds."""
        if pages or nbytes:
            update = "UPDATE space SET pages=pages+?, nbytes=nbytes+? WHERE id=?"
            self._base.execute(update, (pages, nbytes, space))

    def _from_fresh(self, file: PageFileState, count: int) -> list[int]:
        fresh = min(count, file.label.num_pages - file.fresh)
        pages = list(range(file.fresh, file.fresh + fresh))
        if fresh:
            file.fresh += fresh
            file.clock.take(pages[0], file.fresh)
            self._base.execute("UPDATE rank SET fresh=? WHERE id=?", (file.fresh, file.id))
        return pages

    def _from_free(self, file: PageFileState, count: int) -> list[int]:
        rows = self._base.execute(
            "SELECT seq, idx FROM free WHERE rank=? ORDER BY seq LIMIT ?",
            (file.id, count + self._holds.pages),
        ).fetchall()
        chosen = list(islice((row for row in rows if not self._holds.holds(file.id, row[1])), count))
        self._base.executemany("DELETE FROM free WHERE seq=?", [(seq,) for seq, _ in chosen])
        for _, index in chosen:
            file.clock.take_ahead(index)
        return [index for _, index in chosen]

    def _reap(self) -> bool:
        """Make some pages of a cleared namespace free, in whatever files; False when there are none."""
        dead = self._base.execute("SELECT id FROM space WHERE NOT live LIMIT 1").fetchone()
        if dead is None:
            return False
        rows = self._base.execute(
            "SELECT rank, idx, key, nbytes FROM page WHERE space=? LIMIT ?", (*dead, _REAPED_AT_ONCE)
        ).fetchall()
        self._base.executemany("DELETE FROM page WHERE space=? AND key=?", [(*dead, row[2]) for row in rows])
        self._base.executemany("INSERT INTO free (rank, idx) VALUES (?, ?)", [row[:2] for row in rows])
        self.count(dead[0], -len(rows), -sum(row[3] for row in rows))
        if len(rows) < _REAPED_AT_ONCE:
            self._base.execute("DELETE FROM space WHERE id=?", dead)
        return True

    def _evict(self, file: PageFileState, count: int) -> list[int]:
        """Take pages from their keys by the clock."""
        pages: list[int] = []
        candidates = self._candidates(file)
        while batch := list(islice(candidates, min(count - len(pages), KEYS_A_STATEMENT))):
            rows = self._base.execute(
                f"SELECT idx, space, key, nbytes FROM page WHERE rank=? AND idx IN ({marks(len(batch))})",
                (file.id, *batch),
            ).fetchall()
            for _, space, key, _ in rows:
                self._recent.forget(space, (key,))
            self._base.executemany("DELETE FROM page WHERE space=? AND key=?", [row[1:3] for row in rows])
            for space in {row[1] for row in rows}:
                sizes = [row[3] for row in rows if row[1] == space]
                self.count(space, -len(sizes), -sum(sizes))
            self.evicted += len(rows)
            pages += [row[0] for row in rows]
        return pages

    def _candidates(self, file: PageFileState) -> Iterator[int]:
        for index in file.clock.victims():
            if self._holds.holds(file.id, index):
                file.clock.use(index)
            else:
                yield index


def marks(count: int) -> str:
    """Give that many placeholders."""
    return ",".join("?" * count)


def padded(digests: Sequence[bytes]) -> tuple[bytes, ...]:
    """Repeat the last key up to a power of two, so that sqlite3 meets few statements and keeps them."""
    width = 1 << (len(digests) - 1).bit_length()
    return (*digests, *([digests[-1]] * (width - len(digests))))
