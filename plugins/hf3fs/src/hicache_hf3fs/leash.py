"""``python -m hicache_hf3fs.leash PID ...``: the metadata server for tests, which ends when process PID does.

A harness that is killed cannot stop its server, and a server that is stopped at that moment cannot notice by
itself, so the kernel is asked. It goes by the thread that started the server: that one has to live as long.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from hicache_hf3fs.metadata_server import main as serve

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends; at once, where it has ended already.

    Source: prctl(2), which tells nothing of a parent that was gone before the call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Tie the server to its parent, then serve."""
    end_with(int(sys.argv[1]))
    serve(sys.argv[2:])


if __name__ == "__main__":
    main()
