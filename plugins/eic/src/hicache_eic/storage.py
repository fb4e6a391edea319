"""EICStorage: pages in EIC (Elastic Instant Cache).

A page is one value, a head and its bytes (record.py), under ``{namespace}/{key}`` in EIC's own namespace
``eic_namespace``. EIC's calls block without a limit, so they run on worker threads with private memory
(workers.py) and the calling thread copies (``bounce``). EIC replaces on set; a set here asks first, and
leaves alone what is there. What EIC cannot tell, which keys a namespace has, a catalogue in EIC tells
(catalog.py).

Facts: the surface of `eic` as open code uses it; native.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from ctypes import py_object, pythonapi
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import TypeVar

from hicache_core.bounce import run_apart
from hicache_core.buffers import address_of
from hicache_core.errors import BackendTimeout, BackendUnavailable, InvalidOptions
from hicache_core.memory import HostPool, Pages
from hicache_core.status import OK, Status
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig, Usage
from hicache_eic.affinity import near_interfaces
from hicache_eic.catalog import CHUNK_NBYTES, PATH_LENGTH, Writer, everything
from hicache_eic.native import Native, connect, load
from hicache_eic.options import EicOptions
from hicache_eic.record import FRAME_NBYTES, blank_head, copy_in, copy_out, judge, write_head
from hicache_eic.remembered import Remembered
from hicache_eic.shelf import Shelf, raise_trouble
from hicache_eic.spec import SPEC
from hicache_eic.workers import Memory, Worker, Workers, stride_of

T = TypeVar("T")

#: Connecting that was left behind, by url: so many threads that hang, and no more, for all storages of a url.
_CONNECTING: dict[str, list[Thread]] = {}

_BAD = (Status.CORRUPT, Status.SIZE_MISMATCH)


class EICStorage(HiCacheStorage):
    """Pages of one namespace in EIC; see the module's text."""

    spec = SPEC
    options: EicOptions

    def __init__(self, config: HiCacheStorageConfig, options: EicOptions) -> None:
        super().__init__(config, options)
        self._workers: Workers | None = None
        self._bad = Remembered()
        self._odd = Remembered()

    # Life.

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        self._gate.check_new()
        options: EicOptions = self.options
        for pool in pools:
            self._check_fits(pool.component.page_nbytes)
        module = load(options)
        interfaces = ""
        if options.nic_affinity:
            interfaces = near_interfaces(self.config.placement.device, options.gpu_nics, options.cpu_nics)
        timeout_s = self.config.timeout_s
        native = run_apart(
            lambda: connect(module, options, interfaces),
            timeout_s,
            what=f"connecting to EIC at {options.url}",
            left_behind=_CONNECTING.setdefault(options.url, []),
        )
        workers = Workers(native, options.workers, options.staging)
        try:
            self._workers = workers
            self._see_that_it_answers()
        except BaseException:
            self._workers = None
            workers.close()
            raise
        self.capabilities = replace(
            self.capabilities,
            eviction="none" if options.ttl_s is None else "ttl",
            transport=f"EIC transport {options.transport_type}",
        )
        super().open(pools)

    def add_pool(self, pool: HostPool) -> None:
        with self._gate:
            self._check_fits(pool.component.page_nbytes)
            super().add_pool(pool)

    def close(self) -> None:
        self._drain()
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def after_fork_in_child(self) -> None:
        super().after_fork_in_child()
        # The client's connections are the parent's: the child must never finalise them.
        pythonapi.Py_IncRef(py_object(self._workers))
        self._workers = None

    # Verbs.

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            if not keys:
                return []
            names, deadline = self._names(keys), self._deadline()
            statuses = self._answered(
                len(keys), lambda: self._call(lambda eic, _: eic.exist(names, deadline), deadline)
            )
            return [
                Status.MISS if status is OK and key in self._bad else status
                for key, status in zip(keys, statuses, strict=True)
            ]

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs, writes_slots=True)
            statuses = self._in_calls(keys, locs, self._get)
            self._bad.note(keys, statuses, _BAD)
            return statuses

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        with self._gate:
            self._check(keys, locs)
            first: dict[str, int] = {}
            for position, key in enumerate(keys):
                first.setdefault(key, position)
            names, positions = list(first), list(first.values())
            statuses = self._in_calls(names, locs.take(positions), self._set)
            self._bad.note(names, statuses, ())
            outcome = dict(zip(names, statuses, strict=True))
            return [outcome[key] for key in keys]

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            if not keys:
                return []
            once, deadline = list(dict.fromkeys(keys)), self._deadline()
            names = self._names(once)
            statuses = self._answered(
                len(once), lambda: self._call(lambda eic, _: eic.delete(names, deadline), deadline)
            )
            outcome = dict(zip(once, statuses, strict=True))
            return [outcome.pop(key, Status.MISS) for key in keys]

    def clear(self) -> int:
        with self._gate:
            deadline = self._deadline()
            return self._call(lambda eic, worker: self._clear(eic, worker, deadline), deadline)

    def usage(self) -> Usage:
        with self._gate:
            deadline = self._deadline()
            return self._call(lambda eic, worker: self._usage(eic, worker, deadline), deadline)

    # How a batch goes: in calls of as many pages as fit a worker's memory.

    def _in_calls(
        self,
        keys: Sequence[str],
        locs: Pages,
        move: Callable[[Sequence[str], Pages, float], list[Status]],
    ) -> list[Status]:
        deadline = self._deadline()
        at_once = min(self.options.max_keys, self.options.staging // stride_of(FRAME_NBYTES + locs.nbytes))
        if not at_once:
            return [Status.ERROR] * len(keys)  # loose buffers; a pool of such pages was refused
        statuses: list[Status] = []
        for start in range(0, len(keys), at_once):
            part = keys[start : start + at_once]
            work = partial(move, part, locs[start : start + at_once], deadline)
            found = self._answered(len(part), work)
            statuses += found
            if set(found) <= {Status.TIMEOUT, Status.UNAVAILABLE}:
                return statuses + [found[0]] * (len(keys) - len(statuses))
        return statuses

    def _get(self, keys: Sequence[str], locs: Pages, deadline: float) -> list[Status]:
        workers = self._open_workers
        with workers.lent(deadline) as worker:
            values = worker.memory.values(len(keys), FRAME_NBYTES + locs.nbytes)
            for view, _ in values:
                blank_head(view)
            names, buffers = self._names(keys), [buffer for _, buffer in values]
            registered = worker.memory.registered
            statuses = workers.run(
                worker, lambda eic: eic.get(names, buffers, registered, deadline), deadline
            )
            for position, (view, _) in enumerate(values):
                if statuses[position] is OK:
                    statuses[position] = judge(view, names[position])
                if statuses[position] is OK:
                    copy_out(view, locs.views(position))
        return statuses

    def _set(self, keys: Sequence[str], locs: Pages, deadline: float) -> list[Status]:
        # A key says its component, and with it the page's size; where it is another one, the size must be
        # looked at.
        own = f".{locs.component.key}"
        odd = {key for key in keys if not key.endswith(own)}
        self._odd.add(odd)
        odd |= {key for key in keys if key in self._odd}
        workers = self._open_workers
        with workers.lent(deadline) as worker:
            values = worker.memory.values(len(keys), FRAME_NBYTES + locs.nbytes)
            for position, (name, (view, _)) in enumerate(zip(self._names(keys), values, strict=True)):
                copy_in(locs.views(position), view)
                write_head(view, name)
            buffers = [buffer for _, buffer in values]
            job = partial(self._store, worker, keys, buffers, odd, deadline)
            return workers.run(worker, job, deadline)

    # On a worker's thread.

    def _store(
        self,
        worker: Worker,
        keys: Sequence[str],
        buffers: Sequence[tuple[int, int]],
        odd: set[str],
        deadline: float,
        eic: Native,
    ) -> list[Status]:
        """Store the pages that are not there; their entries in the catalogue go with them."""
        shelf = self._shelf(worker, eic)
        statuses, slot_is_there = self._there(eic, shelf, keys, buffers, odd, deadline)
        missing = [position for position, status in enumerate(statuses) if status is Status.MISS]
        if not missing:
            return statuses
        nbytes = buffers[0][1] - FRAME_NBYTES
        records = shelf.writer.add(
            [keys[position] for position in missing],
            nbytes,
            slot_is_there=slot_is_there,
            exist=lambda names: eic.exist(names, deadline),
            fetch=lambda names, size: shelf.fetch(eic, names, size, deadline),
        )
        names = [record.name for record in records] + self._names([keys[position] for position in missing])
        places = shelf.place(records) + [buffers[position] for position in missing]
        registered = worker.memory.registered and shelf.control.registered
        outcome = eic.set(names, places, registered, deadline)
        entered, stored = outcome[: len(records)], outcome[len(records) :]
        if set(entered) == {OK}:
            shelf.writer.stored(lambda doomed: eic.delete(doomed, deadline))
        else:
            # A page that the catalogue does not list would survive a clear. One that this call did not store
            # may be somebody else's by now.
            own = [name for name, status in zip(names[len(records) :], stored, strict=True) if status is OK]
            eic.delete(own, deadline)
            trouble = next(status for status in entered if status is not OK)
            stored = [trouble] * len(missing)
        for position, status in zip(missing, stored, strict=True):
            statuses[position] = status
        return statuses

    def _there(
        self,
        eic: Native,
        shelf: Shelf,
        keys: Sequence[str],
        buffers: Sequence[tuple[int, int]],
        odd: set[str],
        deadline: float,
    ) -> tuple[list[Status], bool]:
        """Tell which keys need no set: OK; and whether the catalogue's slot is in place."""
        names = self._names(keys)
        statuses = eic.exist(names + shelf.writer.path, deadline)
        slot_is_there = set(statuses[len(keys) :]) == {OK}
        del statuses[len(keys) :]
        for position, key in enumerate(keys):
            if statuses[position] is not OK:
                continue
            if key in self._bad or (
                key in odd and not _holds(eic, names[position], buffers[position][1], deadline)
            ):
                statuses[position] = Status.MISS
        return statuses, slot_is_there

    def _clear(self, eic: Native, worker: Worker, deadline: float) -> int:
        entries, closed = self._catalog(eic, worker, deadline)
        found = eic.delete(self._names(list(entries)), deadline)
        raise_trouble(found)
        eic.delete(closed, deadline)
        return found.count(OK)

    def _usage(self, eic: Native, worker: Worker, deadline: float) -> Usage:
        entries, _ = self._catalog(eic, worker, deadline)
        found = eic.exist(self._names(list(entries)), deadline)
        raise_trouble(found)
        sizes = [size for size, status in zip(entries.values(), found, strict=True) if status is OK]
        return Usage(len(sizes), sum(sizes), sum(sizes) + len(sizes) * FRAME_NBYTES, None)

    def _catalog(self, eic: Native, worker: Worker, deadline: float) -> tuple[dict[str, int], list[str]]:
        shelf = self._shelf(worker, eic)

        def exist(names: Sequence[str]) -> list[Status]:
            statuses = eic.exist(names, deadline)
            raise_trouble(statuses)
            return statuses

        def fetch(names: Sequence[str], nbytes: int) -> list[bytes | None]:
            return shelf.fetch(eic, names, nbytes, deadline)

        return everything(self.config.namespace, exist, fetch)

    def _shelf(self, worker: Worker, eic: Native) -> Shelf:
        if worker.luggage is None:
            records = self.options.max_keys // 32 + 2 + PATH_LENGTH
            worker.luggage = Shelf(
                Writer(self.config.namespace, expires=self.options.ttl_s is not None),
                Memory(eic, records * stride_of(CHUNK_NBYTES)),
            )
        shelf: Shelf = worker.luggage
        return shelf

    # Helpers.

    def _call(self, work: Callable[[Native, Worker], T], deadline: float) -> T:
        """Do something on a worker; raises BackendTimeout, BackendUnavailable."""
        workers = self._open_workers
        with workers.lent(deadline) as worker:
            return workers.run(worker, lambda eic: work(eic, worker), deadline)

    def _answered(self, count: int, work: Callable[[], list[Status]]) -> list[Status]:
        try:
            return work()
        except BackendTimeout:
            return [Status.TIMEOUT] * count
        except BackendUnavailable:
            return [Status.UNAVAILABLE] * count

    def _see_that_it_answers(self) -> None:
        deadline = self._deadline()
        name = self.config.namespace.qualify("~")
        raise_trouble(self._call(lambda eic, _: eic.exist([name], deadline), deadline))

    def _check_fits(self, page_nbytes: int) -> None:
        needed = stride_of(FRAME_NBYTES + page_nbytes)
        if needed > self.options.staging:
            complaint = (
                f"staging={self.options.staging} bytes holds no page; the least here is {needed} bytes"
            )
            raise InvalidOptions("eic", [("staging", complaint, "")])

    def _names(self, keys: Sequence[str]) -> list[str]:
        return list(map(self.config.namespace.qualify, keys))

    @property
    def _open_workers(self) -> Workers:
        if self._workers is None:
            raise BackendUnavailable("'eic' has no client", remedy="Open it again.")
        return self._workers

    def _deadline(self) -> float:
        return time.monotonic() + self.config.timeout_s


def _holds(eic: Native, name: str, nbytes: int, deadline: float) -> bool:
    """True where a value is a whole page of this size; it has to be fetched for that."""
    value = memoryview(bytearray(nbytes))
    statuses = eic.get([name], [(address_of(value), nbytes)], False, deadline)
    return statuses == [OK] and judge(value, name) is OK
