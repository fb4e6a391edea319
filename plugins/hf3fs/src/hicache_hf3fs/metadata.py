"""What a metadata service is asked: which page of a page file belongs to which key.

A set goes reserve -> write the page -> confirm; a get goes get_page_indices -> read the page -> end_read.
Two ideas make that safe without a lock across processes:

- A reservation is a lease. It is named by a number that the caller draws, so that a request which is
  repeated after a lost answer changes nothing twice. What is not confirmed in ``lease_s`` is free again,
  after a crash too.
- A read holds its pages for ``hold_s`` at most. Meanwhile no writer is given them, evicted and deleted ones
  included; a reader that took longer discards what it read.

Two implementations: ``LocalMetadata`` in process, ``MetadataClient`` over HTTP. Both are bound to one
namespace.

A *rank* is the name of a page file: a component's key. Each tp_rank's shard has its own component and so
its own file; a replicated component has one file for all ranks, whatever their placement.
"""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hicache_core.errors import BackendIncompatible, HiCacheError
from hicache_core.status import Status

#: In place of a page index: there is no room.
NO_PAGE = -1


class PageRef(NamedTuple):
    """Where a key's page lies, and what must be found there."""

    rank: str
    """Its page file; another one than asked about where the key was set with pages of another component."""
    page: int
    nbytes: int
    checksum: int | None
    """63 bits of xxh3 of the page; None where it was stored without."""
    corrupt: bool = False
    """A get has found it CORRUPT: it is not contained, and the next set replaces it."""


class Reservation(NamedTuple):
    """The answer for one key of a reservation."""

    existed: bool
    """The key is stored already, at ``page``, whole and of this file's page size: nothing is reserved."""
    page: int
    """The page to write, or NO_PAGE."""


class Written(NamedTuple):
    """A reserved page that now holds a key's bytes."""

    key: str
    page: int
    nbytes: int
    checksum: int | None


class Terms(NamedTuple):
    """For how long a reservation and a read are good, in seconds from before the request; and whose."""

    lease_s: float
    hold_s: float
    database: str = ""
    """32 hex digits, the random id of the metadata's database."""


class MetadataUsage(NamedTuple):
    """What a namespace holds, and all of them together."""

    pages: int
    bytes: int
    store_bytes: int
    page_files: int


@dataclass(frozen=True, slots=True)
class PageFileLabel:
    """What tells a page file from another one; the metadata of one file never serves another."""

    file_id: str
    """32 hex digits, random, in the file's label."""
    page_nbytes: int
    num_pages: int


class PageFileUnknown(HiCacheError):
    """The metadata knows no page file of this rank: it was never initialised here, or the metadata is new."""

    def __init__(self, rank: str) -> None:
        self.rank = rank
        what = f"the metadata knows no page file '{rank}'"
        super().__init__(what, remedy="Call initialize with the file's label first.")


class PageFileConflict(BackendIncompatible):
    """The metadata describes another page file than the one at hand."""

    def __init__(self, rank: str, known: PageFileLabel, met: PageFileLabel, owner: str = "") -> None:
        self.known, self.met, self.owner = known, met, owner
        if known == met:
            super().__init__(
                "hf3fs",
                f"the metadata of page file '{rank}' is out of date: another database gives out its pages",
                value=f"its id is {owner[:8]}",
                remedy="Name that database (metadata_url, metadata_path), or name another root.",
            )
            return
        if known.file_id == met.file_id:
            remedy = "Set the file_size that the file was made with."
        else:
            remedy = (
                "All hosts must mount the same file system at root; where the old file is lost, start the "
                "metadata with a new database."
            )
        super().__init__(
            "hf3fs",
            f"the metadata of page file '{rank}' describes another file",
            value=f"it has {_words(known)}; the file has {_words(met)}",
            remedy=remedy,
        )


def _words(label: PageFileLabel) -> str:
    return f"id {label.file_id[:8]}, {label.num_pages} pages of {label.page_nbytes} bytes"


def digests_of(keys: Sequence[str]) -> list[bytes]:
    """Shorten keys to 128 bits, as the metadata keeps them: 10 million take 0.8 GB, and no two are alike."""
    return list(map(_digest_of, keys))


#: A set names its keys twice, and a get comes after a look: the second time costs a tenth of the first.
@lru_cache(maxsize=8192)
def _digest_of(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


def new_ticket() -> int:
    """Draw the number that names a lease or a read: 62 random bits, so that no two are alike."""
    return secrets.randbits(62)


class Hf3fsMetadataInterface(ABC):
    """Places of one namespace's pages; each verb is one transaction, and any thread may call it.

    ``deadline`` is a time of time.monotonic(). Every verb raises BackendTimeout when it has no answer by
    then, BackendUnavailable when the service cannot be reached or refuses, PageFileUnknown where the rank
    must have been initialised. Results are aligned with the keys.
    """

    @abstractmethod
    def initialize(self, rank: str, label: PageFileLabel, owner: str = "", *, deadline: float) -> Terms:
        """Make a page file known, or find that it is known already.

        Args: owner: the database whose pages the file holds, as the file says; "" where it says none.

        Raises: PageFileConflict, where the metadata describes a file with another id, page size or page
            count, or has given out pages of it that another database gives out now.
        """

    @abstractmethod
    def reserve_and_allocate_page_indices(
        self, rank: str, keys: Sequence[tuple[str, str]], *, lease: int, deadline: float
    ) -> list[Reservation]:
        """Take a page for each key that is not stored, making room by eviction; a use of those that are.

        Args: keys: (key, key of the page before it in the prefix, or "") each; lease: a fresh new_ticket().
        """

    @abstractmethod
    def confirm_write(
        self,
        rank: str,
        written: Sequence[Written],
        pages_to_release: Sequence[int],
        *,
        lease: int,
        deadline: float,
    ) -> list[bool]:
        """Store keys under the pages that were written, and give back pages that were not.

        Returns: True where the key is stored now; the first of two writers of a key keeps it, the second's
            page is free again. What was known to be bad, or has another size, is replaced. False where the
            lease has ended and the key is absent.
        """

    @abstractmethod
    def get_page_indices(
        self, rank: str, keys: Sequence[str], *, hold: int, deadline: float
    ) -> list[PageRef | None]:
        """Find pages and hold them for a read, named by a fresh new_ticket(); counts as a use.

        Args: rank: where the pages are expected; one that lies elsewhere is found too.
        """

    @abstractmethod
    def end_read(self, hold: int) -> None:
        """Let go of a read's pages; never fails, since a hold ends by itself."""

    @abstractmethod
    def exists(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        """Tell which keys are stored and good as far as is known; no use."""

    @abstractmethod
    def delete_keys(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        """Forget keys; True where there was one."""

    @abstractmethod
    def report_bad(self, bad: Sequence[tuple[str, PageRef, Status]], *, deadline: float) -> None:
        """Note what a get has found, CORRUPT or SIZE_MISMATCH, unless the key has another page by now."""

    @abstractmethod
    def touch(self, keys: Sequence[str], *, deadline: float) -> None:
        """Count as a use."""

    @abstractmethod
    def clear(self, *, deadline: float) -> int:
        """Forget every key of the namespace, in all page files; return how many."""

    @abstractmethod
    def usage(self, *, deadline: float) -> MetadataUsage:
        """Tell what the namespace holds and all page files together."""

    @abstractmethod
    def close(self) -> None:
        """Give back connections and locks; idempotent."""

    @abstractmethod
    def abandon_in_child(self) -> None:
        """Become unusable in a fork's child without a lock, giving back what the child must not hold."""
