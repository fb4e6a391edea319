"""Streams: where loads and stores run, in order, beside the engine's own work.

On a GPU a stream is the device's; elsewhere it is a worker thread. Above this
file there is one code path: ``submit`` work, get a ticket, ``wait`` for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol


class Ticket:
    """One piece of work on a stream."""

    __slots__ = ("done", "error", "ready")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None
        #: Waits for the device where the work only put copies on a queue of it.
        self.ready: Callable[[], object] | None = None

    def wait(self, timeout_s: float) -> bool:
        """True when the work is done and did not fail; False when it failed or timeout_s passed."""
        if not self.done.wait(timeout_s) or self.error is not None:
            return False
        if self.ready is not None:
            self.ready()
        return True


class Stream(Protocol):
    """Work in the order in which it was submitted."""

    def submit(self, work: Callable[[], object]) -> Ticket:
        """Put work on the stream; its exceptions go into the ticket."""

    def close(self, timeout_s: float) -> bool:
        """Take no more work; True when all of it is done."""


class ThreadStream:
    """A worker thread; with ``device`` each piece of work runs on a CUDA stream of its own."""

    def __init__(self, name: str, device: Any = None) -> None:
        self._work: SimpleQueue[tuple[Callable[[], object], Ticket] | None] = SimpleQueue()
        self._device = device
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> Ticket:
        ticket = Ticket()
        self._work.put((work, ticket))
        return ticket

    def close(self, timeout_s: float) -> bool:
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        run = self._on_host if self._device is None else self._on_device()
        while (item := self._work.get()) is not None:
            work, ticket = item
            try:
                run(work, ticket)
            except BaseException as error:  # noqa: BLE001 - whoever waits for the ticket is told
                ticket.error = error
            ticket.done.set()
            del item, work, ticket

    @staticmethod
    def _on_host(work: Callable[[], object], ticket: Ticket) -> None:
        work()

    def _on_device(self) -> Callable[[Callable[[], object], Ticket], None]:
        import torch

        stream = torch.cuda.Stream(self._device)

        def run(work: Callable[[], object], ticket: Ticket) -> None:
            # What the engine wrote before it asked must be seen, and what is written here before it goes on.
            stream.wait_stream(torch.cuda.default_stream(self._device))
            with torch.cuda.stream(stream):
                work()
                event = torch.cuda.Event()
                event.record(stream)
            ticket.ready = event.synchronize

        return run


def stream_for(device: str, name: str) -> ThreadStream:
    """Give a stream for memory on a device, for example ``cpu`` or ``cuda:0``."""
    return ThreadStream(name, device if device.startswith("cuda") else None)
