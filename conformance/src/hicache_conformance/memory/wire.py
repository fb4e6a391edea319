"""Frames on a stream socket: a JSON header that names its payload's size, then the payload."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct(">I")


def send(
    connection: socket.socket, header: dict[str, Any], payload: bytes = b"", *, deadline: float = 0.0
) -> None:
    """Send one frame; TimeoutError past the deadline (time.monotonic; 0 for none)."""
    text = json.dumps(header | {"nbytes": len(payload)}).encode()
    # sendall spends one timeout on the whole of its data, so that one frame cannot outlast the deadline.
    _arm(connection, deadline)
    connection.sendall(_LENGTH.pack(len(text)) + text + payload)


def receive(connection: socket.socket, *, deadline: float = 0.0) -> tuple[dict[str, Any], bytes]:
    """Receive one frame; EOFError when the other side has gone, TimeoutError past the deadline."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, deadline))
    header: dict[str, Any] = json.loads(_exactly(connection, length, deadline))
    return header, bytes(_exactly(connection, header["nbytes"], deadline))


def _exactly(connection: socket.socket, nbytes: int, deadline: float) -> bytearray:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        _arm(connection, deadline)
        got = connection.recv_into(view)
        if not got:
            raise EOFError("the connection was closed")
        view = view[got:]
    return data


def _arm(connection: socket.socket, deadline: float) -> None:
    if not deadline:
        connection.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time is left")
    connection.settimeout(left)
