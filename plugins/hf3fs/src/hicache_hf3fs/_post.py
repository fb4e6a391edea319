"""HTTP/1.1 as far as the metadata needs it: POST, kept connections, answers of known length.

A general client puts 0.15 ms of parsing and pooling on each request, which is more than most verbs take in
the server. A connection whose request did not end as it should is closed here, so that no answer is ever
taken for that of another request.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from typing import Final
from urllib.parse import urlsplit

#: What an answer's head may have; ours has 100 bytes.
_MOST_HEAD_NBYTES: Final = 64 << 10
#: What an answer's body may have; that of a get of 100,000 keys has 3 MB.
_MOST_BODY_NBYTES: Final = 64 << 20
_READ_NBYTES: Final = 64 << 10
#: Connections that are kept while nobody uses them.
_MOST_IDLE: Final = 256


class NoHttp(OSError):
    """What answers does not speak HTTP, or broke off."""


class Poster:
    """The connections to one server; thread-safe.

    Args:
        url: ``http://host:port`` or ``https://host:port``, with a path or without.
        headers: for every request, in Latin-1 and on one line each.
    """

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if secure else 80)
        self._context = ssl.create_default_context() if secure else None
        self._path = parts.path
        given = {"host": parts.netloc.rpartition("@")[2], "content-type": "application/json"} | headers
        for name, value in given.items():
            if not value.isprintable():
                raise ValueError(f"the header '{name}' has characters that HTTP does not carry")
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self._idle: list[socket.socket] = []
        self._closed = False

    def post(self, path: str, body: bytes, deadline: float) -> tuple[int, bytes]:
        """Send a request under the URL's path; give the answer's status and body.

        The body is empty where the answer is not in the form that a metadata server gives it.

        Raises: TimeoutError at the deadline; OSError, where there is no answer.
        """
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        ).encode("latin-1")
        connection = self._take(deadline)
        keep = False
        try:
            connection.settimeout(_left(deadline))
            connection.sendall(head + body)
            status, answer, keep = _read(connection, deadline)
        finally:
            if keep and not self._closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(connection)
            else:
                connection.close()
        if self._closed:
            self._close_idle()  # close() may have come before the connection was put back
        return status, answer

    def close(self) -> None:
        """Close what is idle, and each other connection when its request ends."""
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:  # another thread was faster
                return

    def _take(self, deadline: float) -> socket.socket:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if _is_quiet(connection):
                return connection
            connection.close()
        return self._connect(deadline)

    def _connect(self, deadline: float) -> socket.socket:
        trouble: OSError = NoHttp(f"'{self._host}' has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        ):
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(_left(deadline))
                connection.connect(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._context is not None:
                    connection.settimeout(_left(deadline))
                    connection = self._context.wrap_socket(connection, server_hostname=self._host)
            except OSError as error:
                connection.close()
                trouble = error
            else:
                return connection
        raise trouble


def _is_quiet(connection: socket.socket) -> bool:
    """True where an idle connection has not been closed from the other side, and nothing waits in it."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return not poll.poll(0)


def _read(connection: socket.socket, deadline: float) -> tuple[int, bytes, bool]:
    """Read an answer; tell also whether the connection can serve another request."""
    got = bytearray()
    while (end := got.find(b"\r\n\r\n")) < 0:
        if len(got) > _MOST_HEAD_NBYTES:
            raise NoHttp("it does not speak HTTP")
        _more(connection, got, deadline)
    first, *lines = bytes(got[:end]).split(b"\r\n")
    version, _, rest = first.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise NoHttp("it does not speak HTTP")
    status = int(rest[:3])
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    length = fields.get(b"content-length", b"")
    if b"transfer-encoding" in fields or not length.isdigit() or int(length) > _MOST_BODY_NBYTES:
        return status, b"", False
    start, stop = end + 4, end + 4 + int(length)
    while len(got) < stop:
        _more(connection, got, deadline)
    keep = version == b"HTTP/1.1" and fields.get(b"connection", b"").lower() != b"close" and len(got) == stop
    return status, bytes(got[start:stop]), keep


def _more(connection: socket.socket, got: bytearray, deadline: float) -> None:
    connection.settimeout(_left(deadline))
    part = connection.recv(_READ_NBYTES)
    if not part:
        raise NoHttp("the connection was closed before the answer had come")
    got += part


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
