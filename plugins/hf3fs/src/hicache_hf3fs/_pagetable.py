"""The table of pages: reservations, confirmations and look-ups, each verb one sqlite transaction.

Used by the local metadata and by the server alike, by one thread at a time. It is told the time, and never
waits. What a verb does in memory (clock, leases, holds) happens after its transaction, or is undone with
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hicache_core.status import Status
from hicache_hf3fs._clock import Clock, Holds, Leases
from hicache_hf3fs._rooms import KEYS_A_STATEMENT, PageFileState, Rooms, marks, padded
from hicache_hf3fs._schema import connect, transaction
from hicache_hf3fs.metadata import (
    NO_PAGE,
    MetadataUsage,
    PageFileConflict,
    PageFileLabel,
    PageFileUnknown,
    PageRef,
    Reservation,
    Terms,
    Written,
)

_FILE_COLUMNS = "id, name, file_id, page_nbytes, num_pages, fresh"


class _Row(NamedTuple):
    """A stored key's page."""

    rank: int
    page: int
    nbytes: int
    checksum: int | None
    verdict: int

    def serves(self, nbytes: int) -> bool:
        """True where a slot of this size can be given the page, as far as is known."""
        return self.nbytes == nbytes and self.verdict != Status.CORRUPT


class PageTable:
    """All page files' pages in one database.

    Args:
        path: the database's file.
        terms: how long leases and holds last.
        after_crash: readers of an earlier life may still be reading: no page that had an owner then is
            given out anew before their holds have ended.
    """

    def __init__(self, path: str, terms: Terms, *, now: float, after_crash: bool) -> None:
        self.terms = terms
        self._base = connect(path)
        self._files: dict[str, PageFileState] = {}
        self._files_by_id: dict[int, PageFileState] = {}
        self._spaces: dict[str, int] = {}
        self._expired = self._refused = 0
        self._holds = Holds(terms.hold_s)
        self._leases = Leases(terms.lease_s)
        left = self._base.execute("SELECT rank, lease, COUNT(*) FROM reservation GROUP BY rank, lease")
        for rank, lease, pages in left.fetchall():
            self._leases.begin(rank, lease, pages, now)
        quiet = after_crash and self._rows("rank") > 0
        self._rooms = Rooms(self._base, self._holds, now + terms.hold_s if quiet else now)

    def close(self) -> None:
        """Close the database; idempotent."""
        self._base.close()

    def initialize(self, rank: str, label: PageFileLabel) -> Terms:
        """Make a page file known; raises PageFileConflict."""
        if self._find(rank) is None:
            with transaction(self._base):
                self._base.execute(
                    "INSERT INTO rank (name, file_id, page_nbytes, num_pages) VALUES (?, ?, ?, ?)",
                    (rank, label.file_id, label.page_nbytes, label.num_pages),
                )
        known = self._file(rank).label
        if known != label:
            raise PageFileConflict(rank, known, label)
        return self.terms

    # Sets.

    def reserve(
        self, rank: str, namespace: str, keys: Sequence[str], lease: int, now: float
    ) -> list[Reservation]:
        """Take pages for the keys that are not stored."""
        file, digests = self._file(rank), _digests(keys)
        self._holds.expire(now)
        over = self._leases.expired(now)
        try:
            with transaction(self._base):
                for ended in over:
                    self._expired += self._release(*ended, self._reserved(*ended))
                self._release(file.id, lease, self._reserved(file.id, lease))  # this request, sent before
                good = self._serving(namespace, digests, file)
                # What this very call reports as stored must not make room for the rest of it.
                self._holds.begin(lease, ((row.rank, row.page) for row in good.values()), now)
                wanted = sum(digest not in good for digest in digests)
                pages = self._rooms.allocate(file, wanted, now)
                rows = [(file.id, lease, index) for index in pages]
                self._base.executemany("INSERT INTO reservation (rank, lease, idx) VALUES (?, ?, ?)", rows)
        except BaseException:
            self._undo(file, over, now)
            raise
        finally:
            self._holds.end(lease)
        for index in pages:
            file.clock.take(index)
        self._use(good.values())
        if pages:
            self._leases.begin(file.id, lease, len(pages), now)
        self._refused += wanted - len(pages)
        new = iter(pages)
        return [
            Reservation(True, good[digest].page) if digest in good else Reservation(False, next(new, NO_PAGE))
            for digest in digests
        ]

    def confirm(
        self, rank: str, namespace: str, written: Sequence[Written], release: Sequence[int], lease: int
    ) -> list[bool]:
        """Store keys under reserved pages."""
        file, digests = self._file(rank), _digests([page.key for page in written])
        with transaction(self._base):
            mine = set(self._reserved(file.id, lease))
            stored = self._look_up(namespace, digests)
            space = self._space_for(namespace)
            fresh: dict[bytes, Written] = {}
            spare = {index for index in release if index in mine}
            results: list[bool] = []
            for page, digest in zip(written, digests, strict=True):
                there = digest in fresh or (digest in stored and stored[digest].serves(page.nbytes))
                if page.page in mine and not there:
                    fresh[digest] = page
                elif page.page in mine:
                    spare.add(page.page)
                results.append(there or digest in fresh)
            self._forget(space, {digest: stored[digest] for digest in fresh if digest in stored})
            taken = {page.page for page in fresh.values()}
            self._unreserve(file.id, lease, taken)
            self._release(file.id, lease, spare - taken)
            rows = [(space, d, file.id, p.page, p.nbytes, p.checksum, 0) for d, p in fresh.items()]
            self._base.executemany("INSERT INTO page VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            self._rooms.count(space, len(rows), sum(page.nbytes for page in fresh.values()))
        for index in taken:
            file.clock.settle(index)
        self._leases.settle(file.id, lease, len(taken) + len(spare - taken))
        return results

    # Gets.

    def get(self, namespace: str, keys: Sequence[str], hold: int, now: float) -> list[PageRef | None]:
        """Find pages and hold them."""
        digests = _digests(keys)
        found = self._look_up(namespace, digests)
        self._holds.expire(now)
        self._holds.begin(hold, ((row.rank, row.page) for row in found.values()), now)
        self._use(found.values())
        refs = {digest: self._ref(row) for digest, row in found.items()}
        return list(map(refs.get, digests))

    def end_read(self, hold: int) -> None:
        """Let go of a read's pages."""
        self._holds.end(hold)

    def exists(self, namespace: str, keys: Sequence[str]) -> list[bool]:
        """Tell which keys have a page without a verdict."""
        digests = _digests(keys)
        found = self._look_up(namespace, digests)
        good = {digest for digest, row in found.items() if not row.verdict}
        return list(map(good.__contains__, digests))

    def touch(self, namespace: str, keys: Sequence[str]) -> None:
        """Count as a use."""
        self._use(self._look_up(namespace, _digests(keys)).values())

    # Removal.

    def delete(self, namespace: str, keys: Sequence[str]) -> list[bool]:
        """Forget keys; True at the first place where a stored one stands."""
        digests = _digests(keys)
        with transaction(self._base):
            found = self._look_up(namespace, digests)
            self._forget(self._space_for(namespace), found)
        return [found.pop(digest, None) is not None for digest in digests]

    def report_bad(self, namespace: str, bad: Sequence[tuple[str, PageRef, Status]]) -> None:
        """Write down what gets have found."""
        digests = _digests([key for key, _, _ in bad])
        with transaction(self._base):
            found = self._look_up(namespace, digests)
            space = self._space_for(namespace)
            rows = [
                (int(verdict), space, digest)
                for digest, (_, ref, verdict) in zip(digests, bad, strict=True)
                if digest in found and self._ref(found[digest]) == ref
            ]
            self._base.executemany("UPDATE page SET verdict=? WHERE space=? AND key=?", rows)

    def clear(self, namespace: str) -> int:
        """Make a namespace's space dead."""
        with transaction(self._base):
            select = "SELECT COALESCE(SUM(pages), 0) FROM space WHERE namespace=? AND live"
            pages = self._base.execute(select, (namespace,)).fetchone()[0]
            self._base.execute("UPDATE space SET live=0 WHERE namespace=? AND live", (namespace,))
            self._base.execute("DELETE FROM space WHERE NOT live AND pages=0")
        self._spaces.pop(namespace, None)
        return int(pages)

    # What there is.

    def usage(self, namespace: str) -> MetadataUsage:
        """Sum up one namespace and all."""
        select = "SELECT COALESCE(SUM(pages), 0), COALESCE(SUM(nbytes), 0) FROM space WHERE live"
        pages, nbytes = self._base.execute(f"{select} AND namespace=?", (namespace,)).fetchone()
        return MetadataUsage(pages, nbytes, self._base.execute(select).fetchone()[1], self._rows("rank"))

    def counts(self) -> dict[str, int]:
        """Count what operators watch, for /metrics."""
        one = "SELECT COALESCE(SUM({}), 0) FROM {}"
        return {
            "page_files": self._rows("rank"),
            "pages": self._base.execute(one.format("num_pages", "rank")).fetchone()[0],
            "pages_stored": self._base.execute(one.format("pages", "space WHERE live")).fetchone()[0],
            "pages_reserved": self._leases.pages,
            "pages_held": self._holds.pages,
            "evicted_total": self._rooms.evicted,
            "leases_expired_total": self._expired,
            "refused_total": self._refused,
        }

    # Reservations.

    def _reserved(self, rank: int, lease: int) -> list[int]:
        rows = self._base.execute("SELECT idx FROM reservation WHERE rank=? AND lease=?", (rank, lease))
        return [index for (index,) in rows]

    def _unreserve(self, rank: int, lease: int, pages: Sequence[int] | set[int]) -> None:
        rows = [(rank, lease, index) for index in pages]
        self._base.executemany("DELETE FROM reservation WHERE rank=? AND lease=? AND idx=?", rows)

    def _release(self, rank: int, lease: int, pages: Sequence[int] | set[int]) -> int:
        if pages:
            self._unreserve(rank, lease, pages)
            self._rooms.free(rank, pages)
        return len(pages)

    def _undo(self, file: PageFileState, over: Sequence[tuple[int, int]], now: float) -> None:
        """Take back what memory knew of a transaction that did not happen."""
        file.clock.forget()
        file.fresh = int(self._base.execute("SELECT fresh FROM rank WHERE id=?", (file.id,)).fetchone()[0])
        for rank, lease in over:
            self._leases.begin(rank, lease, 1, now - self.terms.lease_s)

    # Keys.

    def _look_up(self, namespace: str, digests: Sequence[bytes]) -> dict[bytes, _Row]:
        space = self._space(namespace)
        found: dict[bytes, _Row] = {}
        if space is None:
            return found
        for start in range(0, len(digests), KEYS_A_STATEMENT):
            part = padded(digests[start : start + KEYS_A_STATEMENT])
            rows = self._base.execute(
                "SELECT key, rank, idx, nbytes, checksum, verdict FROM page "
                f"WHERE space=? AND key IN ({marks(len(part))})",
                (space, *part),
            )
            for key, *row in rows:
                found[key] = _Row(*row)
        return found

    def _serving(self, namespace: str, digests: Sequence[bytes], file: PageFileState) -> dict[bytes, _Row]:
        """Find the keys that need no set into this file, and forget what gets of another size said."""
        nbytes = file.label.page_nbytes
        good = {d: row for d, row in self._look_up(namespace, digests).items() if row.serves(nbytes)}
        doubted = [(self._space(namespace), digest) for digest, row in good.items() if row.verdict]
        self._base.executemany("UPDATE page SET verdict=0 WHERE space=? AND key=?", doubted)
        return good

    def _forget(self, space: int, found: dict[bytes, _Row]) -> None:
        if found:
            self._base.executemany(
                "DELETE FROM page WHERE space=? AND key=?", [(space, key) for key in found]
            )
            self._rooms.count(space, -len(found), -sum(row.nbytes for row in found.values()))
            for row in found.values():
                self._rooms.free(row.rank, [row.page])

    def _space(self, namespace: str) -> int | None:
        known = self._spaces.get(namespace)
        if known is None:
            select = "SELECT id FROM space WHERE namespace=? AND live"
            row = self._base.execute(select, (namespace,)).fetchone()
            if row is None:
                return None
            # Not while a transaction may still take it back.
            known = int(row[0])
            if not self._base.in_transaction:
                self._spaces[namespace] = known
        return known

    def _space_for(self, namespace: str) -> int:
        known = self._space(namespace)
        if known is None:
            insert = "INSERT INTO space (namespace) VALUES (?)"
            known = self._base.execute(insert, (namespace,)).lastrowid or 0
        return known

    # Page files.

    def _use(self, rows: Iterable[_Row]) -> None:
        for row in rows:
            self._by_id(row.rank).clock.use(row.page)

    def _ref(self, row: _Row) -> PageRef:
        corrupt = row.verdict == Status.CORRUPT
        return PageRef(self._by_id(row.rank).name, row.page, row.nbytes, row.checksum, corrupt)

    def _file(self, name: str) -> PageFileState:
        known = self._find(name)
        if known is None:
            raise PageFileUnknown(name)
        return known

    def _by_id(self, rank: int) -> PageFileState:
        known = self._files_by_id.get(rank) or self._load("id", rank)
        if known is None:
            raise PageFileUnknown(f"number {rank}")
        return known

    def _find(self, name: str) -> PageFileState | None:
        known = self._files.get(name)
        return known or self._load("name", name)

    def _load(self, column: str, value: str | int) -> PageFileState | None:
        row = self._base.execute(f"SELECT {_FILE_COLUMNS} FROM rank WHERE {column}=?", (value,)).fetchone()
        if row is None:
            return None
        file = PageFileState(row[0], row[1], PageFileLabel(*row[2:5]), row[5], Clock(row[4]))
        self._files[file.name] = self._files_by_id[file.id] = file
        return file

    def _rows(self, table: str) -> int:
        return int(self._base.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])


def _digests(keys: Sequence[str]) -> list[bytes]:
    """Shorten keys to 128 bits: 10 million of them take 0.8 GB, and nobody can make two alike."""
    blake2b = hashlib.blake2b
    return [blake2b(key.encode(), digest_size=16).digest() for key in keys]
