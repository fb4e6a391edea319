"""Where the real vLLM is: one folder a release for light tests; this interpreter's own for a whole engine.

``.ci/env/vllm`` makes both and names them. Without them the tests that need vLLM are
skipped; where they are required, a skip is a failure. Tests in this process see
``vllm_fake``; the real ones run in processes of their own.
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

#: A folder with one subfolder a release that holds its Python files.
WHEELS = os.environ.get("HICACHE_CI_VLLM_WHEELS", "")
REQUIRED = bool(os.environ.get("HICACHE_CI_VLLM_REQUIRED"))
#: Modules of the adapter that import vLLM.
ON_VLLM = ("tier", "lookups", "results")


def pytest_report_header() -> str:
    return f"vllm: wheels {WHEELS or 'none'}, engine {'required' if REQUIRED else 'none'}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if REQUIRED and report.skipped and HERE in Path(item.path).parents:
        report.outcome = "failed"
        report.longrepr = f"required here, and skipped: {report.longrepr}"


@pytest.fixture
def fake():
    """Installs a vintage of the fake vLLM; all that imported it is forgotten afterwards."""
    import vllm_fake

    before = {name: module for name, module in sys.modules.items() if _on_vllm(name)}
    for name in before:
        del sys.modules[name]
    yield vllm_fake.install
    for name in [name for name in sys.modules if _on_vllm(name)]:
        del sys.modules[name]
    sys.modules.update(before)


def _on_vllm(name: str) -> bool:
    own = name.removeprefix("hicache_vllm.")
    return name == "vllm" or name.startswith("vllm.") or (own != name and own in ON_VLLM)


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
def program():
    """Runs a script of these tests on the real vLLM; gives what it wrote after ``RESULT``."""
    if not REQUIRED:
        pytest.skip("no environment in which vLLM starts; see .ci/env/vllm")

    def run(script: str, *arguments: str, release: str = "", timeout_s: float = 240.0, **more: str) -> str:
        wheel = [str(Path(WHEELS) / release)] if release else []
        path = [*wheel, str(HERE / "cpu"), str(HERE), os.environ.get("PYTHONPATH", "")]
        variables = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONWARNINGS": "ignore"} | more
        status, out, err = run_group([sys.executable, str(HERE / script), *arguments], variables, timeout_s)
        results = [line.removeprefix("RESULT ") for line in out.splitlines() if line.startswith("RESULT ")]
        assert results, f"exit status {status}\n{out[-3000:]}\n{err[-6000:]}"
        assert status == 0, err[-3000:]
        run.log = out + err
        return results[-1]

    return run
