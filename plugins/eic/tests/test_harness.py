"""The harness leaves no simulator behind, however its process ends, and can run wherever these tests run."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from hicache_eic.harness import EicHarness

#: Starts a harness, tells the simulator's process, and waits to be killed.
_HOLDER = """
import sys
from hicache_eic.harness import EicHarness
harness = EicHarness({})
harness.start()
if sys.argv[1] == "stopped":
    harness.pause()
print(harness._server.pid, flush=True)
sys.stdin.read()
"""


def ended(descriptor: int, timeout_s: float = 10.0) -> bool:
    """Tell whether a process, given by a pidfd, has ended within the time."""
    return bool(select.select([descriptor], [], [], timeout_s)[0])


@pytest.mark.parametrize("simulator", ["running", "stopped"])
def test_a_harness_that_is_killed_leaves_no_simulator_behind(tmp_path, simulator):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
    with subprocess.Popen([sys.executable, "-c", _HOLDER, simulator], **pipes) as holder:
        descriptor = os.pidfd_open(int(holder.stdout.readline()))
        try:
            assert not ended(descriptor, 0.0)
            holder.kill()
            assert ended(descriptor)
        finally:
            if not ended(descriptor, 0.0):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def test_nothing_is_missing_here_that_would_have_the_suite_skipped():
    assert EicHarness({}).available() is None


def test_a_service_of_the_users_is_never_what_the_suite_runs_on():
    given = {"url": "eic://10.0.0.7:12500", "instance_id": "kv-1"}
    assert EicHarness(given).available() == (
        "the suite runs on a simulator that it starts: leave out url, instance_id"
    )
