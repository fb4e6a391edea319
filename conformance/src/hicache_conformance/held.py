"""What this process holds and a closed storage should have given back: descriptors, threads, memory, shm.

Counted before and after many rounds, so that what a library keeps once is told
apart from what each round leaves behind.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
from dataclasses import dataclass
from pathlib import Path

_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Held:
    """One count."""

    descriptors: int
    threads: int
    rss_nbytes: int

    def since(self, before: Held) -> Held:
        """Give what it is more than before."""
        return Held(
            descriptors=self.descriptors - before.descriptors,
            threads=self.threads - before.threads,
            rss_nbytes=self.rss_nbytes - before.rss_nbytes,
        )


def held() -> Held:
    """Count what this process holds now, in memory only what is in use."""
    gc.collect()
    _give_free_memory_back()
    return Held(
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        rss_nbytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


class SharedMemory:
    """The names in /dev/shm that are this process's own, among those of everybody else on the machine.

    A name is its own once it was seen open or mapped here, or if it has this process's
    id in it. Names that were there at first belong to somebody else.
    """

    def __init__(self) -> None:
        self._others = _names()
        self._own: set[str] = set()
        self._with_our_id = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")

    def look(self) -> None:
        """Remember what is open or mapped at this moment; to be called while a storage is open."""
        self._own |= _in_use() - self._others

    def left(self) -> set[str]:
        """Give the names of its own that exist."""
        fresh = _names() - self._others
        return {name for name in fresh if name in self._own or self._with_our_id.search(name)}


def _give_free_memory_back() -> None:
    """Have the C library return what is free to the kernel: a leak would hide in what earlier cases freed."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; malloc_trim(3)
    if trim is not None:
        trim(0)


def _names() -> set[str]:
    return set(os.listdir(_SHM)) if _SHM.is_dir() else set()


def _in_use() -> set[str]:
    """Give the first part below /dev/shm of every path that this process has open or mapped."""
    # address perms offset dev inode path; proc_pid_maps(5)
    lines = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    paths = {fields[5] for fields in lines if len(fields) == 6}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            paths.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # that of the listing itself, or one that another thread has closed
            continue
    prefix = f"{_SHM}/"
    return {path[len(prefix) :].partition("/")[0] for path in paths if path.startswith(prefix)}
