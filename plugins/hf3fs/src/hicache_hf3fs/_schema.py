"""The metadata's database: its tables, how it is opened, what must be true of it.

Every page of a file below its watermark ``fresh`` is in exactly one of three tables: ``page`` (it holds a
key), ``reservation`` (a writer has it) or ``free``; pages from ``fresh`` on were never given to anybody. A
*space* is a namespace's keys. Clearing a namespace makes its space dead with one small write; its pages are
taken as room is needed. A page with a ``verdict`` was found CORRUPT or SIZE_MISMATCH by a get: it is not
contained, and replaced.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from array import array
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hicache_core.errors import BackendIncompatible, BackendUnavailable
from hicache_hf3fs.metadata import Terms

SCHEMA_VERSION = 2

_TABLES = """
CREATE TABLE rank (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, file_id TEXT NOT NULL,
    page_nbytes INTEGER NOT NULL, num_pages INTEGER NOT NULL, fresh INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE space (
    id INTEGER PRIMARY KEY AUTOINCREMENT, namespace TEXT NOT NULL, live INTEGER NOT NULL DEFAULT 1,
    pages INTEGER NOT NULL DEFAULT 0, nbytes INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX space_live ON space (namespace) WHERE live;
CREATE TABLE page (
    space INTEGER NOT NULL, key BLOB NOT NULL, rank INTEGER NOT NULL, idx INTEGER NOT NULL,
    nbytes INTEGER NOT NULL, checksum INTEGER, verdict INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (space, key)
) WITHOUT ROWID;
CREATE UNIQUE INDEX page_place ON page (rank, idx);
CREATE TABLE reservation (
    rank INTEGER NOT NULL, lease INTEGER NOT NULL, pages BLOB NOT NULL, PRIMARY KEY (rank, lease)
) WITHOUT ROWID;
CREATE TABLE free (seq INTEGER PRIMARY KEY, rank INTEGER NOT NULL, idx INTEGER NOT NULL);
CREATE INDEX free_rank ON free (rank, seq);
"""
_SELF = "CREATE TABLE IF NOT EXISTS self (database TEXT NOT NULL, hold_s REAL NOT NULL)"

#: How long a statement waits for another program that has the database locked.
_BUSY_S = 1.0


def connect(path: str) -> sqlite3.Connection:
    """Open the database, made when it is missing, for any one thread at a time.

    Raises: BackendUnavailable, BackendIncompatible (another version of the schema).
    """
    try:
        if os.path.dirname(path):
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        base = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise BackendUnavailable(
            f"the metadata {path!r} cannot be opened",
            value=str(error),
            remedy="Name a place on a local disk that this user may write to.",
        ) from error
    try:
        # WAL: a commit is an append without a flush, which kill -9 does not undo; checkpoints flush
        # (Checkpointer).
        base.execute("PRAGMA journal_mode=WAL")
        base.execute("PRAGMA synchronous=NORMAL")
        base.execute("PRAGMA wal_autocheckpoint=0")
        base.execute(f"PRAGMA cache_size=-{64 << 10}")  # KiB
        version = base.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            with transaction(base):
                for statement in _TABLES.split(";\n"):
                    if statement.strip():
                        base.execute(statement)
                base.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    except sqlite3.Error as error:
        base.close()
        raise trouble(path, error) from error
    if version not in (0, SCHEMA_VERSION):
        base.close()
        raise BackendIncompatible(
            "hf3fs",
            f"the metadata {path!r} has another version",
            value=f"version {version}, this program writes {SCHEMA_VERSION}",
            remedy="Start with a new database."
            if version < SCHEMA_VERSION
            else "Run: pip install -U hicache-hf3fs; or start with a new database.",
        )
    return base


@contextmanager
def transaction(base: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Commit what happens within, or none of it."""
    try:
        base.execute("BEGIN IMMEDIATE")
        yield base
        base.execute("COMMIT")
    except BaseException:
        if base.in_transaction:
            base.execute("ROLLBACK")
        raise


def terms_of(base: sqlite3.Connection, terms: Terms, *, keep: bool) -> Terms:
    """Give the terms with the database's id, which it gets when it has none.

    Args:
        keep: clients of an earlier life may still count on the hold that they were told: the longest stays.
    """
    with transaction(base):
        base.execute(_SELF)
        row = base.execute("SELECT database, hold_s FROM self").fetchone()
        database, hold_s = row or (secrets.token_hex(16), 0.0)
        if keep:
            hold_s = max(hold_s, terms.hold_s)
            terms = terms._replace(hold_s=hold_s)
        base.execute("DELETE FROM self")
        base.execute("INSERT INTO self VALUES (?, ?)", (database, hold_s))
    if row is None:  # page files will bear the id, and a power loss must not take it from here
        base.execute("PRAGMA wal_checkpoint(FULL)").fetchall()
    return terms._replace(database=database)


def id_of(path: str) -> str:
    """Read the id of a database that may be in use, and change nothing; "" where it has none yet.

    Raises: sqlite3.Error.
    """
    with closing(sqlite3.connect(f"{Path(os.path.abspath(path)).as_uri()}?mode=ro", uri=True)) as base:
        if not base.execute("SELECT 1 FROM sqlite_master WHERE name='self'").fetchone():
            return ""
        return str(base.execute("SELECT database FROM self").fetchone()[0])


#: What Python says of a value in the database that cannot be there.
DAMAGE = (ValueError, TypeError, IndexError, OverflowError)


def trouble(path: str, error: Exception) -> BackendUnavailable:
    """Say what sqlite3 could not do with the metadata, or what is wrong in it, and what helps."""
    text = str(error) if isinstance(error, sqlite3.Error) else f"malformed: {error!r}"
    if "locked" in text or "busy" in text:
        remedy = "Stop the other program that has it open."
    elif "full" in text or "I/O" in text:
        remedy = "Make room on its disk, or look at the disk's health."
    elif "malformed" in text or "not a database" in text:
        remedy = "It is damaged: restore it, or start with a new database and remove the page files."
    else:
        remedy = "Look at the database's file and folder."
    return BackendUnavailable(f"the metadata {path!r} failed", value=text, remedy=remedy)


def pack_pages(pages: Iterable[int]) -> bytes:
    """Make the value that a reservation's pages are kept as."""
    return array("q", pages).tobytes()


def unpack_pages(packed: bytes) -> list[int]:
    """Read it."""
    pages = array("q")
    pages.frombytes(packed)
    return pages.tolist()


def inconsistencies(base: sqlite3.Connection) -> list[str]:
    """Find pages that leaked or belong to two owners, and counts that are off; empty when all is well."""
    found: list[str] = []
    for rank, name, fresh in base.execute("SELECT id, name, fresh FROM rank").fetchall():
        owners: dict[int, str] = {}
        for table, index in _owned(base, rank):
            if index in owners:
                found.append(f"page {index} of '{name}' is in {owners[index]} and in {table}")
            if not 0 <= index < fresh:
                found.append(f"page {index} of '{name}' in {table} was never given out")
            owners[index] = table
        found += [f"page {index} of '{name}' has leaked" for index in range(fresh) if index not in owners]
    counted = "SELECT s.id, s.pages, s.nbytes, COUNT(p.idx), COALESCE(SUM(p.nbytes), 0) FROM space s"
    for space, *numbers in base.execute(f"{counted} LEFT JOIN page p ON p.space = s.id GROUP BY s.id"):
        if numbers[:2] != numbers[2:]:
            found.append(f"space {space} says {numbers[:2]} pages and bytes, and has {numbers[2:]}")
    return found


def _owned(base: sqlite3.Connection, rank: int) -> Iterator[tuple[str, int]]:
    """Give the pages of a file that belong to somebody or are free, with the table that says so."""
    for table in ("page", "free"):
        for (index,) in base.execute(f"SELECT idx FROM {table} WHERE rank=?", (rank,)):
            yield table, index
    for (pages,) in base.execute("SELECT pages FROM reservation WHERE rank=?", (rank,)):
        for index in unpack_pages(pages):
            yield "reservation", index
