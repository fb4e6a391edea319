"""A leashed server ends with whoever started it, and is the process that its starter knows."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hicache_conformance import leash
from hicache_conformance.leash import leashed, start_leashed

#: Starts a leashed process, tells which, and waits to be killed.
_HOLDER = """
import subprocess, sys
from hicache_conformance.leash import leashed
server = [sys.executable, "-c", "print('on', flush=True); import sys; sys.stdin.read()"]
held = subprocess.Popen(leashed(server), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
held.stdout.readline()
if sys.argv[1] == "stopped":
    held.send_signal(19)
print(held.pid, flush=True)
sys.stdin.read()
"""


def ended(descriptor: int, timeout_s: float = 10.0) -> bool:
    """Tell whether a process, given by a pidfd, has ended within the time."""
    return bool(select.select([descriptor], [], [], timeout_s)[0])


@pytest.mark.parametrize("server", ["running", "stopped"])
def test_a_server_ends_with_a_starter_that_is_killed(server: str) -> None:
    command = [sys.executable, "-c", _HOLDER, server]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        descriptor = os.pidfd_open(int(holder.stdout.readline()))
        try:
            assert not ended(descriptor, 0.0)
            holder.kill()
            assert ended(descriptor)
        finally:
            if not ended(descriptor, 0.0):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def test_a_server_outlives_the_thread_that_asked_for_it() -> None:
    started: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-c", "print('on', flush=True); import sys; sys.stdin.read()"]

    def start() -> None:
        started.append(start_leashed(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with started[0] as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"on\n"
        descriptor = os.pidfd_open(server.pid)
        try:
            assert not ended(descriptor, 0.3)
        finally:
            os.close(descriptor)
            server.kill()


def test_a_program_that_is_not_there_is_told_by_the_leash() -> None:
    with start_leashed(["/no/such/program"], stderr=subprocess.PIPE) as server:
        _, said = server.communicate(timeout=30)
    assert b"FileNotFoundError" in said


def test_a_server_whose_starter_is_gone_before_it_could_look_never_starts(tmp_path: Path) -> None:
    command = [sys.executable, leash.__file__, "1", "touch", str(tmp_path / "started")]
    assert subprocess.run(command, check=False, timeout=30).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_the_server_is_the_process_that_was_started() -> None:
    command = leashed([sys.executable, "-c", "import os; print(os.getpid()); raise SystemExit(7)"])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    out, _ = process.communicate(timeout=30)
    assert (int(out), process.returncode) == (process.pid, 7)
