"""Where the real SGLang is: one folder a release for light tests, one interpreter for a whole engine.

``.ci/env/sglang`` makes both and names them. Without them the tests that need
SGLang are skipped; where they are required, a skip is a failure.
"""

from __future__ import annotations

import os
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
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONWARNINGS": "ignore",
    }

    def run(script: str, *arguments: str, timeout_s: float = 110.0, **more: str) -> str:
        done = subprocess.run(
            [ENGINE, str(HERE / "cpu" / script), *arguments],
            env=variables | more,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        results = [
            line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")
        ]
        assert results, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        assert done.returncode == 0, done.stderr[-3000:]
        run.log = done.stdout + done.stderr
        return results[-1]

    run.variables = variables
    run.python = ENGINE
    return run
