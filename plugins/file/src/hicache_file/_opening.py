"""Opening a root: from options to everything that an open instance holds, or one typed error."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import pwd
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hicache_core.capabilities import Capabilities
from hicache_core.errors import (
    BackendIncompatible,
    BackendTimeout,
    BackendUnavailable,
    HiCacheError,
    InvalidOptions,
)
from hicache_core.identity import Namespace
from hicache_core.memory import HostPool
from hicache_core.storage import HiCacheStorageConfig
from hicache_file._budget import RootFile, pair_nbytes, remove_pair, scan_folder
from hicache_file._catalog import Catalog, Space
from hicache_file._epoch import EpochFile
from hicache_file._files import Folder, LockTimeout, boot_id, flock_works, is_network, write_exactly
from hicache_file._format import (
    MANIFEST_FILE,
    REMOVED,
    ROOT_FILE,
    BadHeader,
    UnknownVersion,
    unpack_root_head,
)
from hicache_file._index import ABSENT, RECORD_BITS, RECORD_MASK
from hicache_file._journal import LENGTH
from hicache_file._marks import bury, mark_records
from hicache_file._reader import Reader
from hicache_file._segment import Handles, Segment, read_header
from hicache_file._writer import Writer, WriterSettings

if TYPE_CHECKING:
    from hicache_file.options import FileOptions

_log = logging.getLogger("hicache_file")

#: A budget holds at least so many of the largest page.
PAGES_IN_CAPACITY = 16


class Opened:
    """What an open instance holds."""

    def __init__(self, config: HiCacheStorageConfig, options: FileOptions, folder: Folder) -> None:
        self.config = config
        self.options = options
        self.root_path = options.root
        self.folder = folder
        self.namespace = bytes.fromhex(config.namespace.id)
        self.boot = boot_id()
        self.network = is_network(options.root) if options.network is None else options.network
        self.capabilities = Capabilities()
        self.root: RootFile | None = None
        self.space: Space | None = None
        self.writer: Writer | None = None
        self.reader: Reader | None = None
        self.catalog: Catalog | None = None

    @property
    def checksum(self) -> bool:
        """Whether pages are summed and verified; over a network always."""
        return self.options.checksum or self.network

    @property
    def capacity(self) -> int:
        """The root's budget as last seen, 0 for none."""
        return self.root.peek().capacity if self.root is not None else 0

    @property
    def marking(self) -> bool:
        """Whether uses are counted: somebody may evict."""
        return self.writer is not None and self.writer.capacity > 0

    def attach(self) -> bool:
        """Find the namespace's folder, for a reader that opened before any writer."""
        if self.space is not None:
            return True
        try:
            folder = self.folder.folder(self.config.namespace.id)
        except FileNotFoundError:
            return False
        try:
            epoch = EpochFile.open(folder, self.namespace, writable=False)
        except FileNotFoundError:
            folder.close()
            return False
        self._take(folder, epoch)
        return True

    def _take(self, folder: Folder, epoch: EpochFile) -> None:
        handles = Handles(folder, self.options.max_open_segments, writable=self.root is not None)
        self.space = Space(folder, epoch, handles, self.namespace, self.boot)
        helper = self.writer.helper if self.writer is not None else None
        self.reader = Reader(handles, helper, checksum=self.checksum)

    def too_large(self, nbytes: int) -> bool:
        """Tell whether the budget is too small for pages of this size."""
        return self.writer is not None and 0 < self.writer.capacity < PAGES_IN_CAPACITY * nbytes

    def mark(self, catalog: Catalog, segment: Segment, numbers: np.ndarray) -> None:
        """Count uses; a mark that cannot be written is a use that is not counted."""
        try:
            mark_records(catalog, segment, numbers)
        except OSError:
            pass

    def drop_mismatched(
        self, catalog: Catalog, digests: Sequence[bytes], found: list[int], nbytes: int
    ) -> list[int]:
        """Bury values of another size, so that the set replaces them (C4); gives the places that stay."""
        places = np.array(found, np.int64)
        ordinals = places >> RECORD_BITS
        kept = list(found)
        doomed: list[int] = []
        for ordinal in dict.fromkeys(ordinals.tolist()):
            if ordinal < 0:
                continue
            positions = np.flatnonzero(ordinals == ordinal)
            lengths = self._lengths(catalog, ordinal, places[positions] & RECORD_MASK)
            for position, length in zip(positions.tolist(), lengths, strict=True):
                if length != nbytes:
                    kept[position] = ABSENT
                    if length:
                        doomed.append(position)
        if doomed and self.space is not None:
            with self.space.epoch.lock.held(self.config.timeout_s):
                bury(catalog, [digests[p] for p in doomed], [[found[p]] for p in doomed], REMOVED)
        return kept

    def _lengths(self, catalog: Catalog, ordinal: int, numbers: np.ndarray) -> list[int]:
        """Give the lengths of records of one segment, 0 for all when it is gone."""
        segment = catalog.segment(ordinal)
        if segment is None or self.space is None:
            return [0] * len(numbers)
        try:
            handle = self.space.handles.take(segment)
        except (FileNotFoundError, ValueError):
            catalog.forget(segment)
            return [0] * len(numbers)
        try:
            low, high = int(numbers.min()), int(numbers.max())
            records = catalog.records(segment, handle.idx, low, high)
            return records[numbers - low, LENGTH].tolist()
        except ValueError:
            catalog.forget(segment)
            return [0] * len(numbers)
        finally:
            self.space.handles.give(handle)

    def remove_void(self, epoch: int, timeout_s: float) -> None:
        """Unlink segments of other epochs, a few at a time so that others get the root's lock in between."""
        if self.root is None or self.space is None or self.writer is None:
            return
        self.writer.drop_void(epoch, timeout_s)
        folder = self.space.folder
        for name in scan_folder(folder).segments:
            try:
                if read_header(folder, name).epoch == epoch:
                    continue
            except FileNotFoundError:
                continue
            except BadHeader:
                pass  # nobody can read it
            except (OSError, UnknownVersion):
                continue
            with self.root.held(timeout_s) as ledger:
                ledger.begin()
                before = pair_nbytes(folder, name)
                remove_pair(folder, name)
                ledger.used += pair_nbytes(folder, name) - before
                ledger.unregister(bytes.fromhex(name))

    def books(self) -> tuple[int, int | None]:
        """Tell the root's bytes and its budget."""
        if self.root is None:
            return 0, None
        with self.root.held(self.config.timeout_s) as ledger:
            return ledger.used, ledger.capacity or None

    def close(self, timeout_s: float) -> None:
        """Seal what is open and give everything back."""
        if self.writer is not None:
            try:
                self.writer.seal(timeout_s)
            except OSError:
                pass  # whoever opens the root next finds the dead segments
            self.writer.close(timeout_s)
        if self.space is not None:
            self.space.close()
        if self.root is not None:
            self.root.close()
        self.folder.close()

    def close_in_child(self) -> None:
        """Close every descriptor in a fork's child, locks with them; take no lock (C12)."""
        if self.space is not None:
            self.space.handles.close_in_child()
            self.space.epoch.close()
            self.space.folder.close()
        if self.writer is not None:
            self.writer.evictor.close()
        if self.root is not None:
            self.root.close()
        self.folder.close()


def open_root(
    config: HiCacheStorageConfig,
    options: FileOptions,
    declared: Capabilities,
    current: Callable[[], Catalog],
) -> Opened:
    """Open, and make where it is missing, a root and a namespace in it; all undone when it fails.

    Raises:
        InvalidOptions, BackendUnavailable, BackendTimeout, BackendIncompatible.
    """
    opened: Opened | None = None
    try:
        folder = _root_folder(options)
        opened = Opened(config, options, folder)
        if options.read_only:
            _check_version(folder)
            opened.attach()
        else:
            _prepare(opened, current)
        if opened.space is not None:
            opened.catalog = Catalog(opened.space, _settled_words(opened), strict=True)
            if opened.catalog.void and opened.writer is not None:
                opened.remove_void(opened.catalog.epoch, config.timeout_s)
        opened.capabilities = _narrowed(opened, declared)
        return opened
    except BaseException as error:
        if opened is not None:
            opened.close(config.timeout_s)
        raise _typed(error, options) from error


def check_pool(capacity: int, pool: HostPool) -> None:
    """Refuse a pool whose pages the budget (0: none) is too small for.

    Raises:
        InvalidOptions: naming the least budget that works.
    """
    nbytes = pool.component.page_nbytes
    least = PAGES_IN_CAPACITY * nbytes
    if 0 < capacity < least:
        complaint = (
            f"capacity={capacity} bytes is too small for pages of {nbytes} bytes of component "
            f"'{pool.component.name}'; the least is {least} bytes ({PAGES_IN_CAPACITY} pages)"
        )
        raise InvalidOptions("file", [("capacity", complaint, "")])


def _root_folder(options: FileOptions) -> Folder:
    path = options.root
    if os.path.exists(path) and not os.path.isdir(path):
        raise InvalidOptions("file", [("root", f"root={path!r} is a file; name a folder", "")])
    if not options.read_only:
        os.makedirs(path, mode=0o700, exist_ok=True)
    return Folder.at(path)


def _check_version(folder: Folder) -> None:
    try:
        fd = folder.open(ROOT_FILE)
    except FileNotFoundError:
        return
    try:
        unpack_root_head(os.pread(fd, 64, 0))
    except BadHeader:
        pass  # a reader needs nothing of it
    finally:
        os.close(fd)


def _prepare(opened: Opened, current: Callable[[], Catalog]) -> None:
    """Open a root for writing: books, budget, namespace, writer."""
    options, config = opened.options, opened.config
    opened.root = root = RootFile.make(opened.folder, opened.boot, config.timeout_s)
    locks = not opened.network or flock_works(opened.folder, ROOT_FILE)
    if not locks and options.capacity is not None:
        raise InvalidOptions(
            "file",
            [("capacity", "capacity needs file locks, which this network file system does not offer", "")],
        )
    with root.held(config.timeout_s) as ledger:
        ledger.recount()
        if options.capacity is not None and options.capacity != ledger.capacity:
            if ledger.capacity:
                _log.info(
                    "the budget of '%s' is now %d bytes; it was %d",
                    options.root,
                    options.capacity,
                    ledger.capacity,
                )
            ledger.capacity = options.capacity
        ledger.begin()
        namespace = config.namespace
        opened.folder.make_folder(namespace.id)
        folder = opened.folder.folder(namespace.id)
        try:
            before = scan_folder(folder).nbytes
            _write_manifest(folder, manifest_json(namespace))
            epoch = EpochFile.make(folder, opened.namespace, ledger.capacity)
        except BaseException:
            folder.close()
            raise
        ledger.used += scan_folder(folder).nbytes - before
        capacity = ledger.capacity
    opened._take(folder, epoch)
    settings = WriterSettings(
        segment_nbytes=options.segment_size,
        lanes=options.lanes,
        checksum=opened.checksum,
        fsync=options.fsync,
        timeout_s=config.timeout_s,
    )
    if opened.space is not None:
        opened.writer = Writer(opened.space, root, settings, current, capacity=capacity)
        opened.reader = Reader(
            opened.space.handles,
            opened.writer.helper if options.lanes > 1 else None,
            checksum=opened.checksum,
        )


def manifest_json(namespace: Namespace) -> str:
    """Give the readable identity as it is kept beside the pages (R3)."""
    return json.dumps(
        {"namespace": namespace.id, "identity": dict(namespace.manifest)}, indent=1, sort_keys=True
    )


def _write_manifest(folder: Folder, text: str) -> None:
    if folder.size(MANIFEST_FILE):
        return
    scratch = f"{MANIFEST_FILE}.new"
    folder.remove(scratch)
    fd = folder.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_exactly(fd, text.encode(), 0)
    finally:
        os.close(fd)
    folder.rename(scratch, MANIFEST_FILE)


def _settled_words(opened: Opened) -> bytes:
    """Read the epoch file's words, healed first where they are damaged."""
    space = opened.space
    if space is None:
        raise FileNotFoundError(errno.ENOENT, "no namespace")
    try:
        space.epoch.state()
    except BadHeader:
        if opened.writer is None:
            raise OSError(errno.EIO, "the epoch file is damaged; a writer heals it") from None
        with space.epoch.lock.held(opened.config.timeout_s):
            space.epoch.settled_state(0)
    return space.epoch.words()


def _narrowed(opened: Opened, declared: Capabilities) -> Capabilities:
    """Promise no more than this root and these options allow."""
    changes: dict[str, object] = {"checksum": opened.checksum}
    if opened.writer is None:
        changes |= {"remove": False, "clear": False, "eviction": "none"}
    elif not opened.writer.capacity:
        changes["eviction"] = "none"
    if opened.network:
        changes["deadline"] = "none"
        changes["transport"] = "network file system"
        if opened.writer is not None and not flock_works(opened.folder, ROOT_FILE):
            changes |= {"shared": False, "clear": False}
    return dataclasses.replace(declared, **changes)  # type: ignore[arg-type]


def _typed(error: BaseException, options: FileOptions) -> BaseException:
    """Turn what the system said into what the user can do."""
    what = f"opening 'file': root '{options.root}'"
    if isinstance(error, HiCacheError) or not isinstance(error, (OSError, ValueError)):
        return error
    if isinstance(error, UnknownVersion):
        return BackendIncompatible(
            "file",
            f"{what} was written by another version of hicache-file",
            value=str(error),
            remedy="Update hicache-file, or name another root.",
        )
    if isinstance(error, LockTimeout):
        return BackendTimeout(
            f"{what} stays locked by another process",
            value=str(error),
            remedy="Look for a stopped process with it open (fuser), or raise timeout_s.",
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        verb = "read" if options.read_only else "written"
        return BackendUnavailable(
            f"{what} cannot be {verb} by user {_user()}",
            value=str(error),
            remedy="Give that user the folder (chown, chmod 700), name another root, or set read_only.",
        )
    return BackendUnavailable(
        f"{what} failed", value=str(error), remedy="Name a folder on a working file system."
    )


def _user() -> str:
    uid = os.geteuid()
    try:
        return f"'{pwd.getpwuid(uid).pw_name}' (uid {uid})"
    except KeyError:
        return f"uid {uid}"
