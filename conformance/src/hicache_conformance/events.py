"""The supervised child's side of the pipe: one JSON line an event, and a stack where it hangs."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import tempfile
from typing import Any


class Events:
    """Writes events to a descriptor that the supervisor reads.

    Each line is one write and survives whatever kills this process next.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        _die_with_the_supervisor()
        os.set_inheritable(fd, False)  # a server that outlives this process must not keep the pipe open
        self._stacks = tempfile.NamedTemporaryFile(prefix="hicache-stacks-", delete=False)  # noqa: SIM115
        faulthandler.enable(self._stacks, all_threads=True)
        self.tell("stacks", path=self._stacks.name)

    def tell(self, event: str, **fields: Any) -> None:
        """Tell the supervisor."""
        line = json.dumps({"event": event} | fields).encode() + b"\n"
        while line:
            line = line[os.write(self._fd, line) :]

    def watch(self, budget_s: float) -> None:
        """Have every thread's stack written down if the case is still running after this time."""
        faulthandler.dump_traceback_later(budget_s, file=self._stacks)

    def unwatch(self) -> None:
        """The case has ended."""
        faulthandler.cancel_dump_traceback_later()


def _die_with_the_supervisor() -> None:
    """Have the kernel kill this process when the supervisor goes, for a case that hangs would go on for ever.

    Source: prctl(2), PR_SET_PDEATHSIG is 1.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
