"""The counts of all processes of a host: a folder with a table each, and one file for those that ended.

A dead process's counts must stay (a counter that falls looks like a restart),
its file must not (processes come and go). So they are folded into
``ended.json``, which also names the files folded into it that may still be
there: whoever dies between writing it and removing them counts nothing twice.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hicache_core.notices import log_warning
from hicache_prometheus.cells import SUFFIX, read_file
from hicache_prometheus.snapshot import Snapshot

ENDED = "ended.json"
_LOCK = ".lock"


class Folder:
    """A folder of tables; one instance a reader, calls serialised over processes by a lock file."""

    def __init__(self, path: Path) -> None:
        """Keep the path.

        Raises:
            NotADirectoryError: there is no such folder.
        """
        if not path.is_dir():
            raise NotADirectoryError(f"{path} is no folder; make it, writable for engines and exporter")
        self.path = path

    def snapshot(self) -> Snapshot:
        """Add up every process's counts, and fold those of the dead.

        Raises:
            OSError: the folder cannot be read or written.
        """
        with self._locked():
            total, folded = self._ended()
            dead: list[Path] = []
            living = Snapshot()
            for path in sorted(self.path.glob(f"*{SUFFIX}")):
                if path.name in folded:
                    path.unlink(missing_ok=True)
                    continue
                try:
                    rows, alive = read_file(path)
                except FileNotFoundError:
                    continue
                except ValueError as error:
                    log_warning("left out: %s", error)
                    continue
                (living if alive else total).add(rows, alive=alive)
                if not alive:
                    dead.append(path)
            if dead or folded:
                self._write_ended(total, [path.name for path in dead])
            for path in dead:
                path.unlink(missing_ok=True)
        living.add(total.rows(), alive=False)
        return living

    def _ended(self) -> tuple[Snapshot, set[str]]:
        snapshot = Snapshot()
        try:
            kept = json.loads((self.path / ENDED).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return snapshot, set()
        snapshot.add(((tuple(labels), tuple(cells)) for labels, cells in kept["rows"]), alive=False)
        return snapshot, set(kept["folded"])

    def _write_ended(self, total: Snapshot, folded: list[str]) -> None:
        unfinished = self.path / f"{ENDED}.new"
        unfinished.write_text(json.dumps({"folded": folded, "rows": total.rows()}), encoding="utf-8")
        unfinished.rename(self.path / ENDED)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)
