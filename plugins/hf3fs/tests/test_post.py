"""The connections to the metadata server, against servers that answer in every way but the usual one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from hf3fs_builders import soon

from hicache_hf3fs._post import NoHttp, Poster

GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Scripted:
    """A server that sends what it is told to: the n-th request, on any connection, gets the n-th answer."""

    def __init__(self) -> None:
        self.answers: list[Callable[[socket.socket], None]] = []
        self.requests: list[bytes] = []
        self.connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1/"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def answer(self, *parts: bytes, close: bool = False) -> None:
        def send(connection: socket.socket) -> None:
            for part in parts:
                connection.sendall(part)
            if close:
                connection.shutdown(socket.SHUT_RDWR)

        self.answers.append(send)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            connection.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.connections.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while request := connection.recv(65536):
                self.requests.append(request)
                self.answers[len(self.requests) - 1](connection)
        except OSError:
            return


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    with closing(Scripted()) as made:
        yield made


@pytest.fixture
def poster(scripted: Scripted) -> Iterator[Poster]:
    with closing(Poster(scripted.url, {"authorization": "Bearer s"})) as made:
        yield made


def test_a_connection_is_used_again_and_carries_what_was_asked(scripted: Scripted, poster: Poster):
    for _ in range(3):
        scripted.answer(GOOD)
    assert [poster.post("exists", b"[1]", soon()) for _ in range(3)] == [(200, b"{}")] * 3
    host = scripted.url.split("/")[2]
    asked = (
        f"POST /v1/exists HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        "authorization: Bearer s\r\ncontent-length: 3\r\n\r\n[1]"
    )
    assert scripted.requests == [asked.encode()] * 3
    assert len(scripted.connections) == 1


def test_an_answer_in_many_pieces_is_put_together(scripted: Scripted, poster: Poster):
    answer = b"HTTP/1.1 404 Not Found\r\nX: y\r\nContent-Length: 5\r\n\r\nhello"
    scripted.answer(*(answer[i : i + 1] for i in range(len(answer))))
    assert poster.post("get", b"", soon()) == (404, b"hello")


@pytest.mark.clause("C2", "C11")
def test_an_answer_that_comes_late_is_taken_for_that_of_no_other_request(scripted: Scripted, poster: Poster):
    late = threading.Event()

    def hold(connection: socket.socket) -> None:
        late.wait(10)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nstale")

    scripted.answers.append(hold)
    with pytest.raises(TimeoutError):
        poster.post("get", b"", soon(0.1))
    scripted.answer(GOOD)
    late.set()
    assert poster.post("get", b"", soon()) == (200, b"{}")
    assert len(scripted.connections) == 2


@pytest.mark.parametrize(
    ("first", "found"),
    [
        (GOOD + b"more", (200, b"{}")),
        (GOOD.replace(b"OK", b"OK\r\nConnection: close"), (200, b"{}")),
        (GOOD.replace(b"1.1", b"1.0"), (200, b"{}")),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", (200, b"")),
        (b"HTTP/1.1 502 Bad\r\n\r\n{}", (502, b"")),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n{}", (200, b"")),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\n{}", (200, b"")),
    ],
    ids=["too much", "close", "1.0", "chunked", "no length", "too long", "negative"],
)
def test_after_an_answer_out_of_the_ordinary_the_next_has_a_connection_of_its_own(
    scripted: Scripted, poster: Poster, first: bytes, found: tuple[int, bytes]
):
    scripted.answer(first)
    scripted.answer(GOOD)
    assert poster.post("get", b"", soon()) == found
    assert poster.post("get", b"", soon()) == (200, b"{}")
    assert len(scripted.connections) == 2


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        GOOD[:-1],
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"x" * (70 << 10),
        b"HTTP/1.1 ?\r\n\r\n",
    ],
    ids=["nothing", "half a head", "half a body", "no http", "endless head", "no status"],
)
def test_what_is_no_answer_is_an_error_and_not_tried_on(scripted: Scripted, poster: Poster, first: bytes):
    scripted.answer(first, close=True)
    scripted.answer(GOOD)
    with pytest.raises((NoHttp, ConnectionError)):
        poster.post("get", b"", soon())
    assert poster.post("get", b"", soon()) == (200, b"{}")


def test_closing_closes_what_is_idle_and_what_is_in_use(scripted: Scripted, poster: Poster):
    gate = threading.Event()
    scripted.answer(GOOD)
    poster.post("get", b"", soon())
    (connection,) = poster._idle

    def close_first(theirs: socket.socket) -> None:
        poster.close()
        gate.set()
        theirs.sendall(GOOD)

    scripted.answers.append(close_first)
    assert poster.post("get", b"", soon()) == (200, b"{}")
    assert gate.is_set()
    assert (connection.fileno(), poster._idle) == (-1, [])


def test_a_header_that_would_end_its_line_is_refused():
    with pytest.raises(ValueError, match="authorization"):
        Poster("http://127.0.0.1:1/", {"authorization": "Bearer a\r\nx: y"})
