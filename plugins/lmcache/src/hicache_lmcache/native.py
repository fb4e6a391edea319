"""LMCache's L2 adapter, made to answer: submit, wait until the deadline, leave behind what is late.

``L2AdapterInterface`` is the surface of LMCache on which a page store can stand:
it is non-blocking, tells per key what was loaded and per task whether it was
stored, and owns no memory. (Its StorageManager stores in the background, drops
what is under way at close, and tells nobody of what failed.)

What is worked around, each shown by tests/test_defects.py (lmcache 0.5.6):

- The RESP adapter's connection is out of step after a key that is missing or
  has another size: that load, and those after it, never end or always fail. So
  only keys of the right size are asked for (ledger.py), and an adapter that
  failed once is replaced.
- It keeps addresses, not references: records are held here until it is done.
- Importing lmcache is quiet only while nothing starts its engine: no telemetry.

Facts: lmcache 0.5.6, ``v1/distributed/l2_adapters/{base,fs_l2_adapter,native_connector_l2_adapter}.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

from hicache_core.errors import BackendDependencyMissing, BackendIncompatible
from hicache_lmcache.options import LMCacheOptions
from hicache_lmcache.record import Record

VERSIONS = ((0, 5, 6), (0, 6))
_INSTALL = "Run: pip install 'hicache-lmcache[lmcache]'"
_LOG = logging.getLogger("hicache.lmcache.native")
_TALKS_AT_IMPORT = "lmcache.v1.platform._device_detect"
_TALKATIVE = ("base", "factory", "native_connector_l2_adapter")
_ADAPTERS = "lmcache.v1.distributed.l2_adapters"
#: Parts of a batch over RESP, and pages that are worth one.
_PARTS, _LEAST_PAGES = 8, 8
#: How often the pump looks although nothing rang.
_POLL_MS = 1000


class _Task:
    """One submitted call; ``records`` keep its memory until the adapter is done with it."""

    __slots__ = ("done", "records", "result")

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.done = threading.Event()
        self.result: Any = None


class Adapter:
    """One adapter of LMCache and the thread that hears its bells.

    Threads: ``load``, ``store`` and ``close`` may come from any thread.
    """

    def __init__(
        self, make: Callable[[], Any], object_key: Callable[[bytes], Any], *, parts: int = 1, least: int = 1
    ) -> None:
        self._adapter = make()
        self._object_key = object_key
        self._parts = parts
        #: Pages a part at least.
        self._least = least
        #: Set once a task failed or was left behind: use another adapter.
        self.broken = False
        self._lock = threading.Lock()
        self._loads: dict[int, _Task] = {}
        self._stores: dict[int, _Task] = {}
        self._bells = (self._adapter.get_store_event_fd(), self._adapter.get_load_event_fd())
        self._ending, self._end = os.pipe()
        self._pump = threading.Thread(target=self._hear, name="hicache-lmcache", daemon=True)
        self._pump.start()

    def load(
        self, digests: Sequence[bytes], records: Sequence[Record], deadline: float
    ) -> Iterator[list[bool] | None]:
        """Read one value into each record and tell of each, part by part, so that what has come can be used
        while LMCache moves the rest; None, the last, when there was no answer in time.
        """
        tasks = []
        for start, stop in self._split(len(digests)):
            keys = [self._object_key(digest) for digest in digests[start:stop]]
            tasks.append(_Task(records[start:stop]))
            with self._lock:
                self._loads[self._adapter.submit_load_task(keys, list(records[start:stop]))] = tasks[-1]
        for task in tasks:
            if not self._await([task], deadline):
                yield None
                return
            yield [bool(task.result.test(i)) for i in range(len(task.records))]

    def store(
        self,
        digests: Sequence[bytes],
        records: Sequence[Record],
        deadline: float,
        seal: Callable[[int, int], None] = lambda start, stop: None,
    ) -> list[bool] | None:
        """Store one value a record; False for all of a part in which one failed, None when it was late.

        Args:
            seal: fills the records of a part before LMCache gets them, while it moves those before.
        """
        tasks = []
        for start, stop in self._split(len(digests)):
            seal(start, stop)
            keys = [self._object_key(digest) for digest in digests[start:stop]]
            tasks.append(_Task(records[start:stop]))
            with self._lock:
                number = self._adapter.submit_store_task(keys, list(records[start:stop]))
                self._stores[number] = tasks[-1]
        if not self._await(tasks, deadline):
            return None
        return [bool(task.result.is_successful()) for task in tasks for _ in task.records]

    def close(self) -> None:
        """End the adapter and the pump; waits for whatever it waits for."""
        os.write(self._end, b"x")
        self._pump.join()
        os.close(self._ending)
        os.close(self._end)
        self._adapter.close()
        with self._lock:  # nothing writes into the records of tasks that never ended any more
            self._loads.clear()
            self._stores.clear()

    def _split(self, count: int) -> list[tuple[int, int]]:
        """Cut a batch into parts that LMCache moves at the same time."""
        step = max(self._least, -(-count // self._parts))
        return [(start, min(start + step, count)) for start in range(0, count, step)]

    def _await(self, tasks: Sequence[_Task], deadline: float) -> bool:
        for task in tasks:
            if not task.done.wait(max(0.0, deadline - time.monotonic())):
                self.broken = True
                return False
        return True

    def _hear(self) -> None:
        poller = select.poll()
        for bell in (*self._bells, self._ending):
            poller.register(bell, select.POLLIN)
        while True:
            rung = [fd for fd, _ in poller.poll(_POLL_MS)]
            if self._ending in rung:
                return
            for bell in rung:
                with contextlib.suppress(BlockingIOError):
                    os.read(bell, 8)
            self._settle_stores()
            self._settle_loads()

    def _settle_stores(self) -> None:
        with self._lock:
            for number, result in self._adapter.pop_completed_store_tasks().items():
                task = self._stores.pop(number)  # written down under this lock, before it could end
                task.result = result
                task.done.set()

    def _settle_loads(self) -> None:
        with self._lock:
            for number in list(self._loads):
                result = self._adapter.query_load_result(number)
                if result is not None:
                    task = self._loads.pop(number)
                    task.result = result
                    task.done.set()


def adapter_maker(options: LMCacheOptions, namespace: str, folder: str) -> Callable[[], Adapter]:
    """Load LMCache and give what makes an adapter on a namespace's values.

    Raises: BackendDependencyMissing, BackendIncompatible.
    """
    check_version()
    hush()
    try:
        object_key = key_maker(namespace)
        adapters = importlib.import_module(_ADAPTERS)
        home = importlib.import_module(f"{_ADAPTERS}.{'fs' if options.l2 == 'fs' else 'resp'}_l2_adapter")
    except ModuleNotFoundError as error:
        raise BackendDependencyMissing("lmcache", str(error.name), remedy=_INSTALL) from error
    hush(home, *(importlib.import_module(f"{_ADAPTERS}.{name}") for name in _TALKATIVE))
    if options.l2 == "fs":
        # A folder of its own for unfinished files: LMCache gives two writers of a key one temporary name.
        config = home.FSL2AdapterConfig(folder, relative_tmp_dir=f".unfinished-{os.urandom(8).hex()}")
        return lambda: Adapter(lambda: adapters.create_l2_adapter(config), object_key, parts=options.workers)
    secret = options.password.get_secret_value() if options.password else ""
    config = home.RESPL2AdapterConfig(options.host, options.port, options.workers, options.username, secret)
    # It has connections enough for one task; parts are for us, who work on one while it moves the next.
    return lambda: Adapter(
        lambda: adapters.create_l2_adapter(config), object_key, parts=_PARTS, least=_LEAST_PAGES
    )


def key_maker(namespace: str) -> Callable[[bytes], Any]:
    """Give what makes LMCache's key of a digest."""
    api = importlib.import_module("lmcache.v1.distributed.api")
    model = model_name(namespace)
    return lambda digest: api.ObjectKey(digest, model, 0)


def hush(*modules: ModuleType) -> None:
    """Keep LMCache from printing: its loggers have handlers of their own, whatever the process configured.

    Called before the first import with no module, for the line that importing
    prints. LMCACHE_LOG_LEVEL, where somebody set it, is left to do its work.
    """
    if "LMCACHE_LOG_LEVEL" in os.environ:
        return
    for name in (
        _TALKS_AT_IMPORT,
        *(name for name in logging.root.manager.loggerDict if name.startswith("lmcache")),
    ):
        logger = logging.getLogger(name)
        if _only_warnings not in logger.filters:
            logger.addFilter(_only_warnings)
    for module in modules:
        if hasattr(module, "logger"):
            module.logger = _LOG


def _only_warnings(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def model_name(namespace: str) -> str:
    """Name the model of a namespace's keys: the identity is in it, and no ``@``, LMCache's separator."""
    return f"hicache-{namespace}"


def check_version() -> None:
    """Refuse versions of LMCache that are not known.

    Raises: BackendDependencyMissing, BackendIncompatible.
    """
    try:
        found = version("lmcache")
    except Exception as error:
        raise BackendDependencyMissing("lmcache", "lmcache", remedy=_INSTALL) from error
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        raise BackendIncompatible(
            "lmcache",
            "this version of lmcache is not known",
            value=f"{found}, known are 0.5.6 and later 0.5",
            remedy=_INSTALL,
        )
