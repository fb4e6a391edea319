"""A store behind a Unix socket: ``python -m hicache_conformance.memory.server SOCKET``.

It ends on SIGTERM, or when its standard input closes: a harness that holds the
other end of that pipe leaves no server behind however it dies.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socketserver
import sys
import threading
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from hicache_conformance.memory import wire
from hicache_conformance.memory.store import VERBS, Store
from hicache_core.options import parse_size


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
    store: Store


class _Connection(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(EOFError, OSError):  # the client has gone
            while True:
                # A request that is cut off never reaches the store: nothing is set by half.
                header, payload = wire.receive(self.request)
                wire.send(self.request, *_answer(self.server.store, header, payload))


def _answer(store: Store, header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    verb, namespace, keys = header["verb"], header.get("namespace", ""), header.get("keys", [])
    if verb not in VERBS:
        raise EOFError(f"unknown verb {verb!r}")
    if verb == "get":
        found = store.get(namespace, keys, header["page_nbytes"])
        values = [value for _, value in found]
        return {"result": [status for status, _ in found], "sizes": list(map(len, values))}, b"".join(values)
    if verb == "set":
        ends = list(accumulate(header["sizes"], initial=0))
        values = [payload[start:end] for start, end in pairwise(ends)]
        return {"result": store.set(namespace, keys, values)}, b""
    if verb == "peek":
        value = store.peek(namespace, header["key"])
        return {"result": value is not None}, value or b""
    if verb == "poke":
        value = payload if header["given"] else None
        store.poke(namespace, header["key"], value, intact=header["intact"])
        return {"result": None}, b""
    if verb == "usage":
        usage = store.usage(namespace)
        return {"result": [usage.pages, usage.bytes, usage.store_bytes, usage.capacity]}, b""
    if verb == "hello":
        return {"result": store.hello()}, b""
    arguments = (namespace,) if verb == "clear" else (namespace, keys)
    return {"result": getattr(store, verb)(*arguments)}, b""


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(0)


def main(arguments: list[str] | None = None) -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m hicache_conformance.memory.server", description=__doc__)
    parser.add_argument("socket", type=Path)
    parser.add_argument("--capacity", type=parse_size, help='for example "64mib"; no limit without it')
    parser.add_argument("--eviction", choices=("lru", "none"), default="lru")
    parser.add_argument("--journal", type=Path, help="keep pages across restarts in this file")
    parser.add_argument("--store", default="hicache_conformance.memory.store:Store", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    module, _, name = given.store.partition(":")
    store_class: type[Store] = getattr(import_module(module), name)
    given.socket.unlink(missing_ok=True)
    with _Server(str(given.socket), _Connection) as server:
        server.store = store_class(given.capacity, given.eviction, given.journal)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
