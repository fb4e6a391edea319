"""AibrixHarness: a RocksDB or a shared folder, in a temporary place.

Values are read and damaged round the backend: SHFS's as files. RocksDB admits
one owner: an open store is reached through the handle that this process holds,
a closed one through rocksdict.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from hicache_conformance.harness import BaseHarness, Damage, HarnessError
from hicache_core import Namespace

_TRAILER_NBYTES = 40
_DAMAGES = ("damage_flip", "damage_zero", "damage_truncate", "damage_lose")

#: RocksDB's contains cannot tell a value's size, and nothing but this harness would store one without bytes.
_WITH_FILES = ("second_process", "store_bytes")


class AibrixHarness(BaseHarness):
    """One folder; ``backend=shfs`` chooses files, and only those can be opened by a second process."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        self._shfs = self.given.get("backend") == "shfs"
        self.faults = frozenset(("stored_bytes", *_DAMAGES, *(_WITH_FILES if self._shfs else ())))
        self._folder: Path | None = None

    def available(self) -> str | None:
        if find_spec("aibrix_kvcache") is None:
            return "aibrix_kvcache is not installed: pip install 'hicache-aibrix[aibrix]'"
        return None

    def start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hicache-aibrix-"))

    def stop(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def options(self) -> dict[str, Any]:
        return {"root": str(self._root()), **self.given}

    def stored_bytes(self, namespace: Namespace, key: str) -> bytes | None:
        value = self._read(namespace, key)
        return value if value is None else value[:-_TRAILER_NBYTES]

    def store_bytes(self, namespace: Namespace, key: str, value: bytes) -> None:
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        head = struct.pack("<8s16sQQ", b"HICAIBX1", digest, len(value), xxhash.xxh3_64_intdigest(value))
        self._write(namespace, key, value + head)

    def damage(self, namespace: Namespace, key: str, how: Damage) -> None:
        value = self._read(namespace, key)
        if value is None:
            raise HarnessError(f"no value to damage under '{key}'")
        damaged = {
            "flip": bytes([value[0] ^ 1]) + value[1:],
            "zero": bytes(len(value)),
            "truncate": value[:-1],
            "lose": None,
        }[how]
        self._write(namespace, key, damaged)

    def _root(self) -> Path:
        if self._folder is None:
            raise HarnessError("the folder has not been made", remedy="Call start() first.")
        return self._folder

    def _place(self, namespace: Namespace) -> Path:
        """Give a namespace's folder: the library adds heads, layers, layout, block size and key builder."""
        return self._root() / f"hicache-{namespace.id}_h0_0_l0_0_ncld1rawc"

    def _read(self, namespace: Namespace, key: str) -> bytes | None:
        name = _name(key)
        if not self._shfs:
            with self._rocksdb(namespace) as store:
                return store.get(name)
        try:
            return self._file(namespace, name).read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, namespace: Namespace, key: str, value: bytes | None) -> None:
        name = _name(key)
        if not self._shfs:
            with self._rocksdb(namespace) as store:
                store.delete(name) if value is None else store.put(name, value)
            return
        path = self._file(namespace, name)
        if value is None:
            path.unlink()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)

    def _file(self, namespace: Namespace, name: bytes) -> Path:
        digits = name.hex()
        return self._place(namespace) / digits[:2] / digits[2:4] / digits

    @contextlib.contextmanager
    def _rocksdb(self, namespace: Namespace) -> Iterator[Any]:
        from hicache_aibrix.library import store_of

        place = str(self._place(namespace))
        store = store_of(os.path.dirname(place), namespace.id)
        if store is not None:
            yield store
            return
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.set_wal_dir(os.path.join(place, "wal"))
        store = rocksdict.Rdict(place, options, access_type=rocksdict.AccessType.read_write())
        try:
            yield store
        finally:
            store.close()


def _name(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest().encode()
