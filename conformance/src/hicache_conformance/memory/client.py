"""RemoteStore: the verbs of store.py over a socket, each within a deadline.

A call owns one connection from the first byte of its request to the last byte
of its answer. If anything goes wrong in between, the connection is closed, never
reused: a late answer can then reach nobody, least of all the next call.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from hicache_conformance.memory import wire
from hicache_conformance.memory.store import Eviction
from hicache_core import BackendTimeout, BackendUnavailable, Status, Usage

_STATUS = {int(status): status for status in Status}


class RemoteStore:
    """A store in a server process; thread-safe.

    Raises from every verb: BackendUnavailable, BackendTimeout.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._idle: list[socket.socket] = []

    def hello(self) -> tuple[Eviction, bool]:
        header, _ = self._call("hello")
        eviction, keeps = header["result"]
        return eviction, bool(keeps)

    def contains(self, namespace: str, keys: Sequence[str]) -> list[Status]:
        return self._statuses("contains", namespace=namespace, keys=list(keys))

    def get(self, namespace: str, keys: Sequence[str], nbytes: int) -> list[tuple[Status, bytes]]:
        header, payload = self._call("get", namespace=namespace, keys=list(keys), page_nbytes=nbytes)
        ends = list(accumulate(header["sizes"], initial=0))
        values = [payload[start:end] for start, end in pairwise(ends)]
        return list(zip(map(_STATUS.__getitem__, header["result"]), values, strict=True))

    def set(self, namespace: str, keys: Sequence[str], values: Sequence[bytes]) -> list[Status]:
        sizes = [len(value) for value in values]
        return self._statuses("set", b"".join(values), namespace=namespace, keys=list(keys), sizes=sizes)

    def remove(self, namespace: str, keys: Sequence[str]) -> list[Status]:
        return self._statuses("remove", namespace=namespace, keys=list(keys))

    def touch(self, namespace: str, keys: Sequence[str]) -> None:
        self._call("touch", namespace=namespace, keys=list(keys))

    def clear(self, namespace: str) -> int:
        header, _ = self._call("clear", namespace=namespace)
        return int(header["result"])

    def usage(self, namespace: str) -> Usage:
        header, _ = self._call("usage", namespace=namespace)
        return Usage(*header["result"])

    def peek(self, namespace: str, key: str) -> bytes | None:
        header, payload = self._call("peek", namespace=namespace, key=key)
        return payload if header["result"] else None

    def poke(self, namespace: str, key: str, value: bytes | None, *, intact: bool) -> None:
        given = value is not None
        self._call("poke", value or b"", namespace=namespace, key=key, given=given, intact=intact)

    def close(self) -> None:
        """Close the idle connections; one in use is closed by its call.

        Takes no lock, so the child of a fork may call it.
        """
        while self._idle:
            self._idle.pop().close()

    def _statuses(self, verb: str, payload: bytes = b"", **arguments: Any) -> list[Status]:
        header, _ = self._call(verb, payload, **arguments)
        return [_STATUS[code] for code in header["result"]]

    def _call(self, verb: str, payload: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            connection = self._idle.pop() if self._idle else None
            stale = (
                connection is not None
            )  # it may have died with an earlier server; a fresh one tells the truth
            try:
                connection = connection or self._connect(deadline)
                wire.send(connection, {"verb": verb} | arguments, payload, deadline=deadline)
                answer = wire.receive(connection, deadline=deadline)
            except TimeoutError as error:
                _close(connection)
                raise BackendTimeout(
                    f"'{verb}' at {self._path} gave no answer", value=f"{self._timeout_s:g} s", remedy=_REMEDY
                ) from error
            except (OSError, EOFError) as error:
                _close(connection)
                if stale:
                    continue
                raise BackendUnavailable(
                    f"'{verb}' at {self._path}", value=str(error), remedy=_REMEDY
                ) from error
            self._idle.append(connection)
            return answer

    def _connect(self, deadline: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            raise
        return connection


_REMEDY = "Start it: python -m hicache_conformance.memory.server SOCKET"


def _close(connection: socket.socket | None) -> None:
    if connection is not None:
        connection.close()
