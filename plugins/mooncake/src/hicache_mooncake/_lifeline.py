"""Lifeline: an idle connection to the master, whose end tells at once that the master is gone.

The library finds out only by calling: 4.3 s a call on a port that refuses, and a
set makes several. A look at this socket costs a microsecond or two. A master that
hangs keeps its connections, and is met with the library's own time-out.
"""

from __future__ import annotations

import select
import socket
import threading

#: Longest for connecting anew, so that a host that has vanished costs a call no more.
_RECONNECT_S = 0.3


class Lifeline:
    """One connection; thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        self._peer = connection.getpeername()[:2]
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        #: Ready as soon as the connection ends; epoll, since poll objects refuse a second thread.
        self._events: select.epoll | None = None
        self._watch(connection)

    def holds(self) -> bool:
        """Tell whether the master is there; connects anew where the connection has ended."""
        events = self._events
        try:
            if events is not None and not events.poll(0):
                return True
        except (OSError, ValueError):
            pass  # another thread has just replaced it
        with self._lock:
            if self._events is not events:
                return self._events is not None
            self._forget()
            try:
                self._watch(socket.create_connection(self._peer, _RECONNECT_S))
            except OSError:
                return False
            return True

    def close(self) -> None:
        """End it."""
        with self._lock:
            self._forget()

    def _watch(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        events = select.epoll()
        # The master never speaks first: whatever arrives is the end.
        events.register(connection.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
        self._socket, self._events = connection, events

    def _forget(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()
        if self._socket is not None:
            self._socket.close()
        self._socket = None
