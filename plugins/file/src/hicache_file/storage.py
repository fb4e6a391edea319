"""HiCacheFile: pages on a file system, log-structured (rules R1 to R9 of the format's decision page).

A set appends its pages to an open segment of this process, then one journal
record a page; a get looks the key up in memory and reads straight into the
slots. No server, and no lock in either: segments have one writer, records are
written after their pages, and everything that processes have to agree on (the
budget, epochs, removals) goes through two small locked files.

Every verb compares the namespace's epoch file on entry, one pread of 24 bytes,
and before it answers OK. docs/file-performance.md has the figures.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from hicache_core.errors import BackendTimeout, BackendUnavailable, StorageClosed
from hicache_core.memory import HostPool, Pages
from hicache_core.spec import BackendSpec
from hicache_core.status import OK, Status
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig, Usage
from hicache_file._catalog import Catalog
from hicache_file._files import LockTimeout, status_of
from hicache_file._format import DAMAGED, REMOVED, UnknownVersion
from hicache_file._gate import ReleasingGate
from hicache_file._index import ABSENT, RECORD_BITS
from hicache_file._journal import Words, checks_of, digests_of
from hicache_file._marks import bury, mark
from hicache_file._opened import Opened
from hicache_file._opening import check_pool, open_root
from hicache_file._reader import Plan
from hicache_file._upkeep import namespaces, narrowed, verify
from hicache_file._writer import Batch, Writer
from hicache_file.spec import SPEC

if TYPE_CHECKING:
    from hicache_core.options import Options
    from hicache_core.upkeep import NamespaceUse, Verified

#: A get that meets a new epoch, or deleted segments, starts over at most so often; then it misses.
_ATTEMPTS = 3


class HiCacheFile(HiCacheStorage):
    """The file backend; ``options`` is a FileOptions."""

    spec: ClassVar[BackendSpec] = SPEC

    def __init__(self, config: HiCacheStorageConfig, options: Options) -> None:
        super().__init__(config, options)
        self._gate = ReleasingGate(self.spec.name, self._release)
        self._opened: Opened | None = None
        self._releasing = threading.Lock()

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        self._gate.check_new()
        for pool in pools:
            check_pool(self.options.capacity or 0, pool)
        opened = open_root(self.config, self.options, self.capabilities)
        try:
            for pool in pools:
                check_pool(opened.capacity, pool)
            self._opened = opened
            self.capabilities = narrowed(opened.capabilities)
            super().open(pools)
        except BaseException:
            self._opened = None
            opened.close(self.config.timeout_s)
            raise

    def add_pool(self, pool: HostPool) -> None:
        self._gate.check()
        check_pool(self._state().capacity, pool)
        super().add_pool(pool)

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            if not keys:
                return []
            try:
                catalog = self._catalog()
                if catalog is None:
                    return [Status.MISS] * len(keys)
                digests = digests_of(map(str.encode, keys))
                found = catalog.look(digests)
            except OSError as error:
                return [_of_backend(error)] * len(keys)
            if ABSENT not in found:
                statuses = [OK] * len(keys)
            else:
                statuses = [Status.MISS if place == ABSENT else OK for place in found]
                _name_damaged(catalog, digests, statuses)
            _name_mismatched(catalog, digests, statuses)
            return statuses

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs, writes_slots=True)
            if not keys:
                return []
            encoded = list(map(str.encode, keys))
            try:
                return self._get(digests_of(encoded), checks_of(encoded), locs)
            except OSError as error:
                return [_of_backend(error)] * len(keys)

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            if not keys:
                return []
            writer = self._state().writer
            if writer is None:
                return [Status.DENIED] * len(keys)
            encoded = list(map(str.encode, keys))
            try:
                return self._set(writer, digests_of(encoded), checks_of(encoded), locs)
            except OSError as error:
                return [_of_backend(error)] * len(keys)

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        if not self.capabilities.remove:
            return super().batch_remove(keys)
        with self._gate:
            if not keys:
                return []
            digests = digests_of(map(str.encode, keys))
            try:
                with self._namespace_locked() as catalog:
                    catalog.grow()
                    return bury(catalog, digests, [catalog.copies(digest) for digest in digests], REMOVED)
            except OSError as error:
                return [_of_backend(error)] * len(keys)

    def touch(self, keys: Sequence[str]) -> None:
        with self._gate:
            state = self._state()
            if not state.marking or not keys:
                return
            try:
                catalog = state.current()
                mark(catalog, catalog.look(digests_of(map(str.encode, keys))))
            except OSError:
                pass  # a use that is not counted

    def clear(self) -> int:
        if not self.capabilities.clear:
            return super().clear()
        with self._gate:
            state = self._state()
            try:
                catalog = state.current()
                catalog.grow()
                pages, _ = catalog.usage()
                with self._namespace_locked() as catalog:
                    epoch = catalog.space.epoch.advance(catalog.epoch)
                state.current()
                state.remove_void(epoch, self.config.timeout_s)
                return pages
            except OSError as error:
                raise _unavailable("clearing a namespace", state.root_path, error) from error

    def usage(self) -> Usage:
        with self._gate:
            state = self._state()
            try:
                catalog = self._catalog()
                if catalog is None:
                    return Usage(0, 0, *state.books())
                catalog.grow()
                pages, nbytes = catalog.usage()
                store_bytes, capacity = state.books()
                return Usage(pages, nbytes, store_bytes, capacity)
            except OSError as error:
                raise _unavailable("reading the usage", state.root_path, error) from error

    def namespaces(self) -> list[NamespaceUse]:
        with self._gate:
            return namespaces(self._state())

    def verify(self, *, remove: bool = False) -> Iterator[Verified]:
        if not self.capabilities.verify:
            return super().verify(remove=remove)
        with self._gate:
            return verify(self, remove=remove)

    def close(self) -> None:
        if self._drain():
            self._release()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close_in_child()

    # What verbs share.

    def _release(self) -> None:
        """Give everything back, once; the last verb does it when close() could not wait for it."""
        with self._releasing:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close(self.config.timeout_s)

    def _state(self) -> Opened:
        opened = self._opened
        if opened is None:
            raise StorageClosed(self.spec.name)
        return opened

    def _catalog(self) -> Catalog | None:
        """Give the current catalog; None while a reader's namespace does not exist.

        Raises:
            OSError.
        """
        state = self._state()
        try:
            if state.follower is None and not state.attach():
                return None
        except UnknownVersion as error:
            raise OSError(errno.EIO, str(error)) from error
        return state.current()

    @contextmanager
    def _namespace_locked(self) -> Iterator[Catalog]:
        """Hold the namespace's lock, with a catalog that agrees with the epoch file.

        Raises:
            OSError.
        """
        follower = self._state().follower
        if follower is None:
            raise FileNotFoundError("no namespace")
        with follower.space.epoch.lock.held(self.config.timeout_s):
            yield follower.current_locked()

    def _get(self, digests: list[bytes], checks: Words, locs: Pages) -> list[Status]:
        state = self._state()
        for _ in range(_ATTEMPTS):
            catalog = self._catalog()
            if catalog is None or state.reader is None:
                break
            plan = Plan(catalog.look(digests), checks)
            state.reader.read(catalog, plan, locs)
            if plan.lost:
                _forget_lost(catalog, plan)
                continue
            if state.current().epoch != catalog.epoch:
                continue
            if plan.damaged:
                self._bury_damaged(catalog, digests, plan)
            if state.marking:
                for segment, numbers in plan.used:
                    state.mark(catalog, segment, numbers)
            _name_damaged(catalog, digests, plan.statuses)
            _learn_mismatches(catalog, digests, plan.statuses)
            return plan.statuses
        return [Status.MISS] * len(digests)

    def _bury_damaged(self, catalog: Catalog, digests: list[bytes], plan: Plan) -> None:
        state = self._state()
        damaged = sorted(set(plan.damaged))
        chosen = [digests[position] for position in damaged]
        places = [[plan.places[position]] for position in damaged]
        if state.writer is not None and not state.network:
            try:
                with self._namespace_locked():
                    bury(catalog, chosen, places, DAMAGED)
                return
            except OSError:
                pass  # known to this instance at least
        for digest, (place,) in zip(chosen, places, strict=True):
            catalog.bury(digest, place, damaged=True)

    def _set(self, writer: Writer, digests: list[bytes], checks: Words, locs: Pages) -> list[Status]:
        state = self._state()
        if state.too_large(locs.nbytes):
            return [Status.NO_SPACE] * len(digests)
        deadline = time.monotonic() + self.config.timeout_s
        while True:  # a clear that comes between has it append again, for as long as clears keep coming
            catalog = state.current()
            found = catalog.look(digests)
            present = len(found) - found.count(ABSENT)
            if present:
                found = state.drop_mismatched(catalog, digests, found, locs.nbytes)
            statuses = [OK] * len(digests)
            if catalog.index.mismatched:
                catalog.index.mismatched.difference_update(digests)
            if ABSENT in found:
                after = self._append(writer, found, digests, checks, locs, statuses)
            else:
                after = state.current()
            if after.epoch == catalog.epoch:
                if state.marking and present:
                    _mark(catalog, found)
                return statuses
            if time.monotonic() >= deadline:
                return [Status.TIMEOUT if status is OK else status for status in statuses]

    def _append(
        self,
        writer: Writer,
        found: Sequence[int],
        digests: list[bytes],
        checks: Words,
        locs: Pages,
        statuses: list[Status],
    ) -> Catalog:
        """Write the pages that are absent, each key once; gives the catalog as it is afterwards."""
        absent = [position for position, place in enumerate(found) if place == ABSENT]
        first_of: dict[bytes, int] = {}
        for position in absent:
            first_of.setdefault(digests[position], position)
        unique = list(first_of.values())
        whole = len(unique) == len(digests)
        chosen = locs if whole else locs.take(unique)
        batch = Batch(
            digests=digests if whole else list(first_of),
            checks=checks if whole else checks[unique],
            views=chosen.buffers(),
            buffers_per_page=chosen.segments_per_page,
            nbytes=locs.nbytes,
            statuses=[OK] * len(unique),
            places=[ABSENT] * len(unique),
        )
        writer.append(batch)
        catalog = self._state().current()
        if catalog.duplicates(batch.digests):
            self._yield_to_others(batch)
        if batch.statuses.count(OK) != len(unique):
            became = dict(zip(first_of, batch.statuses, strict=True))
            for position in absent:
                statuses[position] = became[digests[position]]
        return catalog

    def _yield_to_others(self, batch: Batch) -> None:
        """Bury our own copy of a key that somebody else has set at the same time (C4).

        Each looks for the others after it has written, so the later one sees
        the earlier; under the namespace's lock each buries its own while
        another lives, so one copy is left and all processes agree on it.
        """
        with self._namespace_locked() as catalog:
            for position in catalog.duplicates(batch.digests):
                digest, place = batch.digests[position], batch.places[position]
                copies = catalog.copies(digest)
                if place in copies and len(copies) > 1:
                    bury(catalog, [digest], [[place]], REMOVED)


def _forget_lost(catalog: Catalog, plan: Plan) -> None:
    """Segments that we thought were there are gone: look at the journals again (R7)."""
    for position in plan.lost:
        segment = catalog.segment(plan.places[position] >> RECORD_BITS)
        if segment is not None:
            catalog.forget(segment)


def _mark(catalog: Catalog, places: Sequence[int]) -> None:
    try:
        mark(catalog, places)
    except OSError:
        pass  # a use that is not counted


def _name_damaged(catalog: Catalog, digests: Sequence[bytes], statuses: list[Status]) -> None:
    """Say CORRUPT where a key is missing because its value is known to be damaged (C6)."""
    damaged = catalog.index.damaged
    if damaged:
        for position, status in enumerate(statuses):
            if status is Status.MISS and digests[position] in damaged:
                statuses[position] = Status.CORRUPT


def _name_mismatched(catalog: Catalog, digests: Sequence[bytes], statuses: list[Status]) -> None:
    """Say SIZE_MISMATCH where a get has found one (C6)."""
    mismatched = catalog.index.mismatched
    if mismatched:
        for position, status in enumerate(statuses):
            if status is OK and digests[position] in mismatched:
                statuses[position] = Status.SIZE_MISMATCH


def _learn_mismatches(catalog: Catalog, digests: Sequence[bytes], statuses: Sequence[Status]) -> None:
    """Remember for contains on which keys this get found another size."""
    known = catalog.index.mismatched
    if Status.SIZE_MISMATCH in statuses:
        known.update(d for d, s in zip(digests, statuses, strict=True) if s is Status.SIZE_MISMATCH)
    elif known:
        known.difference_update(d for d, s in zip(digests, statuses, strict=True) if s is OK)


def _of_backend(error: OSError) -> Status:
    """Tell what one error means for a whole batch."""
    status = status_of(error)
    return Status.UNAVAILABLE if status is Status.ERROR else status


def _unavailable(what: str, root: str, error: Exception) -> BackendUnavailable:
    kind = BackendTimeout if isinstance(error, LockTimeout) else BackendUnavailable
    return kind(
        f"{what} in '{root}' failed", value=str(error), remedy="Look at the folder and its file system."
    )
