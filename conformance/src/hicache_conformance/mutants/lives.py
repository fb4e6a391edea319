"""Mutants that do not end as they should, or bend their process (C12, C16)."""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hicache_conformance.memory.storage import MemoryStorage
from hicache_conformance.mutants.registry import breaks
from hicache_core import BackendUnavailable, HostPool, Pages, Status


@breaks("C12", "lifecycle")
class CloseLeaksADescriptor(MemoryStorage):
    """Each open leaves a descriptor.

    Seen: SGLang's NIXL on files (sglang#21078).
    """

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        super().open(pools)
        os.open("/dev/null", os.O_RDONLY)


@breaks("C12", "lifecycle")
class CloseLeaksAThread(MemoryStorage):
    """Each open leaves a thread.

    Seen: SGLang's hf3fs and aibrix have no close, or one that passes.
    """

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        super().open(pools)
        threading.Thread(target=threading.Event().wait, args=(300,), daemon=True).start()


class _Leftovers:
    """Mapped files in /dev/shm; removed when the process ends, with those of processes that were killed."""

    _STEM = "hicache-mutant-"

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []

    def add(self) -> mmap.mmap:
        """Make and map one more; its name tells whose it is to itself alone."""
        if not self._maps:
            atexit.register(self._remove)
        path = Path("/dev/shm") / f"{self._STEM}{os.getpid():x}-{len(self._maps):x}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            self._maps.append(mmap.mmap(descriptor, mmap.PAGESIZE))
        finally:
            os.close(descriptor)
        return self._maps[-1]

    def _remove(self) -> None:
        for path in Path("/dev/shm").glob(f"{self._STEM}*"):
            pid = int(path.name.removeprefix(self._STEM).partition("-")[0], 16)
            if pid == os.getpid() or not Path(f"/proc/{pid}").exists():
                path.unlink(missing_ok=True)


_leftovers = _Leftovers()


@breaks("C12", "lifecycle")
class CloseLeavesSharedMemory(MemoryStorage):
    """Each open makes a name in /dev/shm, which close unmaps and does not remove.

    Seen: LMCache's MP connector; vLLM's offloading, once it is interrupted.
    """

    _shared: mmap.mmap | None = None

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        super().open(pools)
        self._shared = _leftovers.add()

    def close(self) -> None:
        super().close()
        if self._shared is not None:
            self._shared.close()


_kept: list[bytearray] = []


@breaks("C12", "lifecycle")
class PartialGetsLeak(MemoryStorage):
    """Each get with a miss keeps its buffer.

    Seen: SGLang's aibrix skips release() on a partial hit.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_get(keys, locs)
        if Status.MISS in statuses:
            _kept.append(bytearray(os.urandom(locs.nbytes)))
        return statuses


@breaks("C12", "lifecycle")
class ClosedAnswersMiss(MemoryStorage):
    """A closed storage goes on answering.

    Seen: SGLang's Mooncake, whose close passes; natively a crash.
    """

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        return super().batch_contains(keys) if self.is_open else [Status.MISS] * len(keys)


@breaks("C12", "lifecycle")
class SecondCloseRaises(MemoryStorage):
    """Closing twice is an error.

    Seen: handles released twice; in NIXL that crashes.
    """

    _closes = 0

    def close(self) -> None:
        super().close()
        self._closes += 1
        if self._closes > 1:
            raise BackendUnavailable("already released")


@breaks("C12", "lifecycle")
class ReopensQuietly(MemoryStorage):
    """A closed storage can be opened again, with half of its old state.

    Seen: hf3fs's re-initialise.
    """

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        if self._gate.is_closed:
            return
        super().open(pools)


@breaks("C12", "lifecycle")
class ForkedChildGoesOn(MemoryStorage):
    """The child of a fork uses the parent's connections.

    Seen: every native client that knows no fork.
    """

    def after_fork_in_child(self) -> None:
        return None


@breaks("C12", "lifecycle", match="close_while")
class CloseDoesNotWait(MemoryStorage):
    """close pulls the store from under a running verb.

    Seen: Mooncake, where any call after close is a SIGSEGV.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        statuses = super().batch_get(keys, locs)
        for _ in range(20):
            threading.Event().wait(0.0005)
            if not self.is_open:
                raise RuntimeError("the store has gone")
        return statuses

    def close(self) -> None:
        self._gate.close(0.001)
        self._release()


@breaks("C16", "lifecycle")
class TakesSignals(MemoryStorage):
    """SIGINT and SIGTERM are taken over.

    Seen: SGLang's hf3fs, SIGQUIT too; off the main thread a ValueError.
    """

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        super().open(pools)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


@breaks("C16", "lifecycle")
class WritesTheEnvironment(MemoryStorage):
    """Settings are passed through the environment.

    Seen: SGLang's SiMM; Mooncake's MC_ variables.
    """

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        super().open(pools)
        os.environ["MEMORY_SERVER"] = str(self.options.server)


@breaks("C16", "lifecycle")
class ConfiguresLogging(MemoryStorage):
    """The root logger gets a handler and a level.

    Seen: libraries that call basicConfig when imported.
    """

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        super().open(pools)
        logging.basicConfig(level=logging.DEBUG)


@breaks("C16", "lifecycle")
class Prints(MemoryStorage):
    """It prints.

    Seen: a dozen backends.
    """

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        print(f"get {len(keys)} pages")  # noqa: T201 - that is the mutation
        return super().batch_get(keys, locs)


@breaks("C16", "lifecycle")
class PrintsNatively(MemoryStorage):
    """Its native library writes to descriptor 1.

    Seen: progress lines of native clients.
    """

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        os.write(1, b"set\n")
        return super().batch_set(keys, locs)


@breaks("C16", "lifecycle", match="c16")
class RegistersAtExit(MemoryStorage):
    """Each instance leaves an exit handler.

    Seen: SGLang's hf3fs.
    """

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        super().open(pools)
        atexit.register(self.close)
