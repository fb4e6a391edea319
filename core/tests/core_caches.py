"""A HiCache over the scripted backend, and ways to wait for what threads do."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from core_builders import a_component, a_pool, noise
from core_builders import fill as fill_page
from core_toys import SCRIPTED, Script, ScriptedStorage, ScriptOptions

from hicache_core.cache import HiCache
from hicache_core.capabilities import Capabilities
from hicache_core.factory import Loaded
from hicache_core.identity import Identity, Namespace, Placement
from hicache_core.memory import HostPool, Pages
from hicache_core.storage import HiCacheStorageConfig

#: The longest that a test waits for something that must happen.
WAIT_S = 20.0
#: What a cache allows its backend where a test waits for that to pass.
TIMEOUT_S = 0.15

#: The calls that hang in the test that runs.
_hanging: list[Hang] = []


def a_config(timeout_s: float = WAIT_S, **identity: Any) -> HiCacheStorageConfig:
    made = Identity.for_tests(**identity)
    return HiCacheStorageConfig(
        namespace=Namespace.of(made), identity=made, placement=Placement(), timeout_s=timeout_s
    )


def scripted(script: Script, capabilities: Capabilities | None = None, *, bounce: bool = False) -> Loaded:
    """Load the scripted backend under other capabilities."""
    spec = SCRIPTED if capabilities is None else _with(capabilities)
    storage_class = type("Scripted", (ScriptedStorage,), {"spec": spec})
    return Loaded(spec, storage_class, ScriptOptions(script=script, bounce=bounce), {})


def _with(capabilities: Capabilities) -> Any:
    import dataclasses

    return dataclasses.replace(SCRIPTED, capabilities=capabilities)


@contextmanager
def a_cache(
    script: Script | None = None,
    *pools: HostPool,
    capabilities: Capabilities | None = None,
    timeout_s: float | None = None,
    bounce: bool = False,
    strict: bool = False,
) -> Iterator[HiCache]:
    """Open a cache past the registry, which has tests of its own.

    Beside a call that hangs it waits TIMEOUT_S for its backend, else WAIT_S, however slow the machine is.
    """
    if timeout_s is None:
        timeout_s = TIMEOUT_S if _hanging else WAIT_S
    loaded = scripted(script or Script(), capabilities, bounce=bounce)
    cache = HiCache(loaded, a_config(timeout_s), pools)
    cache._start(strict=strict)
    try:
        yield cache
    finally:
        cache.close()


def filled(pool: HostPool, *indices: int) -> Pages:
    """Give pages whose bytes follow from their index."""
    pages = pool.pages(indices)
    for at, index in enumerate(indices):
        fill_page(pages, at, noise(index, pages.nbytes))
    return pages


def wait_until(condition: Callable[[], bool], what: str = "") -> None:
    """Wait for a condition; a test never sleeps for a time."""
    deadline = time.monotonic() + WAIT_S
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"did not come to pass: {what or condition}"
        tick.wait(0.001)


class Hang:
    """A verb that hangs until it is let go; it tells when somebody is inside."""

    def __init__(self, then: Callable[..., Any] | None = None) -> None:
        self.go = threading.Event()
        self.inside = threading.Semaphore(0)
        self.then = then
        self.left = 0
        self.entered = 0
        self._lock = threading.Lock()

    def __call__(self, proceed: Callable[[], Any], *arguments: Any) -> Any:
        with self._lock:
            self.entered += 1
        self.inside.release()
        try:
            assert self.go.wait(WAIT_S), "never let go"
            return self.then(proceed, *arguments) if self.then else proceed()
        finally:
            with self._lock:
                self.left += 1


@contextmanager
def hanging(then: Callable[..., Any] | None = None) -> Iterator[Hang]:
    """Give a verb that hangs; it is let go at the end of the block at the latest."""
    hang = Hang(then)
    _hanging.append(hang)
    try:
        yield hang
    finally:
        _hanging.remove(hang)
        hang.go.set()
        wait_until(lambda: hang.left == hang.entered, "hung calls ended")


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start work on a thread; the function given waits for its result."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - given to the waiter
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def wait() -> Any:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "still runs"
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    return wait


def in_child(check: Callable[[], bool], timeout_s: float = WAIT_S) -> str:
    """Fork, run the check in the child, and say how it went."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: forking beside threads is the point here
        pid = os.fork()
    if pid == 0:
        answer = b"hang"
        try:
            signal.alarm(int(timeout_s))  # a child that hangs ends by itself
            answer = b"ok" if check() else b"wrong"
        except BaseException as error:  # noqa: BLE001 - the parent is told
            answer = repr(error).encode()
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer.decode() or "hang"


__all__ = [
    "TIMEOUT_S",
    "WAIT_S",
    "Hang",
    "a_cache",
    "a_component",
    "a_config",
    "a_pool",
    "filled",
    "hanging",
    "in_child",
    "in_thread",
    "scripted",
    "wait_until",
]
