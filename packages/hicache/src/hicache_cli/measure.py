"""Measuring contestants: rounds in rotating order, every process and thread in step.

In a round each contestant sets all its batches and then gets them back; all
threads do nothing but calls, so the rate of a round is its bytes by the time from
the first thread's first call to the last one's last. That leaves no room for
verifying between calls: round 0, which warms up and does not count, gives each
page content of its own and verifies every byte; in later rounds a slot keeps its
content from batch to batch, and each thread's last batch is verified.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from multiprocessing.connection import Connection
from typing import Any, Protocol

from hicache_cli.contestants import Contestant, Entry, Plan
from hicache_cli.pagebytes import PageBytes
from hicache_cli.player import Slots
from hicache_core.errors import HiCacheError

#: Verbs in the order in which a round has them.
VERBS = ("set", "get")

#: Seconds that the other processes may take to reach the same point.
_STEP_S = 600.0

_OTHER_FAILED = "another process failed"


class Step(Protocol):
    """A point that all processes pass together."""

    def wait(self) -> int:
        """Wait for the others."""


@dataclass(frozen=True, slots=True)
class Span:
    """One verb in one round: when it began and ended, each call's seconds."""

    started_s: float
    """time.monotonic(): one clock for all processes of a machine."""
    ended_s: float
    calls: list[float]

    def joined(self, other: Span) -> Span:
        """Span both."""
        started_s, ended_s = min(self.started_s, other.started_s), max(self.ended_s, other.ended_s)
        return Span(started_s, ended_s, self.calls + other.calls)


class ProcessFailed(HiCacheError):
    """A process of a benchmark could not do its part."""


@dataclass(slots=True)
class Series:
    """What one contestant did."""

    spans: dict[str, list[Span]] = field(default_factory=lambda: {verb: [] for verb in VERBS})
    """By verb: each round that counts."""
    wrong: int = 0
    troubles: Counter[str] = field(default_factory=Counter)

    def merge(self, other: Series) -> None:
        """Add another process's threads."""
        for verb in VERBS:
            mine, theirs = self.spans[verb], other.spans[verb]
            self.spans[verb] = [a.joined(b) for a, b in zip(mine, theirs, strict=True)] if mine else theirs
        self.wrong += other.wrong
        self.troubles += other.troubles

    def rates(self, verb: str, call_nbytes: int) -> list[float]:
        """Give bytes a second of each round."""
        return [len(span.calls) * call_nbytes / (span.ended_s - span.started_s) for span in self.spans[verb]]

    def seconds(self, verb: str) -> list[float]:
        """Give the seconds of every call, sorted."""
        return sorted(seconds for span in self.spans[verb] for seconds in span.calls)


def measure(plan: Plan, entries: Sequence[Entry], progress: Callable[[], None]) -> dict[str, Series]:
    """Run a plan; ``progress`` hears of each contestant's round.

    Raises:
        HiCacheError: a store that does not open; a process that ended early.
    """
    if plan.processes == 1:
        return _run(plan, entries, 0, _Alone(), progress)
    return _run_apart(plan, entries, progress)


class _Alone:
    def wait(self) -> int:
        return 0


def _run(
    plan: Plan, entries: Sequence[Entry], process: int, step: Step, progress: Callable[[], None]
) -> dict[str, Series]:
    """Take part as one process of a plan."""
    threads = [_Thread(plan, number) for number in range(plan.threads)]
    contestants = [entry.make() for entry in entries]
    series = {contestant.name: Series() for contestant in contestants}
    try:
        for contestant in contestants:
            contestant.open(plan, [thread.slots for thread in threads])
        for number in range(plan.rounds + 1):
            turn = number % len(contestants)
            for contestant in contestants[turn:] + contestants[:turn]:
                mine = series[contestant.name]
                label = f"{number}/{process}"
                for verb in VERBS:
                    step.wait()
                    span = _phase(contestant, verb, threads, label, warm_up=number == 0)
                    if number:
                        mine.spans[verb].append(span)
                step.wait()
                if process == 0:
                    contestant.forget()
                    progress()
        for contestant in contestants:
            series[contestant.name].troubles = contestant.troubles
            series[contestant.name].wrong = sum(thread.wrong[contestant.name] for thread in threads)
        return series
    finally:
        for contestant in contestants:
            contestant.close()


def _phase(
    contestant: Contestant, verb: str, threads: Sequence[_Thread], label: str, *, warm_up: bool
) -> Span:
    """Let every thread do one verb's batches at the same time."""
    for thread in threads:
        thread.prepare(verb, label)
    if len(threads) == 1:
        threads[0].run(contestant, verb, warm_up)
    else:
        started = [
            threading.Thread(target=thread.run, args=(contestant, verb, warm_up), daemon=True)
            for thread in threads
        ]
        for each in started:
            each.start()
        for each in started:
            each.join()
    spans = [thread.finish(contestant.name, verb) for thread in threads]
    return reduce(Span.joined, spans)


class _Thread:
    """One thread's slots, and what it times with them."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.slots = Slots(plan.page_nbytes, plan.batch)
        self.wrong: Counter[str] = Counter()
        self._plan = plan
        self._number = number
        self._contents = PageBytes(plan.page_nbytes)
        self._bodies = [PageBytes.hash_of(f"slot {number}/{i}") for i in range(plan.batch)]
        self._names: list[list[str]] = []
        self._stamped: list[str] = []
        self._span = Span(0.0, 0.0, [])
        self._failure: BaseException | None = None
        self._warmed_up = False

    def prepare(self, verb: str, label: str) -> None:
        """Name the pages of all batches; for a set fill the slots, for a get wipe them."""
        mine = range(self._plan.batches)
        pages = range(self._plan.batch)
        self._names = [
            [PageBytes.hash_of(f"{label}/{self._number}/{batch}/{i}") for i in pages] for batch in mine
        ]
        if verb == "set":
            for slot, body in zip(self.slots.views, self._bodies, strict=True):
                self._contents.fill(slot, body)
            self._stamp(self._names[0])
        else:
            self.slots.wipe(self._plan.batch)

    def run(self, contestant: Contestant, verb: str, warm_up: bool) -> None:
        """Do all batches of one verb; whatever it raises is kept for ``finish``."""
        call = contestant.set if verb == "set" else contestant.get
        clock, calls = time.perf_counter, []
        started_s = time.monotonic()
        try:
            for batch, hashes in enumerate(self._names):
                if warm_up and verb == "set":
                    self._stamp(hashes)
                began = clock()
                call(self._number, batch, hashes, self.slots.all)
                calls.append(clock() - began)
                if warm_up and verb == "get":
                    self.wrong[contestant.name] += self._wrong(hashes)
                    self.slots.wipe(self._plan.batch)
        except BaseException as error:  # noqa: BLE001 - raised again by finish(), in the main thread
            self._failure = error
        self._span = Span(started_s, time.monotonic(), calls)
        self._warmed_up = warm_up

    def finish(self, name: str, verb: str) -> Span:
        """Verify what a counted round left in the slots; give the span, or raise what went wrong."""
        if self._failure is not None:
            raise self._failure
        if verb == "get" and not self._warmed_up:
            self.wrong[name] += self._wrong(self._stamped)
        return self._span

    def _stamp(self, hashes: list[str]) -> None:
        self._stamped = hashes
        for slot, page_hash in zip(self.slots.views, hashes, strict=True):
            self._contents.stamp(slot, page_hash)

    def _wrong(self, stamps: Sequence[str]) -> int:
        """Count the slots that do not hold what was set under these stamps, byte for byte."""
        slots = zip(self.slots.views, stamps, self._bodies, strict=True)
        return sum(not self._contents.matches(slot, stamp, filled_as=body) for slot, stamp, body in slots)


def _run_apart(plan: Plan, entries: Sequence[Entry], progress: Callable[[], None]) -> dict[str, Series]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(plan.processes, timeout=_STEP_S)
    processes, ours = [], []
    try:
        for number in range(plan.processes):
            near, far = context.Pipe()
            arguments = (far, plan, entries, number, barrier)
            process = context.Process(target=_process, args=arguments, daemon=True)
            process.start()
            far.close()
            processes.append(process)
            ours.append(near)
        total: dict[str, Series] = {entry.name: Series() for entry in entries}
        failures = []
        for number, connection in enumerate(ours):
            try:
                for name, series in _result(number, connection, progress).items():
                    total[name].merge(series)
            except ProcessFailed as error:
                failures.append(error)
        if failures:
            raise next((error for error in failures if error.value != _OTHER_FAILED), failures[0])
        return total
    finally:
        for connection in ours:
            connection.close()
        for process in processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()


def _result(number: int, connection: Connection, progress: Callable[[], None]) -> dict[str, Series]:
    while True:
        try:
            kind, value = connection.recv()
        except EOFError as error:
            raise ProcessFailed(
                f"process {number} of the benchmark ended without a result",
                remedy="Its lines above may say why; where memory is short, use fewer --processes.",
            ) from error
        if kind == "result":
            return dict(value)
        if kind == "error":
            raise ProcessFailed(f"process {number} of the benchmark failed", value=value)
        progress()


def _process(connection: Connection, plan: Plan, entries: Sequence[Entry], number: int, barrier: Any) -> None:
    """Be one process of a plan; a failure breaks the barrier, so that the others do not wait for it."""
    try:
        series = _run(plan, entries, number, barrier, lambda: connection.send(("progress", None)))
        connection.send(("result", series))
    except HiCacheError as error:
        barrier.abort()
        connection.send(("error", str(error)))
    except threading.BrokenBarrierError:
        connection.send(("error", _OTHER_FAILED))
    except BaseException:
        barrier.abort()
        raise
    finally:
        connection.close()
