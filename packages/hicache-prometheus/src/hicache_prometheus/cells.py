"""A table of counters in one piece of memory: of the process, or mapped from a file that others read.

A row is a text (its labels, as JSON) and 48 unsigned 64-bit cells. A cell is
added to in place, so counting costs the same in both kinds of memory, needs no
thread and no flush, and a process that is killed leaves its last count behind.

The file: a header of one row (magic, layout), then the rows. A row's first
words are its generation (odd while its labels change) and the length of its
labels; who reads it from another process takes a row only if the generation was
even and the same before and after. The writer holds a flock on the file for as
long as it lives; a file without one belongs to a dead process.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

MAGIC = b"HICACHE-CELLS-1\n"
SUFFIX = ".cells"

#: Rows of a table. A backend and namespace take about five; what does not fit replaces what nobody uses.
ROWS = 512
ROW_NBYTES = 1024
CELLS = 48
_WORD = 8
_LABELS_AT = 2 * _WORD
_CELLS_AT = ROW_NBYTES - CELLS * _WORD
#: Bytes that a row's labels may take.
MAX_LABELS_NBYTES = _CELLS_AT - _LABELS_AT

Labels = tuple[str, ...]


class Table:
    """Rows of counters; one writer, who serialises its calls; any number of readers."""

    def __init__(self, folder: Path | None = None) -> None:
        """Map a new file in ``folder``, or take private memory.

        Raises:
            OSError: the file cannot be made.
        """
        nbytes = ROW_NBYTES * (ROWS + 1)
        self.path: Path | None = None
        self._lock_fd = -1
        if folder is None:
            self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self.path = folder / f"{os.getpid()}-{os.urandom(8).hex()}{SUFFIX}"
            self._lock_fd, self._memory = _new_file(self.path, nbytes)
        self._words = memoryview(self._memory).cast("Q")

    def row(self, number: int) -> memoryview:
        """Give the cells of a row, to add to."""
        start = (number + 1) * ROW_NBYTES + _CELLS_AT
        return self._words[start // _WORD : start // _WORD + CELLS]

    def label(self, number: int, labels: Sequence[str]) -> memoryview:
        """Zero a row, give it these labels, and return its cells."""
        start = (number + 1) * ROW_NBYTES
        word = start // _WORD
        text = _fitting(labels)
        self._words[word] |= 1
        cells = self.row(number)
        cells[:] = memoryview(bytes(CELLS * _WORD)).cast("Q")
        self._memory[start + _LABELS_AT : start + _LABELS_AT + len(text)] = text
        self._words[word + 1] = len(text)
        self._words[word] += 1
        return cells

    def leave_to_parent(self) -> None:
        """In the child of a fork: let go of the file, whose lock must end with its owner."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def rows(self) -> Iterator[tuple[Labels, tuple[int, ...]]]:
        """Give every row in use: its labels and a copy of its cells."""
        return read_rows(memoryview(self._memory))


def _new_file(path: Path, nbytes: int) -> tuple[int, mmap.mmap]:
    """Make a whole, locked file and only then give it its name, so that nobody takes it for a dead one."""
    unfinished = path.with_suffix(".new")
    fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # a write to a mapping without room kills the process
        memory = mmap.mmap(fd, nbytes)
        memory[: len(MAGIC)] = MAGIC
        # On a descriptor of its own: the mapping keeps a copy of the other, and with it would keep the lock.
        lock = os.open(unfinished, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return lock, memory


def read_rows(memory: memoryview) -> Iterator[tuple[Labels, tuple[int, ...]]]:
    """Give the rows of a table's memory; a row that is just being changed is left out."""
    words = memory.cast("Q")
    for number in range(ROWS):
        start = (number + 1) * ROW_NBYTES
        word = start // _WORD
        generation, length = words[word], words[word + 1]
        if not length or generation & 1 or length > MAX_LABELS_NBYTES:
            continue
        text = bytes(memory[start + _LABELS_AT : start + _LABELS_AT + length])
        first = (start + _CELLS_AT) // _WORD
        cells = tuple(words[first : first + CELLS])
        if words[word] == generation:
            yield tuple(json.loads(text)), cells


def read_file(path: Path) -> tuple[list[tuple[Labels, tuple[int, ...]]], bool]:
    """Read another process's table; also tell whether that process still lives.

    Raises:
        OSError: the file is gone, or cannot be read.
        ValueError: it is no table of this layout.
    """
    with path.open("rb") as file:
        alive = _is_locked(file.fileno())
        content = file.read(ROW_NBYTES * (ROWS + 1))
    if len(content) != ROW_NBYTES * (ROWS + 1) or not content.startswith(MAGIC):
        raise ValueError(f"{path} is no table of counters of this version")
    return list(read_rows(memoryview(content))), alive


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _fitting(labels: Sequence[str]) -> bytes:
    """Encode labels; all are cut to the same length where they would not fit."""
    longest = MAX_LABELS_NBYTES
    while len(text := json.dumps([label[:longest] for label in labels]).encode()) > MAX_LABELS_NBYTES:
        longest = longest * 3 // 4
    return text
