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
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

_PR_SET_PDEATHSIG = 1

_lock = threading.Lock()
#: The queue of the thread that starts servers, and the process that it is of.
_starter: tuple[int, SimpleQueue[Callable[[], None]]] | None = None


def leashed(command: Sequence[str]) -> list[str]:
    """Give a command that runs ``command`` in the same process, which is killed when the caller's ends.

    The kernel goes by the thread that starts it: that one has to live as long as the server, as with
    ``start_leashed`` it does.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def start_leashed(command: Sequence[str], **given: Any) -> subprocess.Popen[Any]:
    """Start ``leashed(command)`` from whatever thread, which may end before this process does.

    Args:
        given: for subprocess.Popen.

    Raises:
        OSError: as Popen.
    """
    import subprocess  # not for the program that this file is as well

    started: SimpleQueue[subprocess.Popen[Any] | BaseException] = SimpleQueue()

    def start() -> None:
        try:
            started.put(subprocess.Popen(leashed(command), **given))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            started.put(error)

    _queue().put(start)
    outcome = started.get()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _queue() -> SimpleQueue[Callable[[], None]]:
    global _starter
    with _lock:
        if _starter is None or _starter[0] != os.getpid():  # in a fork's child the thread is not there
            queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
            threading.Thread(target=_serve, args=(queue,), name="hicache-leash", daemon=True).start()
            _starter = (os.getpid(), queue)
        return _starter[1]


def _serve(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        queue.get()()


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
