"""A real SGLang engine whose master is killed and restarted while requests run: right ids, and hits again.

Needs the engine environment of the SGLang adapter's tests, with Mooncake in it;
``.ci/env/mooncake full`` makes it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_mooncake._servers import Master

ENGINE = os.environ.get("HICACHE_CI_SGLANG_ENGINE", "")
HERE = Path(__file__).parent
ADAPTER_TESTS = HERE.parents[2] / "packages" / "hicache-sglang" / "tests"
FULL_PAGES_TOKENS = 33 * 16
Ask = Callable[..., Any]


@pytest.fixture
def ask(own_master: Master, tmp_path: Path) -> Iterator[Ask]:
    """Start the engine; ``ask(verb, ...)`` has it do something and gives what came of it."""
    if not ENGINE:
        if os.environ.get("HICACHE_CI_MOONCAKE_REQUIRED"):
            pytest.fail("HICACHE_CI_SGLANG_ENGINE names no interpreter")
        pytest.skip("no environment in which SGLang starts; see .ci/env/mooncake full")
    plugin = tmp_path / "plugin" / "hicache_cpu-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: hicache-cpu\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text("[sglang.srt.plugins]\nhicache_cpu = cpu_copies:apply\n")
    path = [ADAPTER_TESTS / "cpu", ADAPTER_TESTS, plugin.parent, os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "HICACHE_CPU_STAND_INS": "triton,torchvision,sentencepiece,sgl_kernel",
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    options = {"master": own_master.address, "metrics": own_master.metrics, "segment_size": "64mib"}
    log = (tmp_path / "engine.log").open("w+")
    process = subprocess.Popen(
        [ENGINE, str(HERE / "sglang_driver.py"), str(tmp_path / "tiny"), json.dumps(options)],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )

    def answer() -> str:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT "):
                return line.removeprefix("RESULT ").strip()
        log.seek(0)
        raise AssertionError(f"the engine ended: {log.read()[-6000:]}")

    def ask_engine(verb: str, **arguments: Any) -> Any:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"verb": verb} | arguments) + "\n")
        process.stdin.flush()
        return json.loads(answer())

    try:
        assert answer() == "ready"
        yield ask_engine
        ask_engine("shutdown")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.clause("C10")
def test_ids_stay_right_and_hits_come_back_when_the_master_is_killed_and_restarted(ask, own_master):
    first = ask("once")
    stored = ask("until_storage", seconds=30)
    assert (stored["storage"], stored["ids"]) == (FULL_PAGES_TOKENS, first["ids"])
    events = [(2.0, own_master.kill), (6.0, own_master.start)]
    timers = [threading.Timer(at, event) for at, event in events]
    for timer in timers:
        timer.start()
    during = ask("load", seconds=12)
    for timer in timers:
        timer.join()
    after = ask("until_storage", seconds=60)
    assert [answer["ids"] for answer in during] == [first["ids"]] * len(during)
    assert {answer["storage"] for answer in during} >= {0, FULL_PAGES_TOKENS}
    assert max(answer["seconds"] for answer in during) < 15
    assert (after["storage"], after["ids"]) == (FULL_PAGES_TOKENS, first["ids"])
