"""Lifeline: an idle connection to the master, whose end tells at once that the master is gone.

The library finds out only by calling: 4.3 s a call on a port that refuses, and a
set makes several. A look at this socket costs a microsecond. A master that hangs
keeps its connections, and is met with the library's own time-out.
"""

from __future__ import annotations

import socket
import threading

#: Longest for connecting anew, so that a host that has vanished costs a call no more.
_RECONNECT_S = 0.3


class Lifeline:
    """One connection; thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._peer = connection.getpeername()
        self._socket: socket.socket | None = connection
        self._lock = threading.Lock()
        connection.setblocking(False)

    def holds(self) -> bool:
        """Tell whether the master is there; connects anew where the connection has ended."""
        connection = self._socket
        if connection is not None and _is_open(connection):
            return True
        with self._lock:
            if self._socket is not connection:
                return self._socket is not None
            if connection is not None:
                connection.close()
            self._socket = None
            try:
                self._socket = socket.create_connection(self._peer[:2], _RECONNECT_S)
                self._socket.setblocking(False)
            except OSError:
                return False
            return self._socket is not None

    def close(self) -> None:
        """End it."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None


def _is_open(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False
