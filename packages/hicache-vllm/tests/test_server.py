"""The real HTTP server of vLLM 0.32 on a CPU: one fills the store, a second one serves from it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # two servers are started, on a busy machine

BLOCK = 32
PROMPTS = [
    "".join(f"[{i}] the {word} of item {i * i % 97} is {i * 7919 % 1000}. " for i in range(88)) + "Q?"
    for word in ("weight", "colour")
]
SHM = Path("/dev/shm")


class Server:
    """A server process, its requests and its metrics."""

    def __init__(self, log: Path, model: str, tier: dict | None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        path = [str(HERE / "cpu"), str(HERE), os.environ.get("PYTHONPATH", "")]
        variables = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        flags = (
            "--served-model-name tiny --host 127.0.0.1 --dtype float32 --enforce-eager --max-model-len 4096 "
            f"--max-num-seqs 4 --block-size {BLOCK} --no-enable-prefix-caching "
            # Without it vLLM kills its engine at once, and with it what would remove the host tier's file.
            "--shutdown-timeout 30"
        ).split()
        if tier is not None:
            flags += ["--kv-transfer-config", json.dumps(_transfer(tier))]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        self.log = log
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *flags],
                env=variables,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._until(lambda: self._get("/health") is not None, 300)

    def complete(self, prompt: str) -> str:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            (choice,) = json.load(answer)["choices"]
        return choice["token_ids"]

    def metric(self, name: str, *labels: str) -> float:
        lines = (self._get("/metrics") or "").splitlines()
        found = [
            line for line in lines if line.startswith(f"vllm:{name}") and all(each in line for each in labels)
        ]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def until_metric(self, least: float, name: str, *labels: str) -> None:
        self._until(lambda: self.metric(name, *labels) >= least, 60)

    def _get(self, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                return answer.read().decode()
        except (urllib.error.HTTPError, OSError):
            return None

    def _until(self, condition, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            threading.Event().wait(0.2)

    def stop(self) -> int:
        """End it as an operator does; gives its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(20)
        return self.process.returncode


def _transfer(tier: dict) -> dict:
    extra = {
        "cpu_bytes_to_use": 64 << 20,
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "vllm_cpu_spec",
        "secondary_tiers": [tier],
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.fixture
def serve(program, tmp_path):
    from vllm_model import make_model

    model = make_model(tmp_path / "tiny")
    servers = []

    def start(tier: dict | None) -> Server:
        servers.append(Server(tmp_path / f"server{len(servers)}.log", model, tier))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def mooncake(program):
    from hicache_mooncake.harness import MooncakeHarness

    harness = MooncakeHarness({"checksum": True})
    if reason := harness.available():
        pytest.skip(reason)
    harness.start()
    yield harness.options()
    harness.stop()


@pytest.mark.parametrize("backend", ["file", "mooncake"])
def test_a_second_server_serves_the_prompts_of_the_first(serve, tmp_path, backend, request):
    options = {"root": str(tmp_path / "kv")} if backend == "file" else request.getfixturevalue("mooncake")
    tier = {"type": "hicache", "backend": backend, "options": options}
    before = set(SHM.glob("vllm_offload_*"))

    plain = serve(None)
    baseline = [plain.complete(prompt) for prompt in PROMPTS]
    plain.stop()

    first = serve(tier)
    assert [first.complete(prompt) for prompt in PROMPTS] == baseline
    blocks = sum((len(prompt) // BLOCK) for prompt in PROMPTS)
    first.until_metric(blocks, "kv_offload_hicache_pages_total", 'verb="set"', 'status="OK"')
    first.stop()

    second = serve(tier)
    assert [second.complete(prompt) for prompt in PROMPTS] == baseline
    second.until_metric(0.98 * blocks * BLOCK, "external_prefix_cache_hits_total")
    assert second.metric("kv_offload_tiering_chunk_hits_total", 'tier="1:hicache"') >= 0.98 * blocks
    assert second.metric("kv_offload_hicache_pages_total", 'verb="get"', 'status="OK"') >= 0.98 * blocks
    second.stop()
    assert set(SHM.glob("vllm_offload_*")) - before == set()
