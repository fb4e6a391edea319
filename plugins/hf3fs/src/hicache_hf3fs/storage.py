"""HiCacheHF3FS: pages by index in preallocated page files, found through a metadata service.

A page becomes ``page_nbytes`` bytes at its index in the page file of its component (pagefile.py), moved by
a client: posix_client.py or usrbio_client.py. Which index, the metadata says (metadata.py): reserve, write,
confirm; look up, read, let go. Its checksum is stored with its place, so that bytes which are not the
page's are found whoever wrote
them: a writer that was stopped and went on long after its lease is one that no lock can keep away.

Facts: the usrbio interface as deepseek-ai/3FS has it in src/lib/api.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from hicache_core.errors import BackendTimeout, BackendUnavailable, HiCacheError, InvalidOptions
from hicache_core.memory import HostPool, Pages
from hicache_core.status import OK, Status
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig, Usage
from hicache_hf3fs.connect import connect_metadata, make_client, network_at
from hicache_hf3fs.metadata import (
    NO_PAGE,
    Hf3fsMetadataInterface,
    PageFileUnknown,
    PageRef,
    Reservation,
    Terms,
    Written,
    new_ticket,
)
from hicache_hf3fs.options import Hf3fsOptions
from hicache_hf3fs.page_io import PageIO, PageMover
from hicache_hf3fs.pagefile import PageFile, open_page_file
from hicache_hf3fs.spec import SPEC

_LOG = logging.getLogger("hicache.hf3fs")

_BAD = (Status.CORRUPT, Status.SIZE_MISMATCH)


class HiCacheHF3FS(HiCacheStorage):
    """Pages of one namespace in page files; see the module's text."""

    spec = SPEC
    options: Hf3fsOptions

    def __init__(self, config: HiCacheStorageConfig, options: Hf3fsOptions) -> None:
        super().__init__(config, options)
        self._files: dict[str, PageFile] = {}
        self._files_lock = threading.Lock()
        self._terms = Terms(options.lease_s, options.hold_s)
        self._metadata: Hf3fsMetadataInterface | None = None
        self._client: PageMover | None = None
        self._checksum = options.checksum
        #: Files whose owner is looked at with each batch: on a network the look would be stale, or slow, and
        #: there checksums are always on.
        self._watched = False
        self._complaint = ""

    # Life.

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        self._gate.check_new()
        options: Hf3fsOptions = self.options
        deadline = self._deadline()
        network = network_at(options)
        self._checksum = options.checksum or network
        self._watched = not network
        try:
            self._client = make_client(options, network=network)
            self._metadata = connect_metadata(options, self.config, deadline=deadline)
            for pool in pools:
                self._serve(pool, deadline)
        except BaseException:
            self._give_back()
            raise
        usrbio = options.client == "usrbio"
        self.capabilities = replace(
            self.capabilities,
            shared=options.metadata_url is not None,
            checksum=self._checksum,
            zero_copy=not usrbio,
            deadline="bounce" if usrbio else "none" if network else "hold",
            transport="usrbio" if usrbio else "network mount" if network else "local mount",
        )
        super().open(pools)

    def add_pool(self, pool: HostPool) -> None:
        with self._verb():
            self._serve(pool, self._deadline())
            super().add_pool(pool)

    def close(self) -> None:
        if self._drain():
            self._give_back()

    @contextmanager
    def _verb(self) -> Iterator[None]:
        """Pass the gate; the last verb that close() could not wait for gives everything back."""
        try:
            with self._gate:
                yield
        finally:
            if self._gate.is_closed and not self._gate.running:
                self._give_back()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._files_lock = threading.Lock()
        # What is shared with the parent is not given back here: sockets end with the child.
        client, self._client = self._client, None
        metadata, self._metadata = self._metadata, None
        files, self._files = self._files, {}
        for file in files.values():
            file.close()  # or the parent's lock would outlive the parent
        if client is not None:
            client.abandon_in_child()
        if metadata is not None:
            metadata.abandon_in_child()

    def _give_back(self) -> None:
        with self._files_lock:
            files, self._files = list(self._files.values()), {}
            client, self._client = self._client, None
            metadata, self._metadata = self._metadata, None
        if client is not None:
            client.close()
            for file in files:
                client.detach(file)
        if metadata is not None:
            metadata.close()
        for file in files:
            file.close()

    # Verbs.

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._verb():
            return self._answered(keys, lambda meta, end: _as_statuses(meta.exists(keys, deadline=end)))

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._verb():
            self._check(keys, locs, writes_slots=True)
            return self._answered(keys, lambda meta, end: self._get(meta, keys, locs, end))

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._verb():
            self._check(keys, locs)
            return self._answered(keys, lambda meta, end: self._set(meta, keys, locs, end))

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        with self._verb():
            return self._answered(keys, lambda meta, end: _as_statuses(meta.delete_keys(keys, deadline=end)))

    def touch(self, keys: Sequence[str]) -> None:
        def ask(meta: Hf3fsMetadataInterface, deadline: float) -> list[Status]:
            meta.touch(keys, deadline=deadline)
            return []

        with self._verb():
            self._answered(keys, ask)

    def clear(self) -> int:
        with self._verb():
            return self._meta.clear(deadline=self._deadline())

    def usage(self) -> Usage:
        with self._verb():
            pages, nbytes, store, files = self._meta.usage(deadline=self._deadline())
            return Usage(pages, nbytes, store, max(1, files) * self.options.file_size)

    # How a batch goes.

    def _answered(
        self, keys: Sequence[str], ask: Callable[[Hf3fsMetadataInterface, float], list[Status]]
    ) -> list[Status]:
        """Ask, and give every key the status of whatever trouble there was with the whole backend (C10)."""
        if not keys:
            return []
        try:
            return ask(self._meta, self._deadline())
        except BackendTimeout:
            return [Status.TIMEOUT] * len(keys)
        except BackendUnavailable:
            return [Status.UNAVAILABLE] * len(keys)
        except HiCacheError as error:
            if self._complaint != str(error):
                self._complaint = str(error)
                _LOG.warning("hicache 'hf3fs': %s", error)
            return [Status.ERROR] * len(keys)

    def _get(
        self, meta: Hf3fsMetadataInterface, keys: Sequence[str], locs: Pages, deadline: float
    ) -> list[Status]:
        started, hold = time.monotonic(), new_ticket()
        rank, database = locs.component.key, self._terms.database
        try:
            refs = meta.get_page_indices(rank, keys, hold=hold, deadline=deadline)
        except PageFileUnknown:  # the server has another database now
            database = self._agree(meta, self._file(rank, locs.nbytes, deadline), deadline)
            refs = meta.get_page_indices(rank, keys, hold=hold, deadline=deadline)
        try:
            statuses = self._read(refs, locs, database, deadline)
        finally:
            meta.end_read(hold)
        if time.monotonic() - started > self._terms.hold_s:
            # A writer may have been given these pages by now.
            return [Status.TIMEOUT if status is OK else status for status in statuses]
        bad = [
            (key, ref, status)
            for key, ref, status in zip(keys, refs, statuses, strict=True)
            if status in _BAD and ref is not None and not ref.corrupt
        ]
        if bad:
            with suppress(HiCacheError):  # what was read is as it is; the next get finds it again
                meta.report_bad(bad, deadline=deadline)
        return statuses

    def _read(
        self, refs: Sequence[PageRef | None], locs: Pages, database: str, deadline: float
    ) -> list[Status]:
        statuses: list[Status] = [Status.MISS] * len(refs)
        reads: dict[str, list[tuple[int, PageRef]]] = {}
        for position, ref in enumerate(refs):
            if ref is None:
                continue
            if ref.nbytes != locs.nbytes:
                statuses[position] = Status.SIZE_MISMATCH
            elif ref.corrupt:
                statuses[position] = Status.CORRUPT
            else:
                reads.setdefault(ref.rank, []).append((position, ref))
        for rank, chosen in reads.items():
            file = self._file(rank, locs.nbytes, deadline)
            pages = [PageIO(file.offset(ref.page), locs.views(at), ref.nbytes) for at, ref in chosen]
            self._mover.read(file, pages, checksum=self._checksum, deadline=deadline)
            self._check_owner(file, database)
            for page, (position, ref) in zip(pages, chosen, strict=True):
                statuses[position] = _verdict(page, ref)
        return statuses

    def _set(
        self, meta: Hf3fsMetadataInterface, keys: Sequence[str], locs: Pages, deadline: float
    ) -> list[Status]:
        file = self._file(locs.component.key, locs.nbytes, deadline)
        first: dict[str, int] = {}
        for position, key in enumerate(keys):
            first.setdefault(key, position)
        names, lease, database = list(first), new_ticket(), self._terms.database
        try:
            taken = self._reserve(meta, file, names, lease, deadline)
        except PageFileUnknown:
            # The server came back with a new database: everything is a miss there, and the file is as good
            # as new.
            database = self._agree(meta, file, deadline)
            taken = self._reserve(meta, file, names, lease, deadline)
        outcome: dict[str, Status] = {}
        writes: list[tuple[str, int, PageIO]] = []
        for name, (existed, index) in zip(names, taken, strict=True):
            if existed:
                outcome[name] = OK
            elif index == NO_PAGE:
                outcome[name] = Status.NO_SPACE
            else:
                page = PageIO(file.offset(index), locs.views(first[name]), locs.nbytes)
                writes.append((name, index, page))
        if writes:
            pages = [page for _, _, page in writes]
            self._mover.write(file, pages, checksum=self._checksum, deadline=deadline)
            self._check_owner(file, database)
            outcome.update(self._confirm(meta, file, writes, lease, deadline))
        return [outcome[key] for key in keys]

    def _reserve(
        self,
        meta: Hf3fsMetadataInterface,
        file: PageFile,
        names: Sequence[str],
        lease: int,
        deadline: float,
    ) -> list[Reservation]:
        # An engine hands over pages of several prefixes at once and does not say which page follows which.
        wanted = [(name, "") for name in names]
        return meta.reserve_and_allocate_page_indices(file.rank, wanted, lease=lease, deadline=deadline)

    def _confirm(
        self,
        meta: Hf3fsMetadataInterface,
        file: PageFile,
        writes: Sequence[tuple[str, int, PageIO]],
        lease: int,
        deadline: float,
    ) -> dict[str, Status]:
        written = [Written(name, i, p.nbytes, p.checksum) for name, i, p in writes if p.status is OK]
        # A write that was left behind may still land on its page: nobody gets it before the lease has ended.
        release = [index for _, index, page in writes if page.status is not OK and not page.in_flight]
        outcome = {name: page.status for name, _, page in writes}
        if not written and not release:
            return outcome
        try:
            kept = meta.confirm_write(file.rank, written, release, lease=lease, deadline=deadline)
        except BackendTimeout:
            kept, lost = [False] * len(written), Status.TIMEOUT
        except (BackendUnavailable, PageFileUnknown):
            kept, lost = [False] * len(written), Status.UNAVAILABLE
        else:
            lost = Status.TIMEOUT  # the lease has ended
        outcome.update((page.key, OK if there else lost) for page, there in zip(written, kept, strict=True))
        return {
            name: Status.ERROR if status is Status.CORRUPT else status for name, status in outcome.items()
        }

    # Page files.

    def _serve(self, pool: HostPool, deadline: float) -> None:
        """Have a pool's page file; a component without bytes has none."""
        if pool.component.page_nbytes:
            self._file(pool.component.key, pool.component.page_nbytes, deadline)

    def _file(self, rank: str, page_nbytes: int, deadline: float) -> PageFile:
        """Give the open page file of a rank, opened and agreed on with the metadata on first need."""
        file = self._files.get(rank)
        if file is not None and self._is_ours(file, self._terms.database):
            return file
        with self._files_lock:
            file = self._files.get(rank)
            if file is not None:
                if not self._is_ours(file, self._terms.database):
                    self._agree(self._meta, file, deadline)
            else:
                file = open_page_file(self.options.root, rank, page_nbytes, self.options.file_size)
                try:
                    self._mover.attach(file)
                    self._agree(self._meta, file, deadline)
                except BaseException:
                    self._mover.detach(file)
                    file.close()
                    raise
                self._files[rank] = file
        return file

    def _agree(self, meta: Hf3fsMetadataInterface, file: PageFile, deadline: float) -> str:
        """Have the metadata know the file, and the file its metadata's database, which is given.

        See that leases outlast a verb.
        """
        alone = self.options.metadata_url is None
        try:
            terms = meta.initialize(file.rank, file.label, file.owner(), deadline=deadline)
            file.own(terms.database, alone=alone)
            file.hold(alone=alone)
        except OSError as error:
            raise BackendUnavailable(f"the page file {file.path!r} failed", value=str(error)) from error
        self._terms = terms
        shortest = min(terms.lease_s, terms.hold_s)
        if shortest < self.config.timeout_s:
            complaint = (
                f"pages are kept for {shortest:g} s (lease_s, hold_s) and a call may take timeout_s, "
                f"{self.config.timeout_s:g} s: raise the former, on the metadata server where there is one"
            )
            raise InvalidOptions("hf3fs", [("hold_s", complaint, "")])
        return terms.database

    def _is_ours(self, file: PageFile, database: str) -> bool:
        """False where another database gives out the file's pages by now."""
        if not self._watched:
            return True
        try:
            return file.owner() == database
        except OSError:
            return False

    def _check_owner(self, file: PageFile, database: str) -> None:
        """Make sure that what was read or written since ``database`` named the pages is its."""
        if not self._is_ours(file, database):
            raise BackendUnavailable(f"the page file {file.path!r} was taken over by other metadata")

    @property
    def _meta(self) -> Hf3fsMetadataInterface:
        if self._metadata is None:
            raise BackendUnavailable("'hf3fs' has no metadata", remedy="Open it again.")
        return self._metadata

    @property
    def _mover(self) -> PageMover:
        if self._client is None:
            raise BackendUnavailable("'hf3fs' has no client", remedy="Open it again.")
        return self._client

    def _deadline(self) -> float:
        return time.monotonic() + self.config.timeout_s


def _as_statuses(found: Sequence[bool]) -> list[Status]:
    return [OK if there else Status.MISS for there in found]


def _verdict(page: PageIO, ref: PageRef) -> Status:
    """OK only for a whole page whose bytes are those that were set."""
    status = page.status
    if status is OK and None not in (page.checksum, ref.checksum) and page.checksum != ref.checksum:
        return Status.CORRUPT
    return status
