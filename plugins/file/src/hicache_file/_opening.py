"""Opening a root: from options to everything that an open instance holds, or one typed error."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import pwd
from typing import TYPE_CHECKING

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
from hicache_file._budget import Ledger, RootFile
from hicache_file._epoch import EpochFile
from hicache_file._files import Folder, LockTimeout, boot_id, flock_works, write_exactly
from hicache_file._format import (
    EPOCH_FILE,
    MANIFEST_FILE,
    ROOT_FILE,
    BadHeader,
    UnknownVersion,
    unpack_root_head,
)
from hicache_file._opened import PAGES_IN_CAPACITY, Opened
from hicache_file._writer import Writer, WriterSettings

if TYPE_CHECKING:
    from hicache_file.options import FileOptions

_log = logging.getLogger("hicache_file")


def open_root(config: HiCacheStorageConfig, options: FileOptions, declared: Capabilities) -> Opened:
    """Open, and make where it is missing, a root and a namespace in it; all undone when it fails.

    Raises:
        InvalidOptions, BackendUnavailable, BackendTimeout, BackendIncompatible.
    """
    opened: Opened | None = None
    try:
        folder = _root_folder(options)
        opened = Opened(config, options, folder, boot_id())
        if options.read_only:
            _check_version(folder)
            opened.attach()
        else:
            _prepare(opened)
            catalog = opened.follow()
            if catalog.void:
                opened.remove_void(catalog.epoch, config.timeout_s)
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


def _prepare(opened: Opened) -> None:
    """Open a root for writing: books, budget, namespace, writer."""
    options, config = opened.options, opened.config
    opened.root = root = RootFile.make(opened.folder, opened.boot, config.timeout_s)
    locks = not opened.network or flock_works(opened.folder, ROOT_FILE)
    if not locks and options.capacity is not None:
        complaint = "capacity needs file locks, which this network file system does not offer"
        raise InvalidOptions("file", [("capacity", complaint, "")])
    with root.held(config.timeout_s) as ledger:
        ledger.recount()
        _set_budget(ledger, options)
        folder, epoch = _make_namespace(opened, ledger)
        capacity = ledger.capacity
    settings = WriterSettings(
        segment_nbytes=options.segment_size,
        lanes=options.lanes,
        checksum=opened.checksum,
        fsync=options.fsync,
        network=opened.network,
        timeout_s=config.timeout_s,
    )
    space = opened.take(folder, epoch)
    opened.writer = Writer(
        space, root, settings, known=opened.known, current=opened.current, capacity=capacity
    )


def _set_budget(ledger: Ledger, options: FileOptions) -> None:
    """Let an explicit budget replace the stored one (R5)."""
    if options.capacity is None or options.capacity == ledger.capacity:
        return
    if ledger.capacity:
        told = (options.root, options.capacity, ledger.capacity)
        _log.info("the budget of '%s' is now %d bytes; it was %d", *told)
    ledger.capacity = options.capacity


def _make_namespace(opened: Opened, ledger: Ledger) -> tuple[Folder, EpochFile]:
    namespace = opened.config.namespace
    ledger.begin()
    opened.folder.make_folder(namespace.id)
    folder = opened.folder.folder(namespace.id)
    try:
        before = folder.size(MANIFEST_FILE) + folder.size(EPOCH_FILE)
        _write_manifest(folder, manifest_json(namespace))
        epoch = EpochFile.make(folder, opened.namespace, ledger.capacity)
        ledger.used += folder.size(MANIFEST_FILE) + folder.size(EPOCH_FILE) - before
        return folder, epoch
    except BaseException:
        folder.close()
        raise


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
