"""Servers that end with the harness that started them, however it ends.

A harness that is killed cannot stop its server, and a server that is stopped at
that moment cannot notice by itself, so the kernel is asked, through a program
that then becomes the server: this file, run as ``leash.py PID COMMAND...``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def leashed(command: Sequence[str]) -> list[str]:
    """Give a command that runs ``command`` in the same process, which is killed when the caller's ends.

    The kernel goes by the thread that starts it: that one has to live as long as the server.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends; at once, where it has ended already.

    Source: prctl(2): the wish outlives execve, and tells nothing of a parent that was gone before the call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
