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

from hicache_core import HostPool, Pages, Status, Usage
from hicache_core.errors import BackendTimeout, BackendUnavailable, StorageClosed

from hicache_nixl._native import Agent
from hicache_nixl.agents import Agents
from hicache_nixl.budget import Budget
from hicache_nixl.filemoves import Mover, Moving
from hicache_nixl.folders import FANS, Folders, fan_of, status_of, unlink
from hicache_nixl.lanes import Lanes
from hicache_nixl.trailer import TRAILER_NBYTES, padded_nbytes, plain_nbytes

_OK, _MISS = Status.OK, Status.MISS
_OPEN_TO_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class FileStore:
    """The pages of one namespace in folders; thread-safe."""

    def __init__(
        self, folders: Folders, agents: Agents, budget: Budget | None, mover: Mover, lanes: Lanes
    ) -> None:
        self._folders = folders
        self._agents = agents
        self._budget = budget
        self._mover = mover
        self._lanes = lanes
        self._page_nbytes: dict[str, int] = {}

    def know(self, pools: Sequence[HostPool]) -> None:
        """Learn the page sizes that keys of these pools' components have, and register their memory."""
        self._page_nbytes = {pool.component.key: pool.component.page_nbytes for pool in pools}
        self._agents.know(pools)

    def contains(self, keys: Sequence[str], deadline: float) -> list[Status]:
        """Look at each file's size; open one only where the size is not what its component has."""
        path, stat, sizes = self._folders.path, os.stat, self._sizes()
        statuses = []
        for key in keys:
            place = path(key)
            try:
                nbytes = stat(place, follow_symlinks=False).st_size
            except OSError as error:
                statuses.append(status_of(error))
                continue
            wanted = sizes.get(key.rpartition(".")[2])
            good = wanted is not None and nbytes in wanted and not self._mover.is_bad(place)
            statuses.append(_OK if good else self._closer_look(key, place))
        return statuses

    def get(self, keys: Sequence[str], locs: Pages, deadline: float) -> list[Status]:
        """Read pages; statuses by position."""
        batch = Moving(keys, locs, deadline)
        self._move(range(len(keys)), batch, self._mover.get)
        if self._budget is not None:
            self._mark(key for key, status in zip(keys, batch.statuses, strict=True) if status is _OK)
        return batch.statuses

    def set(self, keys: Sequence[str], locs: Pages, deadline: float) -> list[Status]:
        """Write the pages that are not there yet; statuses by position."""
        batch = Moving(keys, locs, deadline)
        statuses = batch.statuses
        first_of: dict[str, int] = {}
        absent = []
        wanted = (plain_nbytes(locs.nbytes), padded_nbytes(locs.nbytes))
        for position, key in enumerate(keys):
            if first_of.setdefault(key, position) != position:
                continue
            place = self._folders.path(key)
            try:
                nbytes = os.stat(place, follow_symlinks=False).st_size
            except OSError:
                absent.append(position)
                continue
            if nbytes in wanted and not self._mover.is_bad(place):
                statuses[position] = _OK
            else:
                absent.append(position)
        if self._budget is not None:
            self._mark(key for key, position in first_of.items() if statuses[position] is _OK)
            absent = self._reserved(self._budget, absent, batch)
        self._move(absent, batch, self._mover.set)
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
            known = self._page_nbytes.get(entry.path.rpartition(".")[2])
            nbytes += entry.nbytes - TRAILER_NBYTES if known is None else known
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

    def _move(self, positions: Sequence[int], batch: Moving, verb: Callable[[Agent, Moving, Sequence[int]], None]) -> None:
        """Move pages in chunks over the lanes; what is not begun by the deadline is TIMEOUT."""
        size = self._mover.pages_a_chunk(batch.locs)
        chunks = [positions[start : start + size] for start in range(0, len(positions), size)]

        def drain(shared: Iterator[Sequence[int]]) -> None:
            agent: Agent | None = None
            try:
                for chunk in shared:
                    if agent is not None and agent.spent:
                        agent = self._agents.give(agent)
                    trouble = Status.TIMEOUT if time.monotonic() > batch.deadline else None
                    if trouble is None and agent is None:
                        agent, trouble = self._borrow(batch.deadline)
                    if agent is None or trouble is not None:
                        batch.fill(chunk, trouble or Status.UNAVAILABLE)
                    else:
                        verb(agent, batch, chunk)
            finally:
                if agent is not None:
                    self._agents.give(agent)

        self._lanes.run(chunks, drain, len(positions) * batch.locs.nbytes)

    def _borrow(self, deadline: float) -> tuple[Agent | None, Status | None]:
        try:
            return self._agents.take(deadline), None
        except BackendTimeout:
            return None, Status.TIMEOUT
        except (BackendUnavailable, StorageClosed):
            return None, Status.UNAVAILABLE

    def _sizes(self) -> dict[str, tuple[int, int]]:
        return {key: (plain_nbytes(n), padded_nbytes(n)) for key, n in self._page_nbytes.items()}

    def _closer_look(self, key: str, place: str) -> Status:
        """Judge a file whose size tells nothing by its trailer."""
        wanted = self._page_nbytes.get(key.rpartition(".")[2])
        try:
            descriptor = os.open(place, _OPEN_TO_LOOK)
        except OSError as error:
            return status_of(error)
        try:
            return self._mover.judge_by_trailer(descriptor, place, key, wanted)
        except OSError as error:
            return status_of(error)
        finally:
            os.close(descriptor)

    def _reserved(self, budget: Budget, absent: list[int], batch: Moving) -> list[int]:
        """Reserve bytes for pages; those that do not fit are NO_SPACE."""
        nbytes = self._mover.file_nbytes(batch.locs)
        try:
            fitting = budget.reserve([(fan_of(batch.keys[p]), nbytes) for p in absent], batch.deadline)
        except BackendTimeout:
            batch.fill(absent, Status.TIMEOUT)
            return []
        batch.fill(absent[fitting:], Status.NO_SPACE)
        return absent[:fitting]

    def _return(self, positions: list[int], batch: Moving) -> None:
        nbytes = self._mover.file_nbytes(batch.locs)
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
