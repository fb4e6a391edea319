"""The real HTTP server of SGLang 0.5.23 on a CPU: on the command line, attached, cleared, detached."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest
from cpu_engine import MEMORY_SHARE, PAGE, PROMPT, make_model

FULL_PAGES = len(PROMPT) // PAGE * PAGE
ADMIN = {"Authorization": "Bearer admin", "Content-Type": "application/json"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Server:
    """A server process and the calls of an operator."""

    def __init__(self, engine, log, model: str, *more: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        flags = (
            "--device cpu --load-format dummy --attention-backend torch_native --sampling-backend pytorch "
            "--grammar-backend none --skip-tokenizer-init --disable-overlap-schedule --dtype bfloat16 "
            f"--mem-fraction-static {MEMORY_SHARE} --max-total-tokens 2048 --page-size {PAGE} "
            "--context-length 1024 --host 127.0.0.1 --admin-api-key admin --skip-server-warmup "
            "--log-level info --enable-hierarchical-cache --hicache-ratio 2 "
            "--hicache-mem-layout page_first_direct --hicache-io-backend direct "
            "--hicache-write-policy write_through "
            "--hicache-storage-prefetch-policy wait_complete"
        ).split()
        port = self.url.rpartition(":")[2]
        self.log = log
        with open(log, "w") as out:
            command = [engine.python, "-m", "sglang.launch_server", "--model-path", model, "--port", port]
            self.process = subprocess.Popen(
                [*command, *flags, *more],
                env=engine.variables,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.until(lambda: self.call("GET", "/health")[0] == 200, 400)

    def call(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, ADMIN, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def attach(self, backend: str, extra: dict[str, object]) -> tuple[int, str]:
        body = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": json.dumps({"prefetch_threshold": PAGE, **extra}),
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        return self.idle("PUT", "/hicache/storage-backend", body)

    def idle(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        """Make a call that the server refuses while backups are under way; tried again for a while."""
        answer = (0, "")

        def done() -> bool:
            nonlocal answer
            answer = self.call(method, path, body)
            return answer[0] == 200 or "idle" not in answer[1] + self.tail()

        self.until(done, 60)
        return answer

    def generate(self) -> tuple[list[int], int]:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        status, text = self.call("POST", "/generate", body)
        assert status == 200, text
        answer = json.loads(text)
        details = answer["meta_info"].get("cached_tokens_details") or {}
        return answer["output_ids"], details.get("storage", 0)

    def flushed(self) -> None:
        """Flush both caches; refused until everything is backed up to storage, so tried again."""
        self.until(lambda: self.call("POST", "/flush_cache")[0] == 200, 60)

    def until(self, condition, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.tail()
            assert time.monotonic() < deadline, self.tail()
            threading.Event().wait(0.2)

    def tail(self) -> str:
        return self.log.read_text()[-3000:]

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(20)


@pytest.fixture
def serve(engine, tmp_path):
    servers = []

    def start(*more: str) -> Server:
        model = str(make_model(tmp_path / "tiny"))
        servers.append(Server(engine, tmp_path / "server.log", model, *more))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def test_server_serves_a_named_backend_then_others_attached_while_it_runs(serve, tmp_path):
    ours = {"options": {"root": str(tmp_path / "ours")}}
    server = serve(
        "--hicache-storage-backend", "hicache.file",
        "--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": PAGE, **ours}),
    )  # fmt: skip
    ids, storage = server.generate()
    assert storage == 0
    server.flushed()
    assert server.generate() == (ids, FULL_PAGES)

    server.flushed()
    assert server.call("POST", "/hicache/storage-backend/clear")[0] == 200
    assert server.generate() == (ids, 0)
    server.flushed()
    assert server.generate() == (ids, FULL_PAGES)

    assert server.idle("DELETE", "/hicache/storage-backend")[0] == 200
    server.flushed()
    assert server.generate() == (ids, 0)

    status, text = server.attach("hicache.file", {"options": {"rot": "/nowhere"}})
    assert status != 200
    assert "rot is unknown (root?)" in text
    status, text = server.attach("file", {"file_storage_path": str(tmp_path / "theirs")})
    assert status == 200, text
    server.flushed()
    server.generate()
    server.flushed()
    assert server.generate() == (ids, FULL_PAGES)

    assert server.idle("DELETE", "/hicache/storage-backend")[0] == 200
    dynamic = {"backend_name": "file", "module_path": "hicache_sglang", "class_name": "HiCacheSGLang"}
    status, text = server.attach("dynamic", dynamic | ours)
    assert status == 200, text
    server.flushed()
    assert server.generate() == (ids, FULL_PAGES)
