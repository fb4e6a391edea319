"""The table of pages: reservations, confirmations and look-ups, each verb one sqlite transaction.

Used by the local metadata and by the server alike, by one thread at a time. It is told the time, and never
waits. What a verb does in memory (clock, leases, holds) happens after its transaction, or is undone with
it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from typing import TypeAlias

from hicache_core.status import Status
from hicache_hf3fs._clock import Clock, Holds, Leases
from hicache_hf3fs._recent import (
    MOST_ROWS,
    NBYTES,
    PAGE,
    RANK,
    VERDICT,
    Recent,
    Row,
    places,
    serves,
)
from hicache_hf3fs._reservations import Reservations
from hicache_hf3fs._rooms import PageFileState, Rooms
from hicache_hf3fs._rows import read_ahead, read_rows
from hicache_hf3fs._schema import connect, terms_of, transaction
from hicache_hf3fs.metadata import (
    NO_PAGE,
    MetadataUsage,
    PageFileConflict,
    PageFileLabel,
    PageFileUnknown,
    PageRef,
    Reservation,
    Terms,
)

_FILE_COLUMNS = "id, name, file_id, page_nbytes, num_pages, fresh"


#: What a confirmation stores: digest, page, bytes, checksum.
NewRow: TypeAlias = "tuple[bytes, int, int, int | None]"


class PageTable:
    """All page files' pages in one database.

    Args:
        path: the database's file.
        terms: how long leases and holds last.
        after_crash: readers of an earlier life may still be reading: no page that had an owner then is
            given out anew before their holds have ended.
        rows: most rows that are kept in memory, 300 bytes each.
    """

    def __init__(
        self, path: str, terms: Terms, *, now: float, after_crash: bool, rows: int = MOST_ROWS
    ) -> None:
        self._base = connect(path)
        self.terms = terms_of(self._base, terms, keep=after_crash)
        self._files: dict[str, PageFileState] = {}
        self._files_by_id: dict[int, PageFileState] = {}
        self._spaces: dict[str, int] = {}
        self._expired = self._refused = 0
        self._holds = Holds(self.terms.hold_s)
        self._leases = Leases(self.terms.lease_s)
        self._reservations = Reservations(self._base)
        for rank, lease, pages in self._reservations.all():
            self._leases.begin(rank, lease, len(pages), now)
        quiet = after_crash and self._rows("rank") > 0
        self._recent = Recent(rows)
        quiet_until = now + self.terms.hold_s if quiet else now
        self._rooms = Rooms(self._base, self._holds, self._recent, quiet_until)

    def close(self) -> None:
        """Close the database; idempotent."""
        self._base.close()

    def read_ahead(self) -> None:
        """Have as many rows in memory as are kept there, before anybody asks: 2 us each."""
        read_ahead(self._base, self._recent)

    def initialize(self, rank: str, label: PageFileLabel, owner: str = "") -> Terms:
        """Make a page file known; raises PageFileConflict."""
        file = self._find(rank)
        if file is not None and file.fresh and owner not in ("", self.terms.database):
            raise PageFileConflict(rank, file.label, label, owner)
        if file is None:
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
        self, rank: str, namespace: str, digests: Sequence[bytes], lease: int, now: float
    ) -> list[Reservation]:
        """Take pages for the keys that are not stored."""
        file = self._file(rank)
        fresh = file.fresh
        self._holds.expire(now)
        over = self._leases.expired(now)
        try:
            with transaction(self._base):
                for of, ended, _ in over:
                    self._expired += self._release(of, ended)
                good = self._serving(namespace, digests, file)
                # What this very call reports as stored must not make room for the rest of it.
                self._holds.begin(lease, places(good.values()), now)
                wanted = sum(digest not in good for digest in digests)
                # Of this request, sent before: its writer may be writing into them, so they stay its own.
                pages = self._reservations.of(file.id, lease)
                pages += self._rooms.allocate(file, max(0, wanted - len(pages)), now)
                self._reservations.keep(file.id, lease, pages)
        except BaseException:
            # What memory knew of a transaction that did not happen.
            file.clock.forget()
            file.fresh = fresh
            self._leases.restore(over)
            raise
        finally:
            self._holds.end(lease)
        self._use(good.values())
        if pages:
            self._leases.begin(file.id, lease, len(pages), now)
        self._refused += max(0, wanted - len(pages))
        new = iter(pages)
        return [
            Reservation(True, good[digest][PAGE])
            if digest in good
            else Reservation(False, next(new, NO_PAGE))
            for digest in digests
        ]

    def confirm(
        self, rank: str, namespace: str, written: Sequence[NewRow], release: Sequence[int], lease: int
    ) -> list[bool]:
        """Store keys under reserved pages."""
        file = self._file(rank)
        try:
            if self._confirm_new(file, namespace, written, release, lease):
                return [True] * len(written)
        except sqlite3.IntegrityError:
            pass  # a key is stored already
        with transaction(self._base):
            mine = set(self._reservations.of(file.id, lease))
            stored = self._look_up(namespace, [row[0] for row in written])
            space = self._space_for(namespace)
            fresh: dict[bytes, NewRow] = {}
            spare = {page for page in release if page in mine}
            results: list[bool] = []
            for row in written:
                digest, page, nbytes, _ = row
                there = digest in fresh or (digest in stored and serves(stored[digest], nbytes))
                if page in mine and not there:
                    fresh[digest] = row
                elif page in mine:
                    spare.add(page)
                results.append(there or digest in fresh)
            self._forget(space, {digest: stored[digest] for digest in fresh if digest in stored})
            taken = {page for _, page, _, _ in fresh.values()}
            self._reservations.end(file.id, lease, taken)
            self._release(file.id, lease, spare - taken)
            self._insert(space, file, list(fresh.values()))
        file.clock.settle(taken)
        self._leases.settle(file.id, lease, len(taken) + len(spare - taken))
        return results

    def _confirm_new(
        self,
        file: PageFileState,
        namespace: str,
        written: Sequence[NewRow],
        release: Sequence[int],
        lease: int,
    ) -> bool:
        """Do what most confirmations are, all of a lease for new keys, without a look at each; else nothing.

        Raises: sqlite3.IntegrityError, where a key is stored already or twice here; nothing has changed then.
        """
        pages = {row[1] for row in written}
        if release or len(pages) != len(written):
            return False
        with transaction(self._base):
            if pages != set(self._reservations.of(file.id, lease)):
                return False
            space = self._space_for(namespace)
            self._reservations.keep(file.id, lease, ())
            self._insert(space, file, written)
        self._recent.keep(space, [(digest, file.id, page, n, c, 0) for digest, page, n, c in written])
        file.clock.settle(pages)
        self._leases.settle(file.id, lease, len(pages))
        return True

    def _insert(self, space: int, file: PageFileState, written: Sequence[NewRow]) -> None:
        rows = [(space, digest, file.id, page, n, c, 0) for digest, page, n, c in written]
        self._base.executemany("INSERT INTO page VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        self._rooms.count(space, len(rows), sum([row[4] for row in rows]))

    # Gets.

    def find(self, namespace: str, digests: Sequence[bytes], hold: int, now: float) -> list[Row | None]:
        """Find pages and hold them."""
        found = self._look_up(namespace, digests)
        self._holds.expire(now)
        self._holds.begin(hold, places(found.values()), now)
        self._use(found.values())
        return list(map(found.get, digests))

    def ref(self, row: Row) -> PageRef:
        """Give a row in the words of the interface."""
        _, rank, page, nbytes, checksum, verdict = row
        return PageRef(self.name_of(rank), page, nbytes, checksum, verdict == Status.CORRUPT)

    def name_of(self, rank: int) -> str:
        """Give the name of a page file by its number."""
        return self._by_id(rank).name

    def end_read(self, hold: int) -> None:
        """Let go of a read's pages."""
        self._holds.end(hold)

    def exists(self, namespace: str, digests: Sequence[bytes]) -> list[bool]:
        """Tell which keys have a page without a verdict."""
        found = self._look_up(namespace, digests)
        good = {digest for digest, row in found.items() if not row[VERDICT]}
        return list(map(good.__contains__, digests))

    def touch(self, namespace: str, digests: Sequence[bytes]) -> None:
        """Count as a use."""
        self._use(self._look_up(namespace, digests).values())

    # Removal.

    def delete(self, namespace: str, digests: Sequence[bytes]) -> list[bool]:
        """Forget keys; True at the first place where a stored one stands."""
        with transaction(self._base):
            found = self._look_up(namespace, digests)
            if found:
                self._forget(self._space_for(namespace), found)
        return [found.pop(digest, None) is not None for digest in digests]

    def report_bad(self, namespace: str, bad: Sequence[tuple[bytes, PageRef, Status]]) -> None:
        """Write down what gets have found."""
        with transaction(self._base):
            found = self._look_up(namespace, [digest for digest, _, _ in bad])
            verdicts = [
                (int(verdict), digest)
                for digest, ref, verdict in bad
                if digest in found and self.ref(found[digest]) == ref
            ]
            if verdicts:
                self._judge(self._space_for(namespace), verdicts)

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
            "rows_in_memory": len(self._recent),
            "evicted_total": self._rooms.evicted,
            "leases_expired_total": self._expired,
            "refused_total": self._refused,
        }

    # Reservations.

    def _release(self, rank: int, lease: int, some: Collection[int] | None = None) -> int:
        """Make some of a lease's pages free, all when not given; tell how many."""
        pages = self._reservations.of(rank, lease) if some is None else some
        if pages:
            self._reservations.end(rank, lease, pages)
            self._rooms.free(rank, pages)
        return len(pages)

    # Keys.

    def _look_up(self, namespace: str, digests: Sequence[bytes]) -> dict[bytes, Row]:
        space = self._space(namespace)
        if space is None:
            return {}
        if self._base.in_transaction:  # which may still be undone, and reads its own changes
            return read_rows(self._base, space, digests)
        found, others = self._recent.find(space, digests)
        if others:
            read = read_rows(self._base, space, others)
            self._recent.keep(space, read.values())
            found.update(read)
        return found

    def _serving(self, namespace: str, digests: Sequence[bytes], file: PageFileState) -> dict[bytes, Row]:
        """Find the keys that need no set into this file, and forget what gets of another size said."""
        nbytes = file.label.page_nbytes
        good = {d: row for d, row in self._look_up(namespace, digests).items() if serves(row, nbytes)}
        doubted = [digest for digest, row in good.items() if row[VERDICT]]
        if doubted:
            self._judge(self._space_for(namespace), [(0, digest) for digest in doubted])
        return good

    def _judge(self, space: int, verdicts: Sequence[tuple[int, bytes]]) -> None:
        self._recent.forget(space, [digest for _, digest in verdicts])
        rows = [(verdict, space, digest) for verdict, digest in verdicts]
        self._base.executemany("UPDATE page SET verdict=? WHERE space=? AND key=?", rows)

    def _forget(self, space: int, found: dict[bytes, Row]) -> None:
        if found:
            self._recent.forget(space, found)
            self._base.executemany(
                "DELETE FROM page WHERE space=? AND key=?", [(space, key) for key in found]
            )
            self._rooms.count(space, -len(found), -sum(row[NBYTES] for row in found.values()))
            for row in found.values():
                self._rooms.free(row[RANK], [row[PAGE]])

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

    def _use(self, rows: Iterable[Row]) -> None:
        rank, use = 0, None
        for row in rows:
            if row[RANK] != rank or use is None:
                rank = row[RANK]
                use = self._by_id(rank).clock.use
            use(row[PAGE])

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
