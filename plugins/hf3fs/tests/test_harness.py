"""The harness leaves no server behind, however its process ends, and can run wherever these tests run."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from hicache_hf3fs.harness import Hf3fsHarness

#: Starts a harness, tells the server's process, and waits to be killed.
_HOLDER = """
import sys
from hicache_hf3fs.harness import Hf3fsHarness
harness = Hf3fsHarness({})
harness.start()
if sys.argv[1] == "stopped":
    harness.pause()
print(harness._server.pid, flush=True)
sys.stdin.read()
"""


def ended(descriptor: int, timeout_s: float = 10.0) -> bool:
    """Tell whether a process, given by a pidfd, has ended within the time."""
    return bool(select.select([descriptor], [], [], timeout_s)[0])


@pytest.mark.parametrize("server", ["running", "stopped"])
def test_a_harness_that_is_killed_leaves_no_server_behind(tmp_path, server):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
    with subprocess.Popen([sys.executable, "-c", _HOLDER, server], **pipes) as holder:
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
    subjects = [{}, {"client": "usrbio"}, {"metadata": "local"}]
    assert [Hf3fsHarness(given).available() for given in subjects] == [None] * 3


def test_page_files_lie_where_the_user_says_and_nothing_is_left_there(tmp_path):
    harness = Hf3fsHarness({"metadata": "local", "root": str(tmp_path)})
    harness.start()
    assert os.path.dirname(os.path.dirname(harness.options()["root"])) == str(tmp_path)
    harness.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_server_of_the_users_is_never_what_the_suite_runs_on():
    said = Hf3fsHarness({"metadata_url": "http://10.0.0.5:18480", "metadata_token": "t"}).available()
    assert said == (
        "the suite makes its store and its metadata server itself: leave out metadata_url, metadata_token"
    )


def test_a_root_that_is_not_there_is_named():
    assert Hf3fsHarness({"root": "/nonexistent"}).available() == "root='/nonexistent' is not a folder"
