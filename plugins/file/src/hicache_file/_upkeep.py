"""Upkeep: which namespaces a root holds, and whether the pages of one are still what was set.

Neither is for engines, so both take their time: listing loads every namespace's
journals, verifying reads every page. Keys are not stored, only their digests,
so a page is found by its record and not by its name.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from hicache_core.capabilities import Capabilities
from hicache_core.errors import BackendUnavailable, UnsupportedOperation
from hicache_core.identity import Component, Namespace
from hicache_core.memory import Pages
from hicache_core.spec import BackendSpec
from hicache_core.status import OK, Status
from hicache_core.upkeep import NamespaceUse, Verified
from hicache_file._format import MANIFEST_FILE, REMOVED
from hicache_file._index import RECORD_BITS, RECORD_MASK
from hicache_file._journal import CHECK, LENGTH
from hicache_file._marks import bury
from hicache_file._opened import Opened
from hicache_file._reader import Plan
from hicache_file._records import read_rows

if TYPE_CHECKING:
    from hicache_file._catalog import Catalog

#: Most bytes, and pages, of a piece of verify.
_PIECE_NBYTES = 8 << 20
_PIECE_PAGES = 512
#: What says of a page that was read that it is not what was set; a disk that cannot read it is among them.
_BAD = (Status.CORRUPT, Status.ERROR)


class Verifies(Protocol):
    """What verify needs of the storage."""

    capabilities: Capabilities
    spec: ClassVar[BackendSpec]
    _gate: Any

    def _state(self) -> Opened: ...
    def _catalog(self) -> Catalog | None: ...
    def _namespace_locked(self) -> AbstractContextManager[Catalog]: ...


def narrowed(found: Capabilities) -> Capabilities:
    """Promise to verify only where there is something to compare with."""
    return dataclasses.replace(found, verify=found.checksum)


def namespaces(opened: Opened) -> list[NamespaceUse]:
    """List the root's namespaces, by their ids.

    Raises:
        BackendUnavailable: the root cannot be read.
    """
    try:
        names = sorted(filter(Namespace.pattern.fullmatch, opened.folder.names()))
        return [use for name in names if (use := _use(opened, name)) is not None]
    except OSError as error:
        raise _unavailable("listing namespaces", opened, error) from error


def _use(opened: Opened, name: str) -> NamespaceUse | None:
    """Look into one namespace as a reader would; None where it is gone, unfinished, or cannot be read."""
    manifest = _manifest(opened, name)
    config = dataclasses.replace(opened.config, namespace=Namespace(name, manifest or {}))
    reader = Opened(config, opened.options, opened.folder, opened.boot)
    try:
        if not reader.attach() or reader.space is None:
            return None
        catalog = reader.current()
        catalog.grow()
        pages, nbytes = catalog.usage()
        return NamespaceUse(
            id=name, manifest=manifest, pages=pages, bytes=nbytes, written_s=_written(reader.space.folder.fd)
        )
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    finally:
        if reader.space is not None:
            reader.space.janitor.close(opened.config.timeout_s)
            reader.space.close()


def _manifest(opened: Opened, name: str) -> dict[str, Any] | None:
    try:
        folder = opened.folder.folder(name)
        try:
            fd = folder.open(MANIFEST_FILE)
        finally:
            folder.close()
        with open(fd, encoding="utf-8") as file:
            identity = json.load(file)["identity"]
        return identity if isinstance(identity, dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _written(folder: int) -> float | None:
    """Give the time of the last write to a segment; marks of use go to the journals and do not count."""
    newest: float | None = None
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".seg"):
                try:
                    written = entry.stat(follow_symlinks=False).st_mtime
                except FileNotFoundError:
                    continue
                newest = written if newest is None else max(newest, written)
    return newest


def verify(storage: Verifies, *, remove: bool) -> Iterator[Verified]:
    """Read the namespace through; the refusals of the contract come first, at the call."""
    opened = storage._state()
    if remove and (not storage.capabilities.remove or opened.network):
        raise UnsupportedOperation(storage.spec.name, "remove damaged pages here", capability="remove")
    return _pieces(storage, opened, remove=remove)


def _pieces(storage: Verifies, opened: Opened, *, remove: bool) -> Iterator[Verified]:
    try:
        with storage._gate:
            catalog = storage._catalog()
            if catalog is None or opened.reader is None:
                return
            catalog.grow()
            with catalog.lock:
                places = np.sort(catalog.index.live_places())
        for ordinal in np.unique(places >> RECORD_BITS).tolist():
            chosen = places[places >> RECORD_BITS == ordinal]
            with storage._gate:
                rows = _rows(catalog, ordinal, chosen)
            for length in np.unique(rows[:, LENGTH]).tolist():
                same = np.flatnonzero(rows[:, LENGTH] == length)
                step = max(1, min(_PIECE_PAGES, _PIECE_NBYTES // max(length, 1)))
                for start in range(0, len(same) if length else 0, step):
                    piece = same[start : start + step]
                    with storage._gate:
                        found = _piece(storage, opened, catalog, chosen[piece], rows[piece], remove=remove)
                    yield found
    except OSError as error:
        raise _unavailable("verifying pages", opened, error) from error


def _rows(catalog: Catalog, ordinal: int, places: np.ndarray) -> np.ndarray:
    """Read the records of one segment; zeros where they are gone."""
    gone = np.zeros((len(places), 8), np.uint64)
    segment = catalog.segment(ordinal)
    if segment is None:
        return gone
    try:
        handle = catalog.space.handles.take(segment)
    except (FileNotFoundError, ValueError):
        return gone
    try:
        return read_rows(segment, handle.idx, places & RECORD_MASK)
    finally:
        catalog.space.handles.give(handle)


def _piece(
    storage: Verifies,
    opened: Opened,
    catalog: Catalog,
    places: np.ndarray,
    rows: np.ndarray,
    *,
    remove: bool,
) -> Verified:
    nbytes = int(rows[0, LENGTH])
    memory = memoryview(bytearray(nbytes * len(places)))
    component = Component("kv", shard="whole", byte_order="opaque", format="bytes", page_nbytes=nbytes)
    slots = [memory[at : at + nbytes] for at in range(0, len(memory), nbytes)]
    plan = Plan(places.tolist(), rows[:, CHECK])
    if opened.reader is not None:
        opened.reader.read(catalog, plan, Pages.of_buffers(slots, component))
    lost = set(plan.lost)
    settled = [status for at, status in enumerate(plan.statuses) if at not in lost]
    bad = [at for at, status in enumerate(plan.statuses) if status in _BAD and at not in lost]
    pages = settled.count(OK) + len(bad)
    removed = 0
    if bad and remove:
        raw = rows[:, :CHECK].tobytes()
        digests = [raw[16 * at : 16 * at + 16] for at in bad]
        with storage._namespace_locked() as present:
            done = bury(present, digests, [[plan.places[at]] for at in bad], REMOVED)
        removed = done.count(OK)
    return Verified(pages=pages, bytes=pages * nbytes, damaged=len(bad), removed=removed)


def _unavailable(what: str, opened: Opened, error: OSError) -> BackendUnavailable:
    return BackendUnavailable(
        f"{what} in '{opened.root_path}'", value=str(error), remedy="See that its file system works."
    )
