"""What `hicache doctor hf3fs` looks at besides opening a store: each trouble with its remedy."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import httpx

from hicache_core.errors import HiCacheError
from hicache_core.mounts import file_system_of, is_network
from hicache_hf3fs._schema import id_of
from hicache_hf3fs.connect import is_local_disk
from hicache_hf3fs.metadata_http import MetadataClient
from hicache_hf3fs.options import Hf3fsOptions
from hicache_hf3fs.pagefile import owner_of
from hicache_hf3fs.usrbio_client import find_mount, load_library

Row = tuple[str, "bool | None", str, str]
"""Check, whether it is well (None: a remark), what was found, what to do."""

_SERVER_S = 3.0
_NAMESPACE = "0" * 32


def checks(options: Hf3fsOptions) -> Iterator[Row]:
    """Check the root, room for a page file, the metadata, and usrbio where it is chosen."""
    yield _row("root", lambda: _root(options))
    yield _row("room", lambda: _room(options))
    yield _row("metadata", lambda: _metadata(options))
    yield from _owners(options)
    if options.client == "usrbio":
        yield _row("usrbio module", lambda: str(load_library(options.usrbio_module).__name__))
        yield _row("3FS mount", lambda: find_mount(load_library(options.usrbio_module), options.root))
        yield _row("shared memory", lambda: _shared_memory(options))
    elif file_system_of(_nearest(options.root)).startswith("fuse"):
        yield "client", None, "posix on a FUSE mount; client=usrbio goes past it where this is 3FS", ""


def _row(check: str, work: Callable[[], str]) -> Row:
    try:
        return check, True, work(), ""
    except HiCacheError as error:
        return check, False, str(error).removesuffix(error.remedy).strip(), error.remedy


def _nearest(path: str) -> str:
    """Give the path, or the nearest folder above it that exists."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _root(options: Hf3fsOptions) -> str:
    nearest = _nearest(options.root)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise HiCacheError(
            f"user {os.getuid()} may not write to {nearest!r}",
            remedy=f"Run: chown {os.getuid()} {nearest}; or name another root.",
        )
    kind = file_system_of(nearest) or "an unknown file system"
    network = is_network(nearest) if options.network is None else options.network
    state = "" if nearest == options.root else ", to be made"
    return f"{options.root} on {kind}, {'a network' if network else 'local'}{state}"


def _room(options: Hf3fsOptions) -> str:
    about = os.statvfs(_nearest(options.root))
    free = about.f_bavail * about.f_frsize
    there = [name for name in os.listdir(_nearest(options.root)) if name.endswith(".pages")]
    if not there and free < options.file_size:
        raise HiCacheError(
            "a page file does not fit",
            value=f"file_size={options.file_size} bytes, {free} free",
            remedy="Make room, or lower file_size.",
        )
    return f"{len(there)} page files, {free >> 20} MiB free"


def _metadata(options: Hf3fsOptions) -> str:
    if options.metadata_url is None:
        path = options.metadata_path or os.path.join(options.root, "metadata.sqlite")
        if not is_local_disk(path):
            raise HiCacheError(
                f"the metadata {path!r} would lie on a network file system, where sqlite is not safe",
                remedy="Set metadata_path to a local disk, or metadata_url to a server.",
            )
        return f"{path}, of this process alone"
    token = options.metadata_token.get_secret_value() if options.metadata_token else ""
    with closing(MetadataClient(options.metadata_url, _NAMESPACE, token=token)) as client:
        started = time.monotonic()
        client.check(deadline=started + _SERVER_S)
        return f"{options.metadata_url} answers in {(time.monotonic() - started) * 1e3:.1f} ms"


def _owners(options: Hf3fsOptions) -> Iterator[Row]:
    """Remark on page files whose pages another database gives out."""
    try:
        mine = _database(options)
        others = {
            name: owner
            for name in sorted(os.listdir(options.root))
            if name.endswith(".pages")
            and (owner := owner_of(os.path.join(options.root, name))) not in ("", mine)
        }
    except (OSError, sqlite3.Error, httpx.HTTPError, HiCacheError, ValueError, KeyError):
        return  # another check says what is wrong there, or there is nothing yet
    if others:
        found = ", ".join(f"{name} of {owner[:8]}" for name, owner in others.items())
        told = f"given out by another database than this one, {mine[:8] or 'not made yet'}: {found}"
        what = "they are taken over if that one is lost; if it replaced this one, name it or another root"
        yield "page files", None, f"{told}; {what}", ""


def _database(options: Hf3fsOptions) -> str:
    if options.metadata_url is None:
        path = options.metadata_path or os.path.join(options.root, "metadata.sqlite")
        return id_of(path) if os.path.exists(path) else ""
    answer = httpx.get(f"{options.metadata_url}/health", timeout=_SERVER_S, trust_env=False)
    return str(answer.json()["database"])


def _shared_memory(options: Hf3fsOptions) -> str:
    about = os.statvfs("/dev/shm")
    free = about.f_bavail * about.f_frsize
    if free < options.memory:
        raise HiCacheError(
            "/dev/shm has no room for the rings",
            value=f"memory={options.memory} bytes, {free} free",
            remedy="Lower memory, or give the container more shared memory (docker: --shm-size).",
        )
    return f"{options.memory >> 20} MiB of {free >> 20} MiB"
