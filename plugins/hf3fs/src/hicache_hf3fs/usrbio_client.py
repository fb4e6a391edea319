"""Pages by 3FS usrbio: rings to the 3FS daemon of this host, past the mount.

The daemon moves bytes between the page file and shared memory of ours, which nobody else ever sees; the
calling thread copies between that memory and the slots. So a transfer that does not end by the deadline can
be left behind (``bounce``): its lane waits aside until its last completion has come, and only then is its
memory used again. A completion is matched by a number that no other transfer of the ring ever has, so that
a late one can never be taken for another's.

Memory and rings are bounded: ``numjobs`` lanes of ``memory / numjobs`` bytes, made on first need. A lane
has a ring a direction, is used by one call at a time (prepare is not thread-safe), and one that waits aside
counts.

Source: deepseek-ai/3FS, src/lib/api (usrbio) and its Python binding.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from hicache_core.errors import BackendDependencyMissing, BackendUnavailable, InvalidOptions
from hicache_hf3fs.options import Hf3fsOptions
from hicache_hf3fs.page_io import PageIO
from hicache_hf3fs.pagefile import PageFile
from hicache_hf3fs.usrbio_lane import Lane

#: How often a caller that waits for a lane looks whether one that was left behind has come to its end.
_LOOK_EVERY_S = 0.02

_BUILD = (
    "it is not on PyPI: build it from github.com/deepseek-ai/3FS (pip install . in a checkout, with "
    "libfuse >= 3.16.1 and clang), name your build with usrbio_module, or set client=posix"
)


class UsrbioClient:
    """A PageMover over usrbio; thread-safe.

    Raises: BackendDependencyMissing, BackendUnavailable (the root is not on 3FS).
    """

    def __init__(self, options: Hf3fsOptions) -> None:
        self._library = load_library(options.usrbio_module)
        self._mount = find_mount(self._library, options.root)
        self._most_lanes = options.numjobs
        self._entries = options.entries
        self._lane_nbytes = options.memory // options.numjobs
        self._free = threading.Condition(threading.Lock())
        self._idle: list[Lane] = []
        self._aside: list[Lane] = []
        self._made = 0
        self._closed = False

    def attach(self, file: PageFile) -> None:
        if file.label.page_nbytes > self._lane_nbytes:
            needed = self._most_lanes * file.label.page_nbytes
            complaint = (
                f"memory for {self._most_lanes} lanes (numjobs) leaves {self._lane_nbytes} bytes each, and a "
                f"page of '{file.rank}' has {file.label.page_nbytes}; set memory to {needed} or more, "
                "or numjobs lower"
            )
            raise InvalidOptions("hf3fs", [("memory", complaint, "")])
        try:
            self._library.register_fd(file.fd)
        except OSError as error:
            raise BackendUnavailable(
                f"usrbio does not take the page file {file.path!r}",
                value=error.strerror or str(error),
                remedy="Put root on the 3FS mount, or set client=posix.",
            ) from error

    def detach(self, file: PageFile) -> None:
        try:
            self._library.deregister_fd(file.fd)
        except OSError:
            pass  # it was never registered

    def read(self, file: PageFile, pages: Sequence[PageIO], *, checksum: bool, deadline: float) -> None:
        self._move(file, pages, checksum, deadline, reading=True)

    def write(self, file: PageFile, pages: Sequence[PageIO], *, checksum: bool, deadline: float) -> None:
        self._move(file, pages, checksum, deadline, reading=False)

    def close(self) -> None:
        with self._free:
            self._closed = True
            lanes, self._idle, self._aside = self._idle + self._aside, [], []
            self._free.notify_all()
        for lane in lanes:
            lane.close()

    def abandon_in_child(self) -> None:
        # The iovecs' links are the parent's: the child must never finalise them.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def _move(
        self, file: PageFile, pages: Sequence[PageIO], checksum: bool, deadline: float, *, reading: bool
    ) -> None:
        """Move a batch in rounds: as many lanes as are free, all of them in flight at once."""
        at_once = max(1, min(self._entries, self._lane_nbytes // file.label.page_nbytes))
        start = 0
        while start < len(pages):
            lanes = self._take(-(-(len(pages) - start) // at_once), deadline)
            if not lanes:
                return
            try:
                begun = []
                for lane in lanes:
                    begun.append((lane, pages[start : start + at_once]))
                    lane.begin(file, begun[-1][1], checksum, deadline, reading=reading)
                    start += at_once
                for lane, _ in begun:
                    lane.finish(checksum, deadline)
            finally:
                self._give_back(lanes)

    def _take(self, wanted: int, deadline: float) -> list[Lane]:
        """Give lanes that nobody uses, one to ``wanted``; none at the deadline or when closed."""
        with self._free:
            while not self._closed and time.monotonic() < deadline:
                self._look_aside()
                while len(self._idle) < wanted and self._made < self._most_lanes:
                    self._idle.append(Lane(self._library, self._mount, self._lane_nbytes, self._entries))
                    self._made += 1
                if self._idle:
                    return [self._idle.pop() for _ in range(min(wanted, len(self._idle)))]
                left = deadline - time.monotonic()
                self._free.wait(min(left, _LOOK_EVERY_S) if self._aside else left)
        return []

    def _give_back(self, lanes: Sequence[Lane]) -> None:
        with self._free:
            for lane in lanes:
                if self._closed or lane.broken:
                    self._made -= 1
                    lane.close()
                else:
                    (self._idle if lane.drained() else self._aside).append(lane)
            self._free.notify_all()

    def _look_aside(self) -> None:
        """Use lanes again whose last completion has come by now."""
        for lane in list(self._aside):
            if lane.drained():
                self._aside.remove(lane)
                self._idle.append(lane)
            elif lane.broken:
                self._aside.remove(lane)
                self._made -= 1
                lane.close()


def load_library(name: str) -> Any:
    """Import the usrbio module.

    Raises: BackendDependencyMissing, BackendUnavailable.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise BackendDependencyMissing("hf3fs", name, remedy=f"usrbio: {_BUILD}.") from error
    except ImportError as error:
        raise BackendUnavailable(
            f"the usrbio module '{name}' cannot be loaded", value=str(error), remedy=f"Rebuild it; {_BUILD}."
        ) from error


def find_mount(library: Any, root: str) -> str:
    """Find the 3FS mount that holds the root.

    Raises: BackendUnavailable.
    Source: extract_mount_point(path) gives None off 3FS, and raises where the path does not exist.
    """
    try:
        mount = library.extract_mount_point(root)
    except (OSError, RuntimeError) as error:
        raise BackendUnavailable(
            f"the root {root!r} is not usable",
            value=str(error),
            remedy="Mount 3FS there, and make the folder.",
        ) from error
    if not mount:
        raise BackendUnavailable(
            f"the root {root!r} does not lie on a 3FS mount",
            remedy="Name a folder on one, or set client=posix.",
        )
    return str(mount)
