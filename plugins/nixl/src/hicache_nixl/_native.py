"""NIXL behind one small class: an agent with one backend, used by one thread at a time.

What is done here and nowhere else, each for a reason seen in nixl 1.5.1: the
import leaves the process's logging alone (NIXL's own set-up closes foreign
handlers and prints to stdout); agents use sync mode RW (NONE corrupts the
heap under threads); registered regions never overlap (a smaller one hides the
larger one that holds it); a handle is released once, after its transfer has
ended, and is out of reach from then on (touching it again is SIGSEGV).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import logging
import mmap
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from types import ModuleType
from typing import Any

from hicache_core.errors import BackendDependencyMissing, BackendIncompatible, BackendUnavailable

#: nixl 1.4.1 reports DONE for short reads and is dead after one error.
LEAST_VERSION = (1, 5, 0)

#: Polls without a pause: buffered transfers have ended by then. After that pauses double up to the longest.
_SPINS = 64
_FIRST_PAUSE_S = 0.00002
_LONGEST_PAUSE_S = 0.001

Region = tuple[int, int, int]
"""address, nbytes, device number."""

Rows = Any
"""Descriptors as NIXL takes them: an array of three columns of 64 bits, or a list of tuples."""


def load(library: str) -> ModuleType:
    """Import NIXL without its changes to logging.

    Raises:
        BackendDependencyMissing: it is not installed.
        BackendIncompatible: it is too old, or cannot be loaded.
    """
    names = ("nixl_cu12", "nixl_cu13") if library == "auto" else (library,)
    imported = [name for name in names if name in sys.modules]
    for name in (*imported, *names):
        try:
            with _LoggingLeftAlone():
                module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise _broken(name, error) from error
            continue
        except ImportError as error:
            raise _broken(name, error) from error
        _check_version(name)
        return module
    raise BackendDependencyMissing(
        "nixl", names[0], remedy="Run: pip install 'hicache-nixl[cu12]' (or [cu13] beside CUDA 13)"
    )


class _LoggingLeftAlone:
    """NIXL configures logging when it is imported; within this block that does nothing.

    Source: nixl 1.5.1, ``logging.py``: dictConfig, and logging.raiseExceptions from NIXL_DEBUG_LOGGING.
    """

    def __enter__(self) -> None:
        import logging.config

        self._configure = logging.config.dictConfig
        self._raises = logging.raiseExceptions
        logging.config.dictConfig = lambda config: None

    def __exit__(self, *_: object) -> None:
        logging.config.dictConfig = self._configure
        logging.raiseExceptions = self._raises


def _check_version(module: str) -> None:
    distribution = module.replace("_", "-")
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:  # built from source: nothing to go by
        return
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < LEAST_VERSION:
        raise BackendIncompatible(
            "nixl",
            "NIXL is too old: before 1.5 a short read is reported as complete",
            value=f"{distribution} {version}",
            remedy=f"Run: pip install -U '{distribution}>=1.5.0'",
        )


def _broken(name: str, error: Exception) -> BackendIncompatible:
    return BackendIncompatible(
        "nixl",
        f"'{name}' is installed and cannot be loaded",
        value=f"{type(error).__name__}: {error}",
        remedy="Run: hicache doctor nixl",
    )


class Scratch:
    """Private memory that starts on a page boundary, all zeros."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


class TransferFailed(Exception):
    """NIXL says that a transfer failed; it does not say why."""


#: Who makes or closes an agent now: process and thread. No lock: a fork might copy it locked.
_at_work: set[tuple[int, int]] = set()
_ending = threading.Event()
_LAST_WAIT_S = 5.0


@contextlib.contextmanager
def _before_the_end() -> Iterator[bool]:
    """Make or close an agent within; False once the interpreter ends, and then do not.

    An agent of OBJ has threads of the AWS SDK. A process that exits while another thread makes or closes one
    is aborted (nixl 1.5.1: 10 times of 12), so the end waits for who is at it.
    """
    me = (os.getpid(), threading.get_ident())
    _at_work.add(me)
    try:
        yield not _ending.is_set()
    finally:
        _at_work.discard(me)


def _wait_for_others() -> None:
    """Let nobody begin any more, and wait for who has begun; at the end of the interpreter."""
    _ending.set()
    deadline = time.monotonic() + _LAST_WAIT_S
    while any(pid == os.getpid() for pid, _ in list(_at_work)) and time.monotonic() < deadline:
        time.sleep(_LONGEST_PAUSE_S)


atexit.register(_wait_for_others)


class Agent:
    """One NIXL agent with one backend and its registered memory; not thread-safe."""

    def __init__(self, nixl: ModuleType, plugin: str, parameters: Mapping[str, str]) -> None:
        """Create the agent and load the one plugin.

        Raises:
            BackendUnavailable: the plugin cannot be loaded or refuses its parameters.
        """
        self.plugin = plugin
        #: True when it ran over a deadline or failed: it is closed instead of used again.
        self.spent = False
        self._name = f"hicache-{uuid.uuid4().hex}"
        #: What register_pools was last told, as a mark for the owner.
        self.regions: object = None
        self._regions: dict[str, dict[Region, Any]] = {}
        self._next_object = 1
        self._latest: Transfer | None = None
        self._scratch: Scratch | None = None
        self._scratch_registration: Any = None
        sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        self._errors = native_errors(nixl)
        try:
            with _before_the_end() as in_time:
                if not in_time:
                    raise BackendUnavailable("'nixl' makes no agent", remedy="The interpreter ends.")
                made = nixl.nixl_agent_config(backends=[], sync_mode=sync)
                self._agent = nixl.nixl_agent(self._name, made)
                self._agent.create_backend(plugin, dict(parameters))
        except self._errors as error:
            raise BackendUnavailable(
                f"creating NIXL's '{plugin}' backend",
                value=f"{type(error).__name__}: {error}",
                remedy="Run: hicache doctor nixl",
            ) from error

    @property
    def name(self) -> str:
        """Unique name of the agent."""
        return self._name

    def register_pools(self, kind: str, regions: Iterable[Region]) -> None:
        """Make exactly these disjoint regions of DRAM or VRAM known; known ones are kept."""
        known = self._regions.setdefault(kind, {})
        wanted = set(regions)
        for region in [region for region in known if region not in wanted]:
            self._agent.deregister_memory(known.pop(region))
        for region in sorted(wanted - set(known)):
            address, nbytes, device = region
            try:
                known[region] = self._agent.register_memory([(address, nbytes, device, "")], kind)
            except self._errors as error:
                raise BackendUnavailable(
                    f"registering {nbytes} bytes of {kind} with NIXL's '{self.plugin}'",
                    value=f"{type(error).__name__}: {error}",
                    remedy="Run: hicache doctor nixl",
                ) from error

    def scratch(self, nbytes: int) -> Scratch:
        """Give private registered memory of at least this size, the same one while it is large enough."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            if self._scratch is not None:
                self._agent.deregister_memory(self._scratch_registration)
            self._scratch = Scratch(nbytes)
            rows = [(self._scratch.address, self._scratch.nbytes, 0, "")]
            self._scratch_registration = self._agent.register_memory(rows, "DRAM")
        return self._scratch

    def register(self, kind: str, rows: Rows) -> Any:
        """Register files or objects for one batch; give the result to ``forget``.

        Args:
            rows: an array of (offset, nbytes, file descriptor), or a list of them with a name.

        Raises:
            TransferFailed: NIXL refuses them; none is registered.
        """
        try:
            return self._agent.register_memory(rows, kind)
        except self._errors as error:
            raise TransferFailed(f"{type(error).__name__}: {error}") from error

    def forget(self, registration: Any) -> None:
        """Undo ``register``."""
        try:
            self._agent.deregister_memory(registration)
        except self._errors as error:
            self.spent = True
            raise TransferFailed(f"{type(error).__name__}: {error}") from error

    def next_objects(self, count: int) -> int:
        """Give the first of ``count`` device numbers not used yet: NIXL finds objects by them."""
        first, self._next_object = self._next_object, self._next_object + count
        return first

    def start(self, verb: str, local: tuple[str, Rows], remote: tuple[str, Rows]) -> Transfer:
        """Begin to move bytes; descriptors pair up one to one and lie in registered memory.

        Raises:
            TransferFailed: nothing was begun.
        """
        agent = self._agent
        try:
            mine = agent.get_xfer_descs(local[1], local[0])
            theirs = agent.get_xfer_descs(remote[1], remote[0])
            handle = agent.initialize_xfer(verb, mine, theirs, self._name)
        except self._errors as error:
            raise TransferFailed(f"{type(error).__name__}: {error}") from error
        self._latest = transfer = Transfer(agent, handle, self._errors)
        transfer.begin()
        return transfer

    @property
    def latest(self) -> Transfer | None:
        """What was begun last; who was interrupted may know nothing of it."""
        return self._latest

    def outlast(self) -> None:
        """Wait until what was begun last has ended, whatever is raised meanwhile."""
        if self._latest is not None:
            self._latest.outlast()

    def close(self) -> None:
        """Release everything; no transfer may be running.

        Under io_uring closing waits for nothing, and what runs still lands in memory; under AIO it waits
        with the interpreter lock held. Once the interpreter ends it is left as it is.
        """
        self._latest = None
        with _before_the_end() as in_time:
            if not in_time:
                self.leak()
                return
            for kind in list(self._regions):
                self.register_pools(kind, ())
            if self._scratch is not None:
                self._agent.deregister_memory(self._scratch_registration)
                self._scratch = self._scratch_registration = None
            del self._agent

    def leak(self) -> None:
        """Never run the destructor: in the child of a fork it would wait for threads that are not there."""
        agent = self.__dict__.get("_agent")
        if agent is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent))


class Transfer:
    """One transfer; ``begin`` it and ``poll`` until it has ended: then it is released, and out of reach."""

    __slots__ = ("_agent", "_errors", "_handle", "failed")

    def __init__(self, agent: Any, handle: Any, errors: tuple[type[BaseException], ...]) -> None:
        self._agent = agent
        self._handle: Any = handle
        self._errors = errors
        #: Why it failed; empty while it runs and when it went well.
        self.failed = ""

    def begin(self) -> None:
        """Let it run; once."""
        self._step(self._agent.transfer)

    @property
    def ended(self) -> bool:
        """True once nothing of it runs any more."""
        return self._handle is None

    def poll(self) -> bool:
        """Look once; True when it has ended."""
        if self._handle is not None:
            self._step(self._agent.check_xfer_state)
        return self._handle is None

    def wait(self, deadline: float, *, hold: bool) -> bool:
        """Poll until it has ended, or with ``hold`` False until the deadline; True when it ended in time."""
        spins = 0
        pause = _FIRST_PAUSE_S
        while not self.poll():
            spins += 1
            if spins < _SPINS:
                continue
            if time.monotonic() > deadline and not hold:
                return False
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)
        return spins < _SPINS or time.monotonic() <= deadline

    def outlast(self) -> None:
        """Poll until it has ended; an interrupt ends nothing, since bytes may still land in a slot."""
        while self._handle is not None:
            with contextlib.suppress(BaseException):
                self.poll()
                time.sleep(_LONGEST_PAUSE_S)

    def _step(self, verb: Any) -> None:
        try:
            state = verb(self._handle)
        except self._errors as error:
            self._end(f"{type(error).__name__}: {error}")
            return
        if state == "DONE":
            self._end("")
        elif state != "PROC":
            self._end(f"state {state}")

    def _end(self, failed: str) -> None:
        handle, self._handle = self._handle, None
        self.failed = failed
        try:
            self._agent.release_xfer_handle(handle)
        except self._errors as error:
            self.failed = failed or f"release: {type(error).__name__}: {error}"


def native_errors(nixl: ModuleType) -> tuple[type[BaseException], ...]:
    """Give the exceptions that NIXL raises; they share no base but Exception.

    Source: nixl 1.5.1, ``_bindings``: one class a status, each named nixl...Error.
    """
    bindings = sys.modules.get(f"{nixl.__name__}._bindings")
    found = [
        value
        for name, value in vars(bindings or nixl).items()
        if name.endswith("Error") and isinstance(value, type) and issubclass(value, Exception)
    ]
    return (*found, RuntimeError, ValueError)


def note(message: str, *arguments: object) -> None:
    """Log a choice that an operator may want to see."""
    logging.getLogger("hicache").info(message, *arguments)
