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

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from hicache_core.errors import BackendTimeout, BackendUnavailable
from hicache_core.memory import HostPool, Pages
from hicache_core.spec import BackendSpec
from hicache_core.status import OK, Status
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig, Usage
from hicache_file._catalog import Catalog, Space
from hicache_file._files import LockTimeout, status_of
from hicache_file._format import DAMAGED, REMOVED, BadHeader
from hicache_file._index import ABSENT, RECORD_BITS
from hicache_file._journal import checks_of, digests_of
from hicache_file._marks import bury, mark
from hicache_file._opening import Opened, check_pool, open_root
from hicache_file._reader import Plan, Reader
from hicache_file._writer import Batch
from hicache_file.spec import SPEC

if TYPE_CHECKING:
    from hicache_core.options import Options

#: A batch that meets a new epoch, or deleted segments, starts over at most so often.
_ATTEMPTS = 3


class HiCacheFile(HiCacheStorage):
    """The file backend; ``options`` is a FileOptions."""

    spec: ClassVar[BackendSpec] = SPEC

    def __init__(self, config: HiCacheStorageConfig, options: Options) -> None:
        super().__init__(config, options)
        self._opened: Opened | None = None
        self._catalog: Catalog | None = None
        self._released = False

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        self._gate.check_new()
        for pool in pools:
            check_pool(self.options.capacity or 0, pool)
        opened = open_root(self.config, self.options, self.capabilities, lambda: self._current())
        try:
            for pool in pools:
                check_pool(opened.capacity, pool)
            self._opened = opened
            self.capabilities = opened.capabilities
            self._catalog = opened.catalog
            super().open(pools)
        except BaseException:
            opened.close(self.config.timeout_s)
            raise

    def add_pool(self, pool: HostPool) -> None:
        self._gate.check()
        check_pool(self._state().capacity, pool)
        super().add_pool(pool)

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._verb():
            if not keys:
                return []
            try:
                catalog = self._attached()
                if catalog is None:
                    return [Status.MISS] * len(keys)
                digests = digests_of(list(map(str.encode, keys)))
                found = catalog.look(digests)
                if ABSENT not in found:
                    statuses = [OK] * len(keys)
                else:
                    statuses = [Status.MISS if place == ABSENT else OK for place in found]
                    _name_damaged(catalog, digests, statuses)
                _name_mismatched(catalog, digests, statuses)
                return statuses
            except OSError as error:
                return [_of_backend(error)] * len(keys)

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._verb():
            self._check(keys, locs, writes_slots=True)
            if not keys:
                return []
            encoded = list(map(str.encode, keys))
            try:
                return self._get(digests_of(encoded), checks_of(encoded), locs)
            except OSError as error:
                return [_of_backend(error)] * len(keys)

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._verb():
            self._check(keys, locs)
            if not keys:
                return []
            if self._state().writer is None:
                return [Status.DENIED] * len(keys)
            encoded = list(map(str.encode, keys))
            try:
                return self._set(digests_of(encoded), checks_of(encoded), locs)
            except OSError as error:
                return [_of_backend(error)] * len(keys)

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        if not self.capabilities.remove:
            return super().batch_remove(keys)
        with self._verb():
            if not keys:
                return []
            digests = digests_of(list(map(str.encode, keys)))
            space = self._space()
            try:
                with space.epoch.lock.held(self.config.timeout_s):
                    catalog = self._current(locked=True)
                    catalog.grow()
                    return bury(catalog, digests, [catalog.copies(digest) for digest in digests], REMOVED)
            except OSError as error:
                return [_of_backend(error)] * len(keys)

    def touch(self, keys: Sequence[str]) -> None:
        with self._verb():
            state = self._state()
            if not state.marking or not keys:
                return
            try:
                catalog = self._current()
                mark(catalog, catalog.look(digests_of(list(map(str.encode, keys)))))
            except OSError:
                pass  # a use that is not counted

    def clear(self) -> int:
        if not self.capabilities.clear:
            return super().clear()
        with self._verb():
            state, space = self._state(), self._space()
            try:
                catalog = self._current()
                catalog.grow()
                pages, _ = catalog.usage()
                with space.epoch.lock.held(self.config.timeout_s):
                    epoch = space.epoch.advance(catalog.epoch)
                self._current()
                state.remove_void(epoch, self.config.timeout_s)
                return pages
            except OSError as error:
                raise _unavailable("clearing a namespace", state.root_path, error) from error

    def usage(self) -> Usage:
        with self._verb():
            state = self._state()
            try:
                catalog = self._attached()
                if catalog is None:
                    return Usage(0, 0, 0, None)
                catalog.grow()
                pages, nbytes = catalog.usage()
                store_bytes, capacity = state.books()
                return Usage(pages, nbytes, store_bytes, capacity)
            except (OSError, BadHeader) as error:
                raise _unavailable("reading the usage", state.root_path, error) from error

    def close(self) -> None:
        drained = self._drain()
        if drained:
            self._release()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        self._released = True
        if self._opened is not None:
            self._opened.close_in_child()

    # What verbs share.

    @contextmanager
    def _verb(self) -> Iterator[None]:
        try:
            with self._gate:
                yield
        finally:
            if self._gate.is_closed and not self._gate.running:
                self._release()

    def _release(self) -> None:
        """Give everything back, once; the last verb does it when close() could not wait for it."""
        opened = self._opened
        if opened is None or self._released:
            return
        self._released = True
        opened.close(self.config.timeout_s)

    def _state(self) -> Opened:
        if self._opened is None:
            self._gate.check()
            raise BackendUnavailable("the file backend has no root", remedy="Call open() first.")
        return self._opened

    def _space(self) -> Space:
        space = self._state().space
        if space is None:
            raise BackendUnavailable("the namespace does not exist yet", remedy="Set a page first.")
        return space

    def _attached(self) -> Catalog | None:
        """Give the current catalog; None while a reader's namespace does not exist."""
        if self._catalog is None and not self._attach():
            return None
        return self._current()

    def _attach(self) -> bool:
        state = self._state()
        if not state.attach():
            return False
        self._catalog = state.catalog
        return True

    def _current(self, *, locked: bool = False) -> Catalog:
        """Give a catalog that agrees with the epoch file.

        Raises:
            OSError.
        """
        catalog, space = self._catalog, self._space()
        if catalog is not None and space.epoch.words() == catalog.words:
            return catalog
        return self._caught_up(space, locked=locked)

    def _caught_up(self, space: Space, *, locked: bool) -> Catalog:
        for _ in range(_ATTEMPTS):
            with space.lock:
                catalog = self._catalog
                words = space.epoch.words()
                try:
                    if catalog is None or (words != catalog.words and not catalog.follow(words)):
                        catalog = Catalog(space, words, catalog.segments() if catalog is not None else ())
                        self._catalog = catalog
                    return catalog
                except BadHeader:
                    at_least = catalog.epoch if catalog is not None else 0
            self._settle_epoch(space, at_least, locked=locked)
        raise OSError(5, "the epoch file cannot be read")

    def _settle_epoch(self, space: Space, at_least: int, *, locked: bool) -> None:
        if self._state().writer is None:
            os.sched_yield()
        elif locked:
            space.epoch.settled_state(at_least)
        else:
            with space.epoch.lock.held(self.config.timeout_s):
                space.epoch.settled_state(at_least)

    def _get(self, digests: list[bytes], checks: list[int], locs: Pages) -> list[Status]:
        state = self._state()
        for _ in range(_ATTEMPTS):
            catalog = self._attached()
            if catalog is None:
                break
            plan = Plan([Status.MISS] * len(digests), catalog.look(digests))
            self._reader(state).read(catalog, plan, checks, locs)
            if plan.lost:
                self._forget_lost(catalog, plan)
                continue
            if catalog is not self._current():
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

    def _reader(self, state: Opened) -> Reader:
        if state.reader is None:
            raise BackendUnavailable("the namespace does not exist yet")
        return state.reader

    def _forget_lost(self, catalog: Catalog, plan: Plan) -> None:
        """Segments that we thought were there are gone: look at the journals again (R7)."""
        for position in plan.lost:
            segment = catalog.segment(plan.places[position] >> RECORD_BITS)
            if segment is not None:
                catalog.forget(segment)

    def _bury_damaged(self, catalog: Catalog, digests: list[bytes], plan: Plan) -> None:
        damaged = sorted(set(plan.damaged))
        chosen = [digests[position] for position in damaged]
        places = [[plan.places[position]] for position in damaged]
        if self._state().writer is not None and not self._state().network:
            try:
                with catalog.space.epoch.lock.held(self.config.timeout_s):
                    bury(catalog, chosen, places, DAMAGED)
                return
            except OSError:
                pass  # known to this instance at least
        for digest, (place,) in zip(chosen, places, strict=True):
            catalog.bury(digest, place, damaged=True)

    def _set(self, digests: list[bytes], checks: list[int], locs: Pages) -> list[Status]:
        state = self._state()
        writer = state.writer
        if writer is None or state.too_large(locs.nbytes):
            return [Status.NO_SPACE] * len(digests)
        statuses = [OK] * len(digests)
        for _ in range(_ATTEMPTS):
            catalog = self._current()
            found = catalog.look(digests)
            present = [place for place in found if place != ABSENT]
            if present:
                found = state.drop_mismatched(catalog, digests, found, locs.nbytes)
            wanted = [position for position, place in enumerate(found) if place == ABSENT]
            first_of = dict(zip(reversed([digests[p] for p in wanted]), reversed(wanted), strict=True))
            unique = wanted if len(first_of) == len(wanted) else sorted(first_of.values())
            statuses = [OK] * len(digests)
            if catalog.index.mismatched:
                catalog.index.mismatched.difference_update(digests)
            if unique:
                self._append(writer.append, unique, digests, checks, locs, statuses)
                if len(unique) != len(wanted):
                    for position in wanted:
                        statuses[position] = statuses[first_of[digests[position]]]
            if self._current().epoch == catalog.epoch:
                if state.marking and present:
                    mark(catalog, present)
                return statuses
        return [Status.ERROR if status is OK else status for status in statuses]

    def _append(
        self,
        append: object,
        positions: list[int],
        digests: list[bytes],
        checks: list[int],
        locs: Pages,
        statuses: list[Status],
    ) -> None:
        whole = len(positions) == len(digests)
        chosen = locs if whole else locs.take(positions)
        batch = Batch(
            digests=digests if whole else [digests[p] for p in positions],
            checks=checks if whole else [checks[p] for p in positions],
            views=chosen.buffers(),
            buffers_per_page=chosen.segments_per_page,
            nbytes=locs.nbytes,
            statuses=[OK] * len(positions),
            places=[ABSENT] * len(positions),
        )
        append(batch)  # type: ignore[operator]
        self._yield_to_others(batch)
        for position, status in zip(positions, batch.statuses, strict=True):
            statuses[position] = status

    def _yield_to_others(self, batch: Batch) -> None:
        """Bury our own copy of a key that somebody else has set at the same time (C4).

        Each looks for the others after it has written, so the later one sees
        the earlier; under the namespace's lock each buries its own while
        another lives, so one copy is left and all processes agree on it.
        """
        catalog = self._current()
        if not catalog.duplicates(batch.digests):
            return
        with catalog.space.epoch.lock.held(self.config.timeout_s):
            catalog = self._current(locked=True)
            for position in catalog.duplicates(batch.digests):
                digest, place = batch.digests[position], batch.places[position]
                copies = catalog.copies(digest)
                if place in copies and len(copies) > 1:
                    bury(catalog, [digest], [[place]], REMOVED)


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
