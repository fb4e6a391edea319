"""The server process and its client: tokens, health, metrics, malformed requests, deadlines, retries."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hf3fs_builders import NBYTES, Opener, an_arena, asked, free_port, keys_of, soon, store

from hicache_conformance.calls import Call
from hicache_core import Status
from hicache_core.errors import BackendTimeout, BackendUnavailable, InvalidOptions
from hicache_hf3fs.harness import Hf3fsHarness
from hicache_hf3fs.metadata import PageFileConflict, PageFileLabel, PageRef, new_ticket
from hicache_hf3fs.metadata_http import MetadataClient
from hicache_hf3fs.wire import pack_keys

LABEL = PageFileLabel("a" * 32, NBYTES, 64)


@pytest.fixture
def url(server: Hf3fsHarness) -> str:
    return str(server.options()["metadata_url"])


def client_of(url: str, namespace: str = "0" * 32, **more) -> MetadataClient:
    return MetadataClient(url, namespace, **more)


def test_every_verb_answers_over_http_as_it_does_in_process(url: str):
    with closing(client_of(url, "1" * 32)) as metadata:
        assert metadata.initialize("verbs", LABEL, deadline=soon())[:2] == (60.0, 15.0)
        keys, hold = keys_of(4), new_ticket()
        pages = store(metadata, "verbs", keys)
        assert metadata.exists([*keys, "x"], deadline=soon()) == [True] * 4 + [False]
        wanted = [PageRef("verbs", page, NBYTES, None) for page in pages]
        assert metadata.get_page_indices("verbs", keys, hold=hold, deadline=soon()) == wanted
        metadata.report_bad([(keys[0], wanted[0], Status.CORRUPT)], deadline=soon())
        found = metadata.get_page_indices("elsewhere", keys, hold=hold, deadline=soon())
        assert found == [wanted[0]._replace(corrupt=True), *wanted[1:]]
        metadata.touch(keys, deadline=soon())
        assert metadata.delete_keys(keys[:2], deadline=soon()) == [True, True]
        assert metadata.usage(deadline=soon())[:2] == (2, 2 * NBYTES)
        assert (metadata.clear(deadline=soon()), metadata.clear(deadline=soon())) == (2, 0)


def test_a_conflict_names_both_files(url: str):
    with closing(client_of(url)) as metadata:
        metadata.initialize("conflict", LABEL, deadline=soon())
        other = PageFileLabel("b" * 32, NBYTES, 64)
        with pytest.raises(PageFileConflict) as caught:
            metadata.initialize("conflict", other, deadline=soon())
    assert (caught.value.known, caught.value.met) == (LABEL, other)
    assert "All hosts must mount the same file system" in str(caught.value)


def test_reads_that_are_over_are_told_with_the_next_request(url: str):
    with closing(client_of(url, "2" * 32)) as metadata:
        metadata.initialize("holds", PageFileLabel("c" * 32, NBYTES, 2), deadline=soon())
        pages, hold = store(metadata, "holds", keys_of(2)), new_ticket()
        metadata.get_page_indices("holds", keys_of(2), hold=hold, deadline=soon())
        assert store(metadata, "holds", keys_of(1, "no-room")) == [-1]
        metadata.end_read(hold)
        assert store(metadata, "holds", keys_of(1, "room"))[0] in pages


def test_closing_tells_that_reads_are_over(url: str):
    with closing(client_of(url, "3" * 32)) as other:
        other.initialize("farewell", PageFileLabel("d" * 32, NBYTES, 2), deadline=soon())
        store(other, "farewell", keys_of(2))
        reader, hold = client_of(url, "3" * 32), new_ticket()
        reader.get_page_indices("farewell", keys_of(2), hold=hold, deadline=soon())
        reader.end_read(hold)
        reader.close()
        reader.close()
        assert -1 not in store(other, "farewell", keys_of(2, "room"))


def test_a_server_that_starts_has_rows_in_memory_before_anybody_asks():
    harness = Hf3fsHarness({})
    harness.start()
    try:
        with closing(client_of(harness.options()["metadata_url"])) as metadata:
            metadata.initialize("ahead", LABEL, deadline=soon())
            store(metadata, "ahead", keys_of(4))
        harness.restart()
        lines = asked(f"{harness.options()['metadata_url']}/metrics")[1].splitlines()
    finally:
        harness.stop()
    assert "hicache_hf3fs_metadata_rows_in_memory 4" in lines


def test_health_and_metrics(url: str):
    with closing(client_of(url, "4" * 32)) as metadata:
        metadata.usage(deadline=soon())
    status, health = asked(f"{url}/health")
    told = json.loads(health)
    assert (status, len(told.pop("database"))) == (200, 32)
    assert told == {"status": "ok", "lease_s": 60.0, "hold_s": 15.0}
    lines = asked(f"{url}/metrics")[1].splitlines()
    assert any(line.startswith("hicache_hf3fs_metadata_pages_stored ") for line in lines)
    assert any('requests_total{verb="usage",status="200"}' in line for line in lines)


def _initialize(rank: str, page_nbytes: int, num_pages: int) -> bytes:
    return json.dumps({"rank": rank, "label": ["0" * 32, page_nbytes, num_pages]}).encode()


def _confirm(**columns) -> bytes:
    asked = {"keys": "0" * 32, "pages": [0], "nbytes": [NBYTES], "checksums": "0" * 16, "release": []}
    return json.dumps({"rank": "no", "lease": 1} | asked | columns).encode()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/x/nothing", b"{}", 404),
        ("/v1/x/exists", b"not json", 400),
        ("/v1/x/exists", b"{}", 400),
        ("/v1/x/exists", b'{"keys": 5}', 400),
        ("/v1/x/exists", b'{"keys": "abc"}', 400),
        ("/v1/x/exists", b'{"keys": "abcd"}', 400),
        ("/v1/x/exists", b"[]", 400),
        ("/v1/x/reserve", b'{"keys": "00112233445566778899aabbccddeeff", "lease": 1, "rank": "no"}', 404),
        ("/v1/x/initialize", b'{"rank": "a", "label": [1]}', 400),
        ("/v1/x/initialize", _initialize("a", 4096, -5), 400),
        ("/v1/x/initialize", _initialize("a", 4096, 2**42), 400),
        ("/v1/x/initialize", _initialize("a", 2**40, 2**30), 400),
        ("/v1/x/initialize", _initialize("../a", 4096, 8), 400),
        ("/v1/x/reserve", b'{"keys": "", "lease": %d, "rank": "no"}' % 2**70, 400),
        ("/v1/x/reserve", b'{"keys": "", "lease": null, "rank": "no"}', 400),
        ("/v1/x/get", b'{"keys": "", "hold": [1], "rank": "no"}', 400),
        ("/v1/x/touch", b'{"keys": "", "ended": ["x"]}', 400),
        ("/v1/x/confirm", _confirm(pages=[0.0]), 400),
        ("/v1/x/confirm", _confirm(nbytes=[2**70]), 400),
        ("/v1/x/confirm", _confirm(nbytes=[-7]), 400),
        ("/v1/x/exists", b"[" * 200_000, 400),
    ],
    ids=[
        "unknown verb",
        "no json",
        "no keys",
        "keys of another type",
        "no hex",
        "half a key",
        "a list",
        "unknown file",
        "half a label",
        "less than no pages",
        "more pages than are kept",
        "more bytes than a file has",
        "a path for a name",
        "a lease too large",
        "no lease",
        "a hold of another type",
        "an ended read of another type",
        "a page that is no whole number",
        "a size too large",
        "a size below 0",
        "lists without end",
    ],
)
def test_a_malformed_request_is_refused_and_the_server_goes_on(url: str, path, body, status):
    found, answer = asked(f"{url}{path}", body)
    assert (found, "what" in json.loads(answer)) == (status, True)
    assert [asked(f"{url}/{path}")[0] for path in ("health", "metrics")] == [200, 200]
    with closing(client_of(url)) as metadata:
        metadata.initialize("a", PageFileLabel("0" * 32, NBYTES, 8), deadline=soon())


def test_a_request_that_is_too_long_is_refused(url: str):
    status, answer = asked(f"{url}/v1/x/exists", b" " * (33 << 20))
    assert (status, json.loads(answer)["what"]) == (413, f"a request is at most {32 << 20} bytes")


def test_a_token_is_asked_for_everywhere_but_at_health(tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    ready, port = tmp_path / "ready", free_port()
    command = [
        sys.executable,
        "-m",
        "hicache_hf3fs.metadata_server",
        "--database",
        str(tmp_path / "m.sqlite"),
    ]
    command += ["--port", str(port), "--token-file", str(tmp_path / "token"), "--ready-file", str(ready)]
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 30
        while not ready.exists():
            assert time.monotonic() < deadline
            threading.Event().wait(0.02)
        url = f"http://{ready.read_text().strip()}"
        with closing(client_of(url)) as stranger, pytest.raises(BackendUnavailable) as caught:
            stranger.check(deadline=soon())
        assert "HTTP 401" in str(caught.value)
        assert "Set metadata_token" in str(caught.value)
        with closing(client_of(url, token="wrong")) as wrong, pytest.raises(BackendUnavailable):
            wrong.check(deadline=soon())
        with closing(client_of(url, token="s3cret")) as friend:
            friend.check(deadline=soon())
        statuses = [asked(f"{url}/{path}")[0] for path in ("health", "metrics")]
        assert statuses == [200, 401]
        # Who has no token is told so before the server has taken in what he sends.
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            stranger.sendall(b"POST /v1/x/exists HTTP/1.1\r\nhost: x\r\ncontent-length: 33000000\r\n\r\n{")
            assert stranger.recv(4096).startswith(b"HTTP/1.1 401")
    finally:
        process.terminate()
        assert process.wait(10) is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "without a token would let anybody in"),
        (["--token-file", "/nonexistent/token"], "cannot be read"),
        (["--rows-in-memory", "-1"], "-1; give 0 or more"),
        (["--hold", "nan"], "--hold nan is no time"),
        (["--lease", "-1"], "--lease -1.0 is no time"),
        (["--port", "70000"], "--port 70000 is none"),
    ],
    ids=[
        "any interface without a token",
        "no such token",
        "less than no rows",
        "no hold",
        "no lease",
        "no port",
    ],
)
def test_the_server_refuses_what_is_not_safe_or_not_possible(tmp_path, arguments, said):
    command = [
        sys.executable,
        "-m",
        "hicache_hf3fs.metadata_server",
        "--database",
        str(tmp_path / "m.sqlite"),
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr
    assert done.stderr.endswith("See: hicache-hf3fs-metadata --help\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("way", ["by name", "through a link"])
def test_two_servers_never_share_a_database(server: Hf3fsHarness, tmp_path, way):
    database = server._database()
    if way == "through a link":
        database = tmp_path / "link.sqlite"
        database.symlink_to(server._database())
    command = [sys.executable, "-m", "hicache_hf3fs.metadata_server", "--port", "0"]
    command += ["--database", str(database)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "is in use by another process" in done.stderr


@pytest.mark.clause("C10", "C11")
def test_a_paused_server_costs_the_deadline_and_no_more(server: Hf3fsHarness, url: str):
    with closing(client_of(url)) as metadata:
        metadata.check(deadline=soon())
        server.pause()
        try:
            started = time.monotonic()
            with pytest.raises(BackendTimeout) as caught:
                metadata.exists(keys_of(1), deadline=soon(0.3))
            assert 0.2 < time.monotonic() - started < 0.8
        finally:
            server.resume()
        assert "raise timeout_s" in str(caught.value)
        metadata.check(deadline=soon())


def test_a_connection_that_died_is_replaced_without_a_word(server: Hf3fsHarness, url: str):
    with closing(client_of(url)) as metadata:
        metadata.check(deadline=soon())
        server.restart()
        metadata.check(deadline=soon())


def test_a_server_that_comes_back_within_the_deadline_is_waited_for(server: Hf3fsHarness, url: str):
    with closing(client_of(url, retries=8)) as metadata:
        server.kill()
        call = Call(lambda: metadata.usage(deadline=soon(20.0)))
        server.restart()
        assert call.result().pages == 0


class _Stranger(BaseHTTPRequestHandler):
    """Some other server at the metadata's address."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        server = self.server
        self.send_response(server.status)
        for name, value in server.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(server.body)))
        self.end_headers()
        for at in range(len(server.body)):
            self.wfile.write(server.body[at : at + 1])
            if server.ended.wait(server.pause_s):
                return

    def log_message(self, *args) -> None:
        pass


@contextmanager
def a_stranger(body: bytes, status: int = 200, pause_s: float = 0.0, **headers: str):
    """Start one that answers the same to everything, a byte at a time; give its address."""
    stranger = ThreadingHTTPServer(("127.0.0.1", 0), _Stranger)
    stranger.status, stranger.body, stranger.pause_s, stranger.headers = status, body, pause_s, headers
    stranger.ended = threading.Event()
    thread = threading.Thread(target=stranger.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{stranger.server_address[1]}"
    finally:
        stranger.ended.set()
        stranger.shutdown()
        stranger.server_close()
        thread.join(5)


@pytest.mark.parametrize("status", [200, 404, 500, 502])
def test_another_server_at_the_address_is_named_as_such(status):
    with (
        a_stranger(b"<html>hello</html>", status) as url,
        closing(client_of(url)) as metadata,
        pytest.raises(BackendUnavailable) as caught,
    ):
        metadata.check(deadline=soon())
    assert "that is not a hicache-hf3fs-metadata server" in str(caught.value)


@pytest.mark.clause("C1", "C10")
@pytest.mark.parametrize(
    "body",
    [b"7", b"{}", b"null", b'"1"', b'"1111"', b'"2222"', b'{"existed": "1111", "pages": [1]}'],
    ids=str,
)
def test_an_answer_of_another_kind_is_unavailable_and_never_a_result(body):
    """A text of one yes gave one status for four keys."""
    label = PageFileLabel("0" * 32, NBYTES, 8)
    with a_stranger(body) as url, closing(client_of(url)) as metadata:
        asks = [
            lambda: metadata.initialize("kv", label, deadline=soon()),
            lambda: metadata.get_page_indices("kv", keys_of(4), hold=1, deadline=soon()),
            lambda: metadata.reserve_and_allocate_page_indices(
                "kv", [(key, "") for key in keys_of(4)], lease=1, deadline=soon()
            ),
            lambda: metadata.usage(deadline=soon()),
        ]
        if body != b'"1111"':
            asks.append(lambda: metadata.exists(keys_of(4), deadline=soon()))
        for ask in asks:
            with pytest.raises(BackendUnavailable) as caught:
                ask()
            assert "with something else" in str(caught.value)


def test_an_answer_that_cannot_be_decoded_is_unavailable():
    with (
        a_stranger(b"[0, 0, 0, 0]", **{"content-encoding": "gzip"}) as url,
        closing(client_of(url, retries=0)) as metadata,
        pytest.raises(BackendUnavailable),
    ):
        metadata.usage(deadline=soon())


@pytest.mark.clause("C10", "C11")
def test_an_answer_in_single_bytes_costs_the_deadline_and_no_more():
    """Each byte started the time-out for a read anew."""
    with a_stranger(b"[0, 0, 0, 0]" + b" " * 1000, pause_s=0.05) as url, closing(client_of(url)) as metadata:
        started = time.monotonic()
        with pytest.raises(BackendTimeout):
            metadata.usage(deadline=soon(0.4))
        assert 0.3 < time.monotonic() - started < 2.0


@pytest.mark.clause("C10")
def test_a_server_that_lost_its_database_is_served_again_by_the_same_storage(opener: Opener):
    harness = Hf3fsHarness({})
    harness.start()
    try:
        arena, keys = an_arena(4), keys_of(4)
        storage = opener(arena, metadata_url=harness.options()["metadata_url"])
        assert storage.batch_set(keys, arena.pages(range(4))) == [Status.OK] * 4
        harness.kill()
        for leftover in harness._database().parent.glob("*.sqlite*"):
            leftover.unlink()
        harness.restart()
        assert storage.batch_get(keys, arena.pages(range(4))) == [Status.MISS] * 4
        arena.freeze()
        assert storage.batch_set(keys, arena.pages([3, 2, 1, 0])) == [Status.OK] * 4
        storage.close()
    finally:
        harness.stop()


@pytest.mark.clause("C3")
def test_a_host_that_mounts_something_else_is_told_and_reads_nothing(
    server: Hf3fsHarness, tmp_path, url: str
):
    arena = an_arena(1)
    here, there = Opener(tmp_path / "here"), Opener(tmp_path / "there")
    for opener in (here, there):
        opener.root.mkdir()
    with closing(here(arena, metadata_url=url)), pytest.raises(PageFileConflict) as caught:
        there(arena, metadata_url=url)
    assert "All hosts must mount the same file system at root" in str(caught.value)


def test_a_hold_shorter_than_a_call_is_refused(tmp_path):
    opener = Opener(tmp_path / "root")
    opener.root.mkdir()
    with pytest.raises(InvalidOptions) as caught:
        opener(an_arena(1), hold_s=2.0, timeout_s=5.0)
    assert "pages are kept for 2 s" in str(caught.value)


def test_what_goes_over_the_wire_is_small(url: str):
    """128 keys: the answer to a get names page, size and checksum, and repeats nothing."""
    with closing(client_of(url, "5" * 32)) as metadata:
        metadata.initialize("wire", PageFileLabel("e" * 32, NBYTES, 256), deadline=soon())
        store(metadata, "wire", keys_of(128))
    body = json.dumps({"rank": "wire", "keys": pack_keys(keys_of(128)), "hold": 1})
    status, answer = asked(f"{url}/v1/{'5' * 32}/get", body.encode())
    assert (status, len(answer) < 128 * 24) == (200, True)


def test_an_interrupted_request_leaves_no_lock_to_the_next(url: str, monkeypatch):
    """httpcore's own may be held by nobody then, and know no time-out."""
    with closing(client_of(url)) as metadata:
        metadata.check(deadline=soon())
        pool = metadata._http._pool

        def interrupted(_) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(pool, "handle_request", interrupted)
        with pytest.raises(KeyboardInterrupt):
            metadata.check(deadline=soon())
        assert metadata._http._pool is not pool
        metadata.check(deadline=soon())
