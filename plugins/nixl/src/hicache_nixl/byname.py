"""Gets by name: pages whose checksums are remembered are read without a look at their files.

To open a file, read its trailer and close it is a third of what a get of 64 KiB
pages takes, for Python hands the interpreter lock over at each step. A page that
this process wrote or read lately needs none of it: bytes with its checksum are
the page, even where the trailer was lost meanwhile. NIXL opens such files itself
("path mode"), without that lock. A page for which that does not go well, since
its file is gone, was cut, damaged or replaced, is forgotten and left as it was
found: it is read again with a look, which tells what is the matter with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from hicache_core import Status
from hicache_nixl._native import Agent
from hicache_nixl.places import Moving
from hicache_nixl.transfers import transfer

_OK = Status.OK

#: A path and a checksum take 350 bytes, so that all of them take 23 MiB at most.
MOST: Final = 1 << 16

#: NIXL wants a number of its own for each file of a registration. As an int, which is what NIXL makes of a
#: descriptor, these are negative: a NIXL that does not know names gets EBADF and reads no file of ours.
_FIRST_NUMBER: Final = (1 << 40) + (1 << 31)


class Remembered:
    """Checksums of pages by the paths of their files; thread-safe.

    Two generations: what was not asked for while the young one filled up goes.

    Args:
        most: how many; 0 where pages cannot be read by name.
    """

    def __init__(self, most: int = MOST) -> None:
        self._generation = most // 2
        self._young: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}

    def keep(self, path: str, checksum: bytes) -> None:
        """Remember a page that was written or read well."""
        if not self._generation:
            return
        young = self._young
        young[path] = checksum
        if len(young) >= self._generation:
            self._young, self._old = {}, young

    def find(self, path: str) -> bytes | None:
        """Give the checksum that a page must have; None where it is not known."""
        checksum = self._young.get(path)
        if checksum is None:
            checksum = self._old.get(path)
            if checksum is not None:
                self.keep(path, checksum)
        return checksum

    def forget(self, path: str) -> None:
        """Forget a page; an unknown one is ignored."""
        self._young.pop(path, None)
        self._old.pop(path, None)

    def clear(self) -> None:
        """Forget all."""
        self._young, self._old = {}, {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)


class ByName:
    """Reads pages by the names of their files; thread-safe."""

    def __init__(self, remembered: Remembered) -> None:
        self.remembered = remembered

    def known(self, batch: Moving) -> list[int]:
        """Give the positions of pages that can be read so."""
        find = self.remembered.find
        known: list[int] = []
        if not (batch.on_host and len(self.remembered)):
            return known
        for position, path in enumerate(batch.paths):
            checksum = find(path)
            if checksum is not None:
                batch.wanted[position] = checksum
                known.append(position)
        return known

    def read(self, agent: Agent, batch: Moving, positions: Sequence[int]) -> Sequence[int]:
        """Read one chunk of pages; those that are not what they should be stay SKIPPED."""
        paths, wanted, remembered = batch.paths, batch.wanted, self.remembered
        numbers = range(_FIRST_NUMBER, _FIRST_NUMBER + len(positions))
        ranges = batch.ranges(positions, numbers)
        names = [
            (0, batch.nbytes, number, f"ro:{paths[position]}")
            for number, position in zip(numbers, positions, strict=True)
        ]
        if transfer(agent, "READ", batch, names, ranges):
            found = batch.checksums(positions)
        else:
            found = [b""] * len(positions)
            # Refused though the files are there: the numbers are taken, and would be for every later get.
            agent.spent = agent.spent or all(os.access(paths[position], os.R_OK) for position in positions)
        for position, checksum in zip(positions, found, strict=True):
            if checksum == wanted[position]:
                batch.statuses[position] = _OK
            else:
                remembered.forget(paths[position])
        return ()
