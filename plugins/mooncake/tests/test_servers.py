"""The servers that the harness starts."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

_HOLDER = """
import sys
from hicache_mooncake._servers import Master
print(*Master().start().pids, flush=True)
sys.stdin.read()
"""


def test_a_master_ends_with_a_harness_that_is_killed(real):
    command = [sys.executable, "-c", _HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        held = [os.pidfd_open(int(pid)) for pid in holder.stdout.readline().split()]
        assert held
        try:
            assert not select.select(held, [], [], 0.0)[0]
            holder.kill()
            for descriptor in held:
                assert select.select([descriptor], [], [], 10.0)[0], "it lives on"
        finally:
            for descriptor in held:
                if not select.select([descriptor], [], [], 0.0)[0]:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                os.close(descriptor)
