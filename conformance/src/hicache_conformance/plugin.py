"""The pytest plugin: options, the ``bench`` fixture, and outcomes by level.

``pytest --hicache-backend NAME --hicache-option k=v`` runs the whole suite; a
plugin's own module runs it with two lines::

    from hicache_conformance import Conformance
    class TestConformance(Conformance): backend = "file"

Run by ``hicache check``, it tells each step to the supervisor over a pipe.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before the levels are imported: their asserts are what a report quotes.
pytest.register_assert_rewrite("hicache_conformance.levels", "hicache_conformance.bench")

from hicache_conformance.bench import Bench, Site  # noqa: E402
from hicache_conformance.cases import (  # noqa: E402
    LEVELS,
    OUTCOMES,
    Case,
    Outcome,
    case_of,
    not_run,
    outcome_of_skip,
    unsupported,
)
from hicache_conformance.events import Events  # noqa: E402
from hicache_conformance.refusals import REFUSALS  # noqa: E402
from hicache_conformance.subject import Subject, find_subject, reason_of  # noqa: E402
from hicache_core import HiCacheError  # noqa: E402
from hicache_core.errors import BackendIncompatible  # noqa: E402

_RUN = pytest.StashKey["_Run"]()
_FAILED = pytest.StashKey[bool]()

#: Characters of a failure's text that a report keeps.
MAX_DETAIL = 20_000


class _Run:
    """What one pytest run knows: its sites, its results, and the supervisor's pipe if there is one."""

    def __init__(self, config: pytest.Config) -> None:
        seed: int | None = config.getoption("hicache_seed")
        self.seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
        self.slack_s: float = config.getoption("hicache_slack")
        self.recovery_s: float = config.getoption("hicache_recovery")
        self.sites: dict[str, Site] = {}
        self.unusable: dict[str, str] = {}
        #: By node id: several classes, each with its own backend, may run the same cases.
        self.outcomes: dict[str, tuple[Case, Outcome, str]] = {}
        fd: int | None = config.getoption("hicache_events")
        self.events = Events(fd) if fd is not None else None

    def tell(self, event: str, **fields: Any) -> None:
        if self.events is not None:
            self.events.tell(event, **fields)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hicache", "hicache conformance")
    group.addoption("--hicache-backend", metavar="NAME", help="prove this backend")
    group.addoption(
        "--hicache-option", action="append", default=[], metavar="K=V", help="an option of the backend"
    )
    group.addoption(
        "--hicache-level", action="append", default=[], choices=LEVELS, help="only this level; repeatable"
    )
    group.addoption(
        "--hicache-clause", action="append", default=[], metavar="C2", help="only this clause; repeatable"
    )
    group.addoption(
        "--hicache-seed", type=int, help="seed of all page contents and orders; random without it"
    )
    group.addoption(
        "--hicache-slack",
        type=float,
        default=2.0,
        help="seconds allowed beyond a deadline on a busy machine (2)",
    )
    group.addoption(
        "--hicache-recovery",
        type=float,
        default=30.0,
        help="seconds to work again after the server does (30)",
    )
    group.addoption("--hicache-required", action="store_true", help="what cannot be run fails")
    group.addoption("--hicache-subject", metavar="KIND=VALUE", help="prove something other than a backend")
    group.addoption(
        "--hicache-case-budget", type=float, metavar="S", help="for hicache check: cap on each case"
    )
    group.addoption("--hicache-events", type=int, metavar="FD", help="for hicache check")
    group.addoption("--hicache-done", type=Path, metavar="FILE", help="for hicache check: cases to leave out")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "clause(name): the clause of the contract that the test proves",
        "needs(capability): unsupported where the backend does not declare it",
        "faults(power): unsupported where the harness cannot do it",
        "budget(seconds): how long it may take before it counts as hanging",
    ):
        config.addinivalue_line("markers", line)
    config.stash[_RUN] = _Run(config)
    given = config.getoption("hicache_backend") or config.getoption("hicache_subject")
    if given and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(Path(__file__).with_name("suite.py"))]


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"hicache: seed {config.stash[_RUN].seed}"] if _reference(config) else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    levels, clauses = config.getoption("hicache_level"), config.getoption("hicache_clause")
    done_file: Path | None = config.getoption("hicache_done")
    done = set(done_file.read_text().split("\n")) if done_file else set()
    ours = [item for item in items if _is_case(item)]
    dropped = []
    for item in ours:
        case = case_of(item)
        wrong_level = levels and case.level not in levels
        wrong_clause = clauses and not set(clauses) & set(case.clauses)
        if wrong_level or wrong_clause or case.id in done:
            dropped.append(item)
    chosen = sorted((i for i in ours if i not in dropped), key=lambda item: LEVELS.index(case_of(item).level))
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    # Cases keep the places that cases had, so that other tests stay where they are.
    places = iter(chosen)
    items[:] = [next(places, None) if _is_case(item) else item for item in items]  # type: ignore[misc]
    items[:] = [item for item in items if item is not None]


def pytest_collection_finish(session: pytest.Session) -> None:
    # Only now has everybody's filter been applied, pytest's own -k included.
    cases = [case_of(item).as_json() for item in session.items if _is_case(item)]
    session.config.stash[_RUN].tell("plan", cases=cases)


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A workplace on the store under test, for one test."""
    site = _site(request)
    case = case_of(request.node)
    _require(site, case)
    made = Bench(site)
    try:
        yield made
    finally:
        made.close(failed=request.node.stash.get(_FAILED, False))


def _site(request: pytest.FixtureRequest) -> Site:
    config, owner = request.config, request.cls
    run = config.stash[_RUN]
    own: Subject | None = getattr(owner, "subject", None)
    reference = own.name if own else getattr(owner, "backend", None) or _reference(config)
    if not reference:
        raise pytest.UsageError("no backend: set `backend` on the class, or pass --hicache-backend NAME")
    given = dict(getattr(owner, "options", {})) | parse_options(config.getoption("hicache_option"))
    name = f"{reference} {json.dumps(given, sort_keys=True, default=str)}"
    if name in run.unusable:
        pytest.fail(run.unusable[name], pytrace=False)
    if name not in run.sites:
        try:
            required = config.getoption("hicache_required")
            run.sites[name] = _bring_up(run, own or reference, given, required=required)
        except (HiCacheError, ImportError, AttributeError) as error:
            run.unusable[name] = reason_of(error)
            if not isinstance(error, BackendIncompatible):
                run.tell("unusable", reason=reason_of(error))
            raise
        request.session.addfinalizer(run.sites[name].stop)
    return run.sites[name]


def _bring_up(run: _Run, found: Subject | str, given: dict[str, Any], *, required: bool) -> Site:
    run.tell("starting")
    subject = find_subject(found) if isinstance(found, str) else found
    site = Site(subject, given, run.seed, run.slack_s, run.recovery_s)
    reason = site.harness.available()
    if reason:
        run.tell("unusable", reason=reason)
        if required:
            pytest.fail(f"not-run: {reason}", pytrace=False)
        not_run(reason)
    try:
        site.start()
        run.tell("started", **subject.description(), faults=sorted(site.harness.faults))
        run.tell("opened", capabilities=site.capabilities_json())
    except BaseException:
        site.stop()
        raise
    return site


def _require(site: Site, case: Case) -> None:
    """End the test as unsupported, after trying the refusal, unless all that it needs is declared."""
    for capability in case.needs:
        if getattr(site.capabilities, capability) in (False, "none"):
            if capability in REFUSALS:
                REFUSALS[capability](site)
            unsupported(f"'{capability}' is not declared")
    for power in case.faults:
        if power not in site.harness.faults:
            unsupported(f"the harness cannot '{power}'")
    if "second_process" in case.faults and not site.subject.reference:
        not_run("no other process can find this subject")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not _is_case(item):
        return (yield)
    run, case = item.config.stash[_RUN], case_of(item)
    run.tell("start", id=case.id)
    if run.events is not None:
        cap: float | None = item.config.getoption("hicache_case_budget")
        run.events.watch(min(case.budget_s, cap or case.budget_s))
    result = yield
    if run.events is not None:
        run.events.unwatch()
    _, outcome, detail = run.outcomes.get(item.nodeid, (case, "not-run", "interrupted"))
    run.tell("end", id=case.id, outcome=outcome, detail=detail)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if not _is_case(item):
        return report
    if report.failed:
        item.stash[_FAILED] = True
    required = item.config.getoption("hicache_required")
    if report.skipped and required and isinstance(report.longrepr, tuple):
        outcome, reason = outcome_of_skip(report.longrepr[2])
        if outcome == "not-run":
            report.outcome, report.longrepr = "failed", f"not-run, which --hicache-required forbids: {reason}"
    _record(item.config.stash[_RUN], case_of(item), report)
    return report


def _record(run: _Run, case: Case, report: pytest.TestReport) -> None:
    before = run.outcomes.get(report.nodeid)
    outcome: Outcome = "pass"
    detail = ""
    if report.failed:
        outcome, detail = "fail", _shortened(report.longreprtext)
        if before and before[1] == "fail":
            detail = f"{before[2]}\n{detail}"
    elif report.skipped and isinstance(report.longrepr, tuple):
        outcome, detail = outcome_of_skip(report.longrepr[2])
    elif before:
        return
    run.outcomes[report.nodeid] = (case, outcome, detail)


def _shortened(text: str) -> str:
    """Keep what says what was wrong of a long text, pytest's first ``E`` lines; with CI set it is long."""
    if len(text) <= MAX_DETAIL:
        return text
    half = MAX_DETAIL // 2
    start = max(0, text.find("\nE "))
    end = max(start + half, len(text) - half)
    return f"{text[start : start + half]}\n...\n{text[end:]}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = config.stash[_RUN]
    if not run.outcomes or run.events is not None:
        return
    terminalreporter.section("hicache conformance")
    owners = list(dict.fromkeys(node.rpartition("::")[0] for node in run.outcomes))
    for owner in owners:
        if len(owners) > 1:
            terminalreporter.write_line(f"{owner}:")
        mine = [
            (case, outcome) for node, (case, outcome, _) in run.outcomes.items() if node.startswith(owner)
        ]
        for level in LEVELS:
            found = [outcome for case, outcome in mine if case.level == level]
            if found:
                terminalreporter.write_line(_line(level, found))
    terminalreporter.write_line(f"seed {run.seed}")


def _line(level: str, found: list[Outcome]) -> str:
    counts = ", ".join(f"{found.count(o)} {o}" for o in OUTCOMES if o in found)
    reached = "reached" if "pass" in found else "unsupported"
    reached = "NOT reached" if {"fail", "not-run"} & set(found) else reached
    return f"{level:10} {reached:12} {counts}"


def parse_options(texts: list[str]) -> dict[str, Any]:
    """Read ``k=v`` texts.

    Raises:
        pytest.UsageError: a text without ``=``.
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise pytest.UsageError(f"an option is written k=v, not {text!r}")
        options[name] = value
    return options


def _reference(config: pytest.Config) -> str:
    subject: str | None = config.getoption("hicache_subject")
    backend: str | None = config.getoption("hicache_backend")
    return subject or backend or ""


def _is_case(item: pytest.Item) -> bool:
    # In a run that has nothing to do with the suite it is not even imported.
    module = sys.modules.get("hicache_conformance.conformance")
    owner = getattr(item, "cls", None)
    return module is not None and isinstance(owner, type) and issubclass(owner, module.Conformance)
