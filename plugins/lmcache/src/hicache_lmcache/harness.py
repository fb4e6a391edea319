"""LMCacheHarness: files in a temporary folder, or values in a Redis of its own (``l2=resp``)."""

from __future__ import annotations

import contextlib
import hashlib
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
from hicache_lmcache.redis_server import RedisServer, program

_HEADER_NBYTES = 40
_ALWAYS = (
    "second_process",
    "stored_bytes",
    "store_bytes",
    "damage_flip",
    "damage_zero",
    "damage_truncate",
    "damage_lose",
)


class LMCacheHarness(BaseHarness):
    """The one that the spec names; becomes files or Redis by the options that it is given."""

    def __new__(cls, given: Mapping[str, Any] | None = None) -> LMCacheHarness:
        redis = dict(given or {}).get("l2") == "resp"
        return super().__new__(RedisHarness if redis else FolderHarness)

    def available(self) -> str | None:
        if find_spec("lmcache") is None:
            return "lmcache is not installed: pip install 'hicache-lmcache[lmcache]'"
        return None

    def stored_bytes(self, namespace: Namespace, key: str) -> bytes | None:
        value = self._read(namespace, key)
        return value if value is None else value[_HEADER_NBYTES:]

    def store_bytes(self, namespace: Namespace, key: str, value: bytes) -> None:
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        head = struct.pack("<8s16sQQ", b"HICLMC01", digest, len(value), xxhash.xxh3_64_intdigest(value))
        self._write(namespace, key, head + value)

    def damage(self, namespace: Namespace, key: str, how: Damage) -> None:
        value = self._read(namespace, key)
        if value is None:
            raise HarnessError(f"no value to damage under '{key}'")
        damaged = {
            "flip": value[:-1] + bytes([value[-1] ^ 1]),
            "zero": bytes(len(value)),
            "truncate": value[:-1],
            "lose": None,
        }[how]
        self._write(namespace, key, damaged)

    def _read(self, namespace: Namespace, key: str) -> bytes | None:
        raise NotImplementedError

    def _write(self, namespace: Namespace, key: str, value: bytes | None) -> None:
        raise NotImplementedError


class FolderHarness(LMCacheHarness):
    """Files in a temporary folder."""

    faults = frozenset(_ALWAYS)

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        self._folder: Path | None = None

    def start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hicache-lmcache-"))

    def stop(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def options(self) -> dict[str, Any]:
        return {"root": str(self._root()), **self.given}

    def _root(self) -> Path:
        if self._folder is None:
            raise HarnessError("the folder has not been made", remedy="Call start() first.")
        return self._folder

    def _file(self, namespace: Namespace, key: str) -> Path:
        name = f"hicache-{namespace.id}@0x00000000@0@{_digest(key)}.data"
        return self._root() / namespace.id / name

    def _read(self, namespace: Namespace, key: str) -> bytes | None:
        try:
            return self._file(namespace, key).read_bytes()
        except FileNotFoundError:
            return None

    def _write(self, namespace: Namespace, key: str, value: bytes | None) -> None:
        path = self._file(namespace, key)
        if value is None:
            path.unlink()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)


class RedisHarness(LMCacheHarness):
    """Values in a redis-server of its own; after a restart it is empty."""

    faults = frozenset((*_ALWAYS, "kill", "pause", "restart"))

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        self._server = RedisServer()

    def available(self) -> str | None:
        if program() is None:
            return "redis-server is not installed: apt-get install redis-server"
        return super().available()

    def start(self) -> None:
        with self._as_harness_errors():
            self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def options(self) -> dict[str, Any]:
        return {"host": "127.0.0.1", "port": self._server.port, **self.given}

    def kill(self) -> None:
        self._server.kill()

    def pause(self) -> None:
        with self._as_harness_errors():
            self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    def restart(self) -> None:
        self._server.kill()
        with self._as_harness_errors():
            self._server.boot()

    def _read(self, namespace: Namespace, key: str) -> bytes | None:
        with self._client() as client:
            value: bytes | None = client.get(_name(namespace, key))
            return value

    def _write(self, namespace: Namespace, key: str, value: bytes | None) -> None:
        with self._client() as client:
            if value is None:
                client.delete(_name(namespace, key))
            else:
                client.set(_name(namespace, key), value)

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        import redis

        client = redis.Redis(host="127.0.0.1", port=self._server.port, socket_timeout=10)
        try:
            yield client
        finally:
            client.close()

    @contextlib.contextmanager
    def _as_harness_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise HarnessError("the server did not do it", value=str(error)) from error


def _digest(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _name(namespace: Namespace, key: str) -> str:
    return f"hicache-{namespace.id}@00000000@0@{_digest(key)}"
