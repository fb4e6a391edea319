"""httpx's transport with one deadline a request, whatever its parts are.

httpx gives each connect, write and read the whole time-out anew, so that an answer which comes in single
bytes takes for ever. Here each may take what is left until the deadline.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx


class DeadlineTransport(httpx.HTTPTransport):
    """Connections to one server; thread-safe.

    Args:
        tls: the server is asked over https; loading certificates takes 50 ms.
        max_connections: beyond them a request waits for one.
    """

    def __init__(self, *, tls: bool, max_connections: int) -> None:
        # No proxy, whatever the environment says: it has no business between two hosts of a cluster.
        super().__init__(verify=tls, trust_env=False)
        self._clock = _Clock()
        context = httpx.create_ssl_context() if tls else None

        def make_pool() -> httpcore.ConnectionPool:
            return httpcore.ConnectionPool(
                ssl_context=context,
                max_connections=max_connections,
                keepalive_expiry=None,
                network_backend=_Backend(self._clock),
            )

        self._make_pool = make_pool
        self._pool = make_pool()

    def ask(self, request: httpx.Request, deadline: float) -> tuple[int, bytes]:
        """Send a request; give status and body.

        Raises: httpx.TimeoutException, where that is not done by the deadline; httpx.RequestError.
        """
        self._clock.deadline = deadline
        request.extensions["timeout"] = {"pool": max(0.0, deadline - time.monotonic())}
        try:
            response = self.handle_request(request)
            return response.status_code, response.read()
        except Exception:
            raise
        except BaseException:  # Ctrl-C, say, which may leave httpcore's locks held by nobody
            self._pool = self._make_pool()
            raise


class _Clock(threading.local):
    """The deadline of the request that this thread makes."""

    deadline = 0.0

    def left(self, late: type[Exception]) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise late("the deadline has passed")
        return left


class _Backend(httpcore.SyncBackend):
    def __init__(self, clock: _Clock) -> None:
        self._clock = clock

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        left = self._clock.left(httpcore.ConnectTimeout)
        return _Stream(super().connect_tcp(host, port, left, local_address, socket_options), self._clock)


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, clock: _Clock) -> None:
        self._stream = stream
        self._clock = clock

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._clock.left(httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._clock.left(httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = self._clock.left(httpcore.ConnectTimeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, left), self._clock)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
