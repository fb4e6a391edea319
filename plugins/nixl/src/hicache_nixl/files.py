"""Pages as files: what a set, a get and a look make of folders, agents and the budget.

A set asks for each key whether a good file is there, reserves the bytes of the
others, and moves them chunk by chunk: temporary files are opened, their
descriptors registered, slots and trailers written by one NIXL transfer, then
renamed. A get opens and measures the files, lets one transfer read pages into
their slots and trailers into private memory, and believes a page only when its
trailer and checksum agree. One file that fails does not fail its neighbours:
the pages of a failed transfer are moved again one by one.

A page that is found damaged is cut to nothing, through its own inode, so that
every process sees it (C6) and the next set replaces it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from hicache_core import HostPool, Pages, Status, Usage
from hicache_core.errors import BackendTimeout, BackendUnavailable, StorageClosed
from hicache_nixl._native import Agent
from hicache_nixl.agents import Agents
from hicache_nixl.budget import Budget
from hicache_nixl.byname import ByName
from hicache_nixl.filemoves import MAX_OPEN, Mover
from hicache_nixl.folders import FANS, Entry, Folders, fan_of, status_of, unlink
from hicache_nixl.lanes import Lanes
from hicache_nixl.places import Moving
from hicache_nixl.trailer import BLOCK_NBYTES, TRAILER_NBYTES, stored_page_nbytes

_OK, _MISS = Status.OK, Status.MISS
_OPEN_TO_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


Move = Callable[[Agent, Moving, Sequence[int]], Sequence[int]]
"""Moves pages by an agent; gives those that are to be moved again, alone."""


class FileStore:
    """The pages of one namespace in folders; thread-safe."""

    def __init__(
        self,
        folders: Folders,
        agents: Agents,
        budget: Budget | None,
        mover: Mover,
        lanes: Lanes,
        by_name: ByName,
    ) -> None:
        self._folders = folders
        self._agents = agents
        self._budget = budget
        self._mover = mover
        self._verdicts = mover.verdicts
        self._lanes = lanes
        self._by_name = by_name
        self._page_nbytes: dict[str, int] = {}

    def know(self, pools: Sequence[HostPool]) -> None:
        """Learn the page sizes that keys of these pools' components have, and register their memory."""
        self._page_nbytes = {pool.component.key: pool.component.page_nbytes for pool in pools}
        self._agents.know(pools)

    def contains(self, keys: Sequence[str], deadline: float) -> list[Status]:
        """Look at each file's size; open one only where the size is not what its component has."""
        wanted = self._page_nbytes.get
        places = self._folders.paths(keys)
        return [
            self._look(key, place, wanted(key.rpartition(".")[2]))
            for key, place in zip(keys, places, strict=True)
        ]

    def get(self, keys: Sequence[str], locs: Pages, deadline: float) -> list[Status]:
        """Read pages; statuses by position."""
        paths = self._folders.paths(keys)
        batch = Moving(keys, paths, locs, deadline, direct=self._mover.direct)
        mover, every = self._mover, range(len(keys))
        known = self._by_name.known(batch)
        if known:
            by_name = Steps(list, partial(mover.named_chunks, batch), self._by_name.read, _nothing)
            self._move(known, batch, by_name)
        by_look = Steps(
            partial(mover.open, batch), partial(mover.chunks, batch), mover.read, partial(mover.close, batch)
        )
        self._move(batch.skipped(every) if known else every, batch, by_look)
        batch.settle(every)
        self._verdicts.acquit(
            path for path, status in zip(paths, batch.statuses, strict=True) if status is _OK
        )
        if self._budget is not None:
            self._mark(key for key, status in zip(keys, batch.statuses, strict=True) if status is _OK)
        return batch.statuses

    def set(self, keys: Sequence[str], locs: Pages, deadline: float) -> list[Status]:
        """Write the pages that are not there yet; statuses by position."""
        paths = self._folders.paths(keys)
        batch = Moving(keys, paths, locs, deadline, direct=self._mover.direct)
        statuses = batch.statuses
        first_of: dict[str, int] = {}
        absent = []
        for position, key in enumerate(keys):
            if first_of.setdefault(key, position) != position:
                continue
            place = paths[position]  # asking whether it exists costs a third of a stat that fails
            if os.access(place, os.F_OK) and self._look(key, place, locs.nbytes) is _OK:
                statuses[position] = _OK
            else:
                absent.append(position)
        if self._budget is not None:
            self._mark(key for key, position in first_of.items() if statuses[position] is _OK)
            absent = self._reserved(self._budget, absent, batch)
        mover = self._mover
        steps = Steps(
            partial(mover.make, batch),
            partial(mover.chunks, batch),
            mover.write,
            partial(mover.publish, batch),
        )
        try:
            self._move(absent, batch, steps)
        finally:
            batch.settle(absent)
            if self._budget is not None:
                self._return([p for p in absent if statuses[p] is not _OK], batch)
        if len(first_of) != len(keys):
            for position, key in enumerate(keys):
                statuses[position] = statuses[first_of[key]]
        return statuses

    def remove(self, keys: Sequence[str], deadline: float) -> list[Status]:
        """Remove files."""
        statuses, freed = [], []
        for key in keys:
            place = self._folders.path(key)
            try:
                nbytes = os.stat(place, follow_symlinks=False).st_size
                gone = unlink(place)
            except OSError as error:
                statuses.append(status_of(error))
                continue
            self._by_name.remembered.forget(place)
            statuses.append(_OK if gone else _MISS)
            if gone:
                freed.append((fan_of(key), nbytes))
        self._release(freed, deadline)
        return statuses

    def touch(self, keys: Sequence[str]) -> None:
        """Count as a use."""
        if self._budget is not None:
            self._mark(keys)

    def clear(self, deadline: float) -> int:
        """Remove every page of the namespace; what vanishes meanwhile was somebody else's clear."""
        count, freed = 0, [0] * FANS
        self._by_name.remembered.clear()
        try:
            for fan, entry in self._folders.own():
                if unlink(entry.path):
                    count += 1
                    freed[fan] += entry.nbytes
                if time.monotonic() > deadline:
                    raise BackendTimeout(
                        f"clearing the namespace {self._folders.namespace} of 'nixl'",
                        value=f"{count} pages are gone, more remain",
                        remedy="Clear again, or raise timeout_s.",
                    )
        except OSError as error:
            raise BackendUnavailable(
                f"clearing the namespace {self._folders.namespace} of 'nixl'",
                value=f"{error.strerror}: {error.filename}",
                remedy="Make the folder writable for this user.",
            ) from error
        finally:
            self._release([(fan, nbytes) for fan, nbytes in enumerate(freed) if nbytes], deadline)
        return count

    def usage(self, deadline: float) -> Usage:
        """Walk the namespace; the store's bytes come from its budget, or from a walk over all of it."""
        pages = nbytes = 0
        for _, entry in self._folders.own():
            pages += 1
            nbytes += self._page_nbytes.get(entry.path.rpartition(".")[2]) or stored_nbytes(entry)
        if self._budget is None:
            return Usage(pages, nbytes, self._folders.store_nbytes(), None)
        return Usage(pages, nbytes, self._budget.used(deadline), self._budget.capacity)

    def close(self) -> None:
        """Give everything back."""
        self._lanes.close()
        self._agents.close()
        if self._budget is not None:
            self._budget.close()

    def abandon_in_child(self) -> None:
        """Leave everything of the parent's alone in the child of a fork."""
        self._agents.leak()
        if self._budget is not None:
            self._budget.abandon_in_child()

    def _move(self, positions: Sequence[int], batch: Moving, steps: Steps) -> None:
        """Take pages through the steps; what is not begun by the deadline stays SKIPPED."""

        def drain(shared: Iterator[Sequence[int]]) -> None:
            with _Borrowed(self._agents, batch) as borrowed:
                for pages in shared:
                    borrowed.move(steps.move, pages)

        for start in range(0, len(positions), MAX_OPEN):
            part = positions[start : start + MAX_OPEN]
            try:
                pages = steps.begin(part)
                self._lanes.share(steps.cut(pages), drain, len(pages) * batch.nbytes)
            finally:  # of all of them, since an interrupted begin says nothing of what it has begun
                try:
                    steps.end(part)
                except BaseException:  # interrupted: the rest is to be ended as well
                    steps.end(part)
                    raise

    def _look(self, key: str, place: str, wanted: int | None) -> Status:
        """Judge a file by its size; by its trailer where the size tells nothing."""
        try:
            nbytes = os.stat(place, follow_symlinks=False).st_size
        except OSError as error:
            return status_of(error)
        if wanted is not None and nbytes == wanted + TRAILER_NBYTES and not self._verdicts.is_bad(place):
            return _OK
        return self._closer_look(key, place, wanted)

    def _closer_look(self, key: str, place: str, wanted: int | None) -> Status:
        self._by_name.remembered.forget(place)
        try:
            descriptor = os.open(place, _OPEN_TO_LOOK)
        except OSError as error:
            return status_of(error)
        try:
            nbytes = os.fstat(descriptor).st_size
            return self._verdicts.by_trailer(descriptor, nbytes, place, key, wanted)
        except OSError as error:
            return status_of(error)
        finally:
            os.close(descriptor)

    def _reserved(self, budget: Budget, absent: list[int], batch: Moving) -> list[int]:
        """Reserve bytes for pages; those that do not fit are NO_SPACE."""
        nbytes = self._mover.file_nbytes(batch.nbytes)
        try:
            fitting = budget.reserve([(fan_of(batch.keys[p]), nbytes) for p in absent], batch.deadline)
        except BackendTimeout:
            batch.fill(absent, Status.TIMEOUT)
            return []
        batch.fill(absent[fitting:], Status.NO_SPACE)
        return absent[:fitting]

    def _return(self, positions: list[int], batch: Moving) -> None:
        nbytes = self._mover.file_nbytes(batch.nbytes)
        self._release([(fan_of(batch.keys[p]), nbytes) for p in positions], batch.deadline)

    def _release(self, freed: list[tuple[int, int]], deadline: float) -> None:
        """Give bytes back to the budget; a lock that is not had in time leaves that to the next scan."""
        if self._budget is not None:
            with contextlib.suppress(BackendTimeout):
                self._budget.release(freed, deadline)

    def _mark(self, keys: Iterable[str]) -> None:
        """Renew last use; a file that is gone or not ours to mark is passed over."""
        path, now = self._folders.path, time.time_ns()
        for key in keys:
            with contextlib.suppress(OSError):
                os.utime(path(key), ns=(now, now), follow_symlinks=False)


def stored_nbytes(entry: Entry) -> int:
    """Give the size of the page in a file; a padded one is opened for it."""
    if entry.nbytes % BLOCK_NBYTES:
        return max(0, entry.nbytes - TRAILER_NBYTES)
    try:
        with open(entry.path, "rb") as file:
            file.seek(max(0, entry.nbytes - TRAILER_NBYTES))
            return stored_page_nbytes(file.read(TRAILER_NBYTES)) or 0
    except OSError:
        return 0


class Steps(NamedTuple):
    """What becomes of pages: begun and ended by the calling thread, moved chunk by chunk by either.

    ``end`` takes pages that were not begun or have ended, and does nothing for them.
    """

    begin: Callable[[Sequence[int]], list[int]]
    cut: Callable[[Sequence[int]], list[Sequence[int]]]
    move: Move
    end: Callable[[Sequence[int]], None]


def _nothing(_: Sequence[int]) -> None:
    """End nothing: NIXL itself closes what it has opened by name."""


class _Borrowed:
    """An agent for one lane of one batch: taken when needed, replaced when spent, given back at the end."""

    def __init__(self, agents: Agents, batch: Moving) -> None:
        self._agents = agents
        self._batch = batch
        self._agent: Agent | None = None

    def __enter__(self) -> _Borrowed:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._agent is not None:
            self._agent.spent = True  # an interrupt, say, has lost a registration that nobody can undo now
        self._give()

    def move(self, verb: Move, positions: Sequence[int]) -> None:
        """Move pages, and those that fail together once more alone; who comes to none stays SKIPPED."""
        agent = self._usable() if positions else None
        for position in verb(agent, self._batch, positions) if agent is not None else ():
            agent = self._usable()
            if agent is None:
                return
            verb(agent, self._batch, [position])

    def _usable(self) -> Agent | None:
        """Give an agent that nothing has failed on; None where there is no time or none, and say why."""
        batch = self._batch
        if time.monotonic() > batch.deadline:
            return None
        if self._agent is not None and self._agent.spent:
            self._give()
        if self._agent is None:
            try:
                self._agent = self._agents.take(batch.deadline)
            except BackendTimeout:
                return None
            except (BackendUnavailable, StorageClosed):
                batch.trouble = Status.UNAVAILABLE
        return self._agent

    def _give(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            self._agents.give(agent)
