"""What the simulator's two halves say to each other over TCP: a JSON head, then raw bytes."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("<II")


def send(connection: socket.socket, head: dict[str, Any], body: list[Any] | None = None) -> None:
    """Send one message; the body is a list of buffers, sent one after another."""
    text = json.dumps(head).encode()
    parts = [memoryview(part).cast("B") for part in body or []]
    connection.sendall(_LENGTHS.pack(len(text), sum(part.nbytes for part in parts)) + text)
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """Receive one message; ConnectionError at the end of the stream."""
    text_nbytes, body_nbytes = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    head = json.loads(bytes(_exactly(connection, text_nbytes)))
    return head, _exactly(connection, body_nbytes)


def _exactly(connection: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionError("the other side has gone")
        view = view[got:]
    return data
