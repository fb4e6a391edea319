"""Where files lie: namespaces, 256 fans, and the walk over them.

    folder/<namespace, 32 hex digits>/manifest.json       readable identity, in the first folder
    folder/<namespace>/<fan, 2 hex digits>/<key>          a page and its trailer
    folder/<namespace>/<fan>/.<random>.tmp                a page on its way, renamed when whole
    folder/hicache-nixl.json                              format version; an unknown one is refused

A fan is a byte of the key's digest; fan i lies in folder i modulo the number of
folders. Nothing outside these names is ever read, counted or removed, and no
symbolic link is followed. The rename stays in one folder: across folders the
kernel takes one lock for the whole file system (and 30 % more time a page).
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from hicache_core import Namespace, Status
from hicache_core.errors import BackendIncompatible, BackendUnavailable

FANS = 256
FORMAT = 1
MARKER = "hicache-nixl.json"

#: A page on its way takes seconds; after this its writer is dead.
STALE_S = 3600.0

_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_RACES = (FileNotFoundError, NotADirectoryError)
_fan_digest = xxhash.xxh3_64_intdigest

#: errno -> what it means for one page.
STATUS_OF_ERRNO = {
    errno.ENOENT: Status.MISS,
    errno.ENOTDIR: Status.MISS,
    errno.ENOSPC: Status.NO_SPACE,
    errno.EDQUOT: Status.NO_SPACE,
    errno.EFBIG: Status.NO_SPACE,
    errno.EACCES: Status.DENIED,
    errno.EPERM: Status.DENIED,
    errno.EROFS: Status.DENIED,
    errno.ELOOP: Status.DENIED,
    errno.ETIMEDOUT: Status.TIMEOUT,
    errno.EHOSTDOWN: Status.UNAVAILABLE,
    errno.ENOTCONN: Status.UNAVAILABLE,
    errno.ESTALE: Status.MISS,
}


def status_of(error: OSError) -> Status:
    """Give the status of a page whose file met this error."""
    return STATUS_OF_ERRNO.get(error.errno or 0, Status.ERROR)


def fan_of(key: str) -> int:
    """Give a key's fan, 0 to 255."""
    return _fan_digest(key.encode()) & 0xFF


class Entry(NamedTuple):
    """A page that a walk met; compares by last use."""

    used_ns: int
    nbytes: int
    path: str


class Folders:
    """The folders of one store as one namespace sees them."""

    def __init__(self, folders: Sequence[str], namespace: Namespace) -> None:
        self.folders = tuple(folders)
        self.namespace = namespace
        self._fans = [f"{folders[fan % len(folders)]}/{namespace.id}/{fan:02x}/" for fan in range(FANS)]

    def path(self, key: str) -> str:
        """Give the file of a key."""
        return self._fans[_fan_digest(key.encode()) & 0xFF] + key

    def paths(self, keys: Iterable[str]) -> list[str]:
        """Give the files of keys; half the time of ``path`` for each."""
        fans, digest = self._fans, _fan_digest
        return [fans[digest(key.encode()) & 0xFF] + key for key in keys]

    def prepare(self) -> None:
        """Make the folders, check the store's format, and leave the readable identity.

        Raises:
            BackendUnavailable: a folder cannot be made or written.
            BackendIncompatible: the store was written by a later format.
        """
        for folder in self.folders:
            try:
                os.makedirs(f"{folder}/{self.namespace.id}", mode=0o700, exist_ok=True)
                self._check_marker(folder)
                if not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)
            except OSError as error:
                raise BackendUnavailable(
                    f"opening the folder '{folder}' of 'nixl' as user {os.geteuid()}",
                    value=f"{type(error).__name__}: {error.strerror}",
                    remedy="Make it writable for this user, or name another folder.",
                ) from error
        manifest = json.dumps(dict(self.namespace.manifest), indent=2, sort_keys=True, default=str)
        _write_once(f"{self.folders[0]}/{self.namespace.id}/manifest.json", manifest)

    def _check_marker(self, folder: str) -> None:
        path = f"{folder}/{MARKER}"
        _write_once(path, json.dumps({"format": FORMAT, "trailer": 64, "fans": FANS}))
        with open(path, encoding="utf-8") as file:
            try:
                found = json.load(file).get("format")
            except (ValueError, AttributeError):
                found = "unreadable"
        if found != FORMAT:
            raise BackendIncompatible(
                "nixl",
                f"the store in '{folder}' has format {found}, this version reads {FORMAT}",
                remedy="Install the hicache-nixl that wrote it, or name an empty folder.",
            )

    def make_fan(self, path: str) -> None:
        """Make the folder of a page's file."""
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)

    def own(self) -> Iterator[tuple[int, Entry]]:
        """Walk this namespace: (fan, entry) of each page; stale temporary files are removed on the way."""
        for fan, prefix in enumerate(self._fans):
            for entry in _pages(prefix):
                yield fan, entry

    def fan(self, fan: int) -> Iterator[Entry]:
        """Walk one fan of every namespace in every folder."""
        for folder in self.folders:
            for namespace in self._namespaces(folder):
                yield from _pages(f"{folder}/{namespace}/{fan:02x}/")

    def store_nbytes(self) -> int:
        """Sum the pages of all namespaces."""
        return sum(map(self.fan_nbytes, range(FANS)))

    def fan_nbytes(self, fan: int) -> int:
        """Sum the pages of one fan of all namespaces."""
        return sum(entry.nbytes for entry in self.fan(fan))

    @staticmethod
    def _namespaces(folder: str) -> list[str]:
        try:
            with os.scandir(folder) as found:
                inside = [each for each in found if each.is_dir(follow_symlinks=False)]
                return [each.name for each in inside if _NAMESPACE.fullmatch(each.name)]
        except OSError:
            return []


def _pages(prefix: str) -> Iterator[Entry]:
    """Walk one folder of pages; what vanishes meanwhile is left out."""
    try:
        if os.path.islink(prefix.rstrip("/")):
            return
        found = os.scandir(prefix)
    except OSError:
        return
    with found:
        for item in found:
            try:
                if not item.is_file(follow_symlinks=False):
                    continue
                stat = item.stat(follow_symlinks=False)
            except OSError:
                continue
            if item.name[0] != ".":
                yield Entry(stat.st_mtime_ns, stat.st_size, prefix + item.name)
            elif item.name.endswith(".tmp") and time.time() - stat.st_mtime > STALE_S:
                unlink(prefix + item.name)


def unlink(path: str) -> bool:
    """Remove a file; False where there was none."""
    try:
        os.unlink(path)
    except _RACES:
        return False
    return True


def _write_once(path: str, text: str) -> None:
    """Put a small file in place unless it is there."""
    if os.path.exists(path):
        return
    temporary = f"{path}.{os.urandom(8).hex()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.rename(temporary, path)
