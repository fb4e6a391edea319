"""The supervisor: runs the cases in a child process that may hang, crash or babble, and always ends.

A child runs pytest on suite.py and writes an event a step to a pipe. When a case
outlives its budget the child's whole process group is killed; when the child
dies, the case that was running has failed; either way a new child goes on with
the rest. Output of the child is read and all but its tail thrown away. What the
child made in its temporary folder goes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from hicache_conformance.cases import Case
from hicache_conformance.report import OUTPUT_FOLLOWS, Report, Result

#: For an interpreter, pytest and the backend's imports, on a busy machine; and for a harness to stop.
_BETWEEN_CASES_S = 120.0
#: Between the moment a case's stacks are written and the kill.
_GRACE_S = 3.0
#: Variables that would make a report depend on where it was made; with CI or BUILD_NUMBER set pytest writes
#: out whole differences, which of pages takes longer than the case.
_PYTEST_LISTENS_TO = frozenset({"PYTEST_ADDOPTS", "CI", "BUILD_NUMBER"})

#: After so many killed or crashed children nobody learns anything new.
_MAX_LOST = 4
_TAIL_NBYTES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    subject: str
    """``kind=value``, or a backend's name."""
    options: Sequence[str] = ()
    """``k=v`` texts."""
    levels: Sequence[str] = ()
    clauses: Sequence[str] = ()
    match: str = ""
    """Only cases whose names match, in pytest's -k language."""
    seed: int | None = None
    budget_s: float = 600.0
    """Seconds for everything; what has not been run by then is reported as not run."""
    case_budget_s: float | None = None
    """Cap on each case's own budget."""
    first_failure: bool = False
    """Stop at the first failed case."""
    recovery_s: float = 30.0
    """Seconds for a storage to work again after its server does."""
    slack_s: float = 2.0
    """Seconds beyond a deadline that a busy machine is allowed."""


def run(plan: Plan, on_result: Callable[[Result], None] = lambda _: None) -> Report:
    """Run the suite on a subject, whatever it does, and report within the budget (and one kill)."""
    seed = random.SystemRandom().randrange(1 << 32) if plan.seed is None else plan.seed
    report = Report(
        subject=plan.subject,
        seed=seed,
        levels=plan.levels,
        versions=_versions(),
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        options=[text.partition("=")[0] for text in plan.options],
    )
    started = time.monotonic()
    _Supervisor(replace(plan, seed=seed), report, on_result).run(started + plan.budget_s)
    report.seconds = time.monotonic() - started
    return report


class _Supervisor:
    """One run: its children, one after another, and what they told."""

    def __init__(self, plan: Plan, report: Report, on_result: Callable[[Result], None]) -> None:
        self._plan = plan
        self._report = report
        self._on_result = on_result
        self._cases: dict[str, Case] = {}
        self._done: set[str] = set()
        self._running: Case | None = None
        self._running_since = 0.0
        self._starting = False
        self._planned = False
        self._stacks: Path | None = None

    def run(self, deadline: float) -> None:
        lost = 0
        while not self._report.unusable:
            reason = self._child(deadline)
            if not reason:
                break
            self._lose(reason)
            lost += 1
            if not self._cases or len(self._done) == len(self._cases) or time.monotonic() >= deadline:
                break
            if lost == _MAX_LOST:
                self._give_up(f"{lost} cases before it ended the process")
        if time.monotonic() >= deadline:
            self._give_up(f"the budget of {self._plan.budget_s:g} s was spent")
        self._give_up("the run ended before it")

    def _child(self, deadline: float) -> str:
        """Run one child; give the reason why it was lost, or '' when it ended in good order."""
        folder = Path(tempfile.mkdtemp(prefix="hicache-check-"))
        reader, writer = os.pipe()
        try:
            process = _start(self._plan, folder, writer, self._done)
            os.close(writer)
            writer = -1
            with _Watched(process, reader) as watched:
                reason = self._watch(watched, deadline)
                tail = watched.tail()
            if reason and self._stacks and self._stacks.exists():
                stacks = self._stacks.read_text(errors="replace")[-_TAIL_NBYTES:]
                reason = f"{reason}\n{stacks}" if stacks else reason
            return f"{reason}{OUTPUT_FOLLOWS}{tail}" if reason and tail else reason
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)
            shutil.rmtree(folder, ignore_errors=True)

    def _watch(self, watched: _Watched, deadline: float) -> str:
        idle_since = time.monotonic()
        while True:
            limit = min(deadline, self._case_deadline() if self._running else idle_since + _BETWEEN_CASES_S)
            lines = watched.lines(limit)
            for line in lines or ():
                self._hear(json.loads(line))
                idle_since = time.monotonic()
            if self._report.unusable:
                return ""
            if lines is None:
                return watched.ending(bool(self._running) or not self._planned)
            if time.monotonic() >= limit:
                if time.monotonic() >= deadline:
                    return "the budget was spent while it ran"
                seconds = time.monotonic() - (self._running_since or idle_since)
                return f"still running after {seconds:.0f} s: killed"

    def _case_deadline(self) -> float:
        assert self._running is not None
        return self._running_since + self._budget_of(self._running) + _GRACE_S

    def _budget_of(self, case: Case) -> float:
        return min(case.budget_s, self._plan.case_budget_s or case.budget_s)

    def _hear(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "plan":
            self._planned = True
            for case in event["cases"]:
                made = Case.of_json(case)
                self._cases.setdefault(made.id, made)
        elif kind == "stacks":
            self._stacks = Path(event["path"])
        elif kind == "start":
            self._running, self._running_since = self._cases[event["id"]], time.monotonic()
        elif kind == "end" and self._running is not None:
            self._settle(self._running, event["outcome"], event["detail"])
        elif kind == "unusable":
            self._report.unusable = event["reason"]
        elif kind in ("starting", "started"):
            self._starting = kind == "starting"
            self._report.description = event or self._report.description
        elif kind == "opened":
            self._report.capabilities = event["capabilities"]

    def _lose(self, reason: str) -> None:
        if self._starting:
            self._report.unusable = f"bringing up its store: {reason.splitlines()[0]}"
        elif self._running is not None:
            self._settle(self._running, "fail", reason)
        elif not self._planned:
            first, *rest = [line for line in reason.splitlines() if line.strip()]
            self._report.unusable = f"{first}; {rest[-1].strip()}" if rest else first

    def _settle(self, case: Case, outcome: Any, detail: str) -> None:
        result = Result(case, outcome, detail, time.monotonic() - self._running_since)
        self._running, self._running_since = None, 0.0
        self._done.add(case.id)
        self._report.results.append(result)
        self._on_result(result)

    def _give_up(self, reason: str) -> None:
        if self._report.unusable:
            return
        for case in self._cases.values():
            if case.id not in self._done:
                self._running_since = time.monotonic()
                self._settle(case, "not-run", reason)


class _Watched:
    """A child, its events and its output; entering starts reading, leaving kills whatever is left of it."""

    def __init__(self, process: subprocess.Popen[bytes], events: int) -> None:
        self._process = process
        self._events = events
        self._unread = b""
        self._tail = b""
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Watched:
        self._selector.register(self._events, selectors.EVENT_READ)
        if self._process.stdout is not None:
            self._selector.register(self._process.stdout, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        # The group holds the servers that the harness started; one that is stopped dies all the same.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._drain()
        self._selector.close()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def lines(self, limit: float) -> list[bytes] | None:
        """Wait for events until the limit; None once the child has closed its end."""
        for key, _ in self._selector.select(max(0.0, min(limit - time.monotonic(), 1.0))):
            data = os.read(key.fd, 1 << 16)
            if key.fd != self._events:
                self._tail = (self._tail + data)[-_TAIL_NBYTES:]
                if not data:
                    self._selector.unregister(key.fileobj)
                continue
            if not data:
                return None
            *whole, self._unread = (self._unread + data).split(b"\n")
            return whole
        return []

    def ending(self, unexpected: bool) -> str:
        """Tell why a child that has closed its end is lost, or '' if it ended as it should."""
        try:
            code = self._process.wait(_GRACE_S * 10)
        except subprocess.TimeoutExpired:
            return "its process does not end"
        if code < 0:
            return f"its process died of {signal.Signals(-code).name}"
        return f"its process ended with status {code}" if unexpected else ""

    def tail(self) -> str:
        """Give the end of the child's output."""
        self._drain()
        return self._tail.decode(errors="replace").strip()

    def _drain(self) -> None:
        """Read what is there, and no more: a process that left the group may still hold the pipe."""
        pipe = self._process.stdout
        if pipe is None or pipe.closed:
            return
        os.set_blocking(pipe.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                data = os.read(pipe.fileno(), 1 << 16)
                if not data:
                    break
                self._tail = (self._tail + data)[-_TAIL_NBYTES:]


def _start(plan: Plan, folder: Path, events: int, done: set[str]) -> subprocess.Popen[bytes]:
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "done").write_text("\n".join(sorted(done)))
    suite = Path(__file__).with_name("suite.py")
    # Nothing of the place where it is run: no ini file, no conftest, no other plugin, no cache.
    command = [sys.executable, "-m", "pytest", str(suite), "-p", "hicache-conformance", "-c", "pytest.ini"]
    command += ["--rootdir", str(folder), "--noconftest", "-p", "no:cacheprovider", "--import-mode=importlib"]
    command += ["-s", "-q", "--no-header", "--no-summary", "--tb=short"]
    command += ["--hicache-subject", plan.subject if "=" in plan.subject else f"backend={plan.subject}"]
    command += [f"--hicache-option={text}" for text in plan.options]
    command += [f"--hicache-level={level}" for level in plan.levels]
    command += [f"--hicache-clause={clause}" for clause in plan.clauses]
    command += [f"--hicache-seed={plan.seed}", f"--hicache-slack={plan.slack_s}"]
    command += [f"--hicache-recovery={plan.recovery_s}", "-k", plan.match]
    command += [f"--hicache-events={events}", f"--hicache-done={folder / 'done'}"]
    if plan.first_failure:
        command.append("--exitfirst")
    if plan.case_budget_s:
        command.append(f"--hicache-case-budget={plan.case_budget_s}")
    environment = {name: value for name, value in os.environ.items() if name not in _PYTEST_LISTENS_TO}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[events],
        start_new_session=True,
    )


def _versions() -> dict[str, str]:
    return {
        "suite": metadata.version("hicache-conformance"),
        "core": metadata.version("hicache-core"),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
    }
