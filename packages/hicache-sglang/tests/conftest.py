"""Where the real SGLang is: one folder a release for light tests, one interpreter for a whole engine.

``.ci/env/sglang`` makes both and names them. Without them the tests that need
SGLang are skipped; where they are required, a skip is a failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE / "cpu"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

#: A folder with one subfolder a release, each made by ``pip install --no-deps --target``.
WHEELS = os.environ.get("HICACHE_CI_SGLANG_WHEELS", "")
#: The interpreter of an environment in which SGLang 0.5.23 starts on a CPU.
ENGINE = os.environ.get("HICACHE_CI_SGLANG_ENGINE", "")
REQUIRED = bool(os.environ.get("HICACHE_CI_SGLANG_REQUIRED"))
NEWEST = "0.5.23"

STAND_INS = "triton,torchvision,sentencepiece,sgl_kernel"


def pytest_report_header() -> str:
    return f"sglang: wheels {WHEELS or 'none'}, engine {ENGINE or 'none'}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if REQUIRED and report.skipped and HERE in Path(item.path).parents:
        report.outcome = "failed"
        report.longrepr = f"required here, and skipped: {report.longrepr}"


@pytest.fixture(scope="session")
def wheel() -> object:
    """The folder of one release; skips where it is not installed."""

    def folder(version: str) -> Path:
        found = Path(WHEELS) / version
        if not WHEELS or not (found / "sglang").is_dir():
            pytest.skip(f"SGLang {version} is not installed; see .ci/env/sglang")
        return found

    return folder


@pytest.fixture(scope="session")
def sglang(wheel):
    """The newest release, importable below ``sglang.srt`` in this process; gives its folder."""
    pytest.importorskip("torch")
    path = str(wheel(NEWEST))
    if path not in sys.path:
        sys.path.insert(0, path)
    import sgl_release

    if "sglang" not in sys.modules:
        sgl_release.prepare()
    return Path(path) / "sglang"


def run_group(command: list[str], variables: dict[str, str], timeout_s: float) -> tuple[int, str, str]:
    """Run a program that has children of its own; at the deadline all of them are ended."""
    process = subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{command[1]} did not end within {timeout_s:g} s: {err[-3000:]}") from None
    return process.returncode, out, err


@pytest.fixture(scope="session")
def engine(tmp_path_factory):
    """Runs a script with a whole SGLang on the CPU; gives what it wrote after ``RESULT``."""
    if not ENGINE:
        pytest.skip("no environment in which SGLang starts; see .ci/env/sglang")
    plugin = tmp_path_factory.mktemp("plugin") / "hicache_cpu-0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: hicache-cpu\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text("[sglang.srt.plugins]\nhicache_cpu = cpu_copies:apply\n")
    path = [str(HERE / "cpu"), str(HERE), str(plugin.parent), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "HICACHE_CPU_STAND_INS": STAND_INS,
        "TMPDIR": str(plugin.parent),  # SGLang leaves its sockets and files of shared memory behind
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONWARNINGS": "ignore",
    }

    def run(script: str, *arguments: str, timeout_s: float = 280.0, **more: str) -> str:
        status, out, err = run_group(
            [ENGINE, str(HERE / "cpu" / script), *arguments], variables | more, timeout_s
        )
        results = [line.removeprefix("RESULT ") for line in out.splitlines() if line.startswith("RESULT ")]
        assert results, f"exit status {status}\n{out[-3000:]}\n{err[-6000:]}"
        assert status == 0, err[-3000:]
        return results[-1]

    run.variables = variables
    run.python = ENGINE
    yield run
    made = plugin.parent / "semaphores"  # cpu_copies writes their names down
    for name in made.read_text().split() if made.exists() else ():
        Path(f"/dev/shm/sem.{name.lstrip('/')}").unlink(missing_ok=True)
