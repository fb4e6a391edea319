"""Report: what a run found, keyed by every version that mattered, and its machine-readable forms.

The JSON form is described in docs/conformance-report.md; SCHEMA moves with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from xml.etree import ElementTree

from hicache_conformance.cases import LEVELS, OUTCOMES, Case, Outcome

#: Raised when a field changes its meaning or goes; new fields do not move it.
SCHEMA = 1

#: Between why a case was lost with its process, and the end of what the process had printed.
OUTPUT_FOLLOWS = "\noutput ends:\n"

Verdict = Literal["reached", "not reached", "unsupported"]


@dataclass(slots=True)
class Result:
    """One case and what became of it."""

    case: Case
    outcome: Outcome
    detail: str
    seconds: float


@dataclass(slots=True)
class Report:
    """A run, as far as it came; ``unusable`` says why it could not begin."""

    subject: str
    seed: int
    levels: Sequence[str]
    versions: dict[str, str]
    started: str
    options: Sequence[str] = ()
    """Names of the options given; their values may be secrets."""
    seconds: float = 0.0
    unusable: str = ""
    description: dict[str, Any] = field(default_factory=dict)
    capabilities: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def of_level(self, level: str) -> list[Result]:
        """Give the results of one level."""
        return [result for result in self.results if result.case.level == level]

    def counts(self, level: str | None = None) -> dict[str, int]:
        """Count outcomes, of one level or of all."""
        found = [r.outcome for r in self.results if level in (None, r.case.level)]
        return {outcome: found.count(outcome) for outcome in OUTCOMES}

    def verdict(self, level: str) -> Verdict:
        """A level is reached when nothing in it failed or was not run, and something passed."""
        counts = self.counts(level)
        if counts["fail"] or counts["not-run"]:
            return "not reached"
        return "reached" if counts["pass"] else "unsupported"

    def present(self) -> list[str]:
        """Give the levels that have results, in order."""
        return [level for level in LEVELS if self.of_level(level)]

    @property
    def exit_status(self) -> int:
        """0 when every level is reached or unsupported, 1 when one is not, 2 when nothing could be run."""
        if self.unusable or not self.results:
            return 2
        return int(any(self.verdict(level) == "not reached" for level in self.present()))

    @property
    def capabilities_sha256(self) -> str:
        """Name the exact promises that were proven."""
        return hashlib.sha256(json.dumps(self.capabilities, sort_keys=True).encode()).hexdigest()

    def badge(self) -> tuple[str, bool]:
        """Give the badge's words and whether it is good news."""
        levels = [level for level in self.present() if self.verdict(level) != "unsupported"]
        reached = sum(self.verdict(level) == "reached" for level in levels)
        return f"{reached}/{len(levels)} levels", self.exit_status == 0


def to_json(report: Report) -> str:
    """Write the documented JSON form."""
    document = {
        "schema": SCHEMA,
        "subject": report.subject,
        "backend": report.description,
        "versions": report.versions,
        "capabilities": report.capabilities,
        "capabilities_sha256": report.capabilities_sha256,
        "options_given": list(report.options),
        "seed": report.seed,
        "started": report.started,
        "seconds": round(report.seconds, 3),
        "unusable": report.unusable or None,
        "exit_status": report.exit_status,
        "levels": {
            level: {"verdict": report.verdict(level), "counts": report.counts(level)}
            for level in report.present()
        },
        "cases": [
            {
                "id": result.case.id,
                "level": result.case.level,
                "clauses": list(result.case.clauses),
                "needs": list(result.case.needs),
                "faults": list(result.case.faults),
                "outcome": result.outcome,
                "seconds": round(result.seconds, 3),
                "detail": result.detail,
            }
            for result in report.results
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def to_junit(report: Report) -> str:
    """Write JUnit's XML, a suite a level."""
    root = ElementTree.Element("testsuites", name=f"hicache check {report.subject}")
    if report.unusable:
        suite = ElementTree.SubElement(root, "testsuite", name="start", tests="1", errors="1")
        case = ElementTree.SubElement(suite, "testcase", name="start", classname="hicache")
        ElementTree.SubElement(case, "error", message=_xml(report.unusable))
    for level in report.present():
        counts = report.counts(level)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=level,
            tests=str(sum(counts.values())),
            failures=str(counts["fail"]),
            errors="0",
            skipped=str(counts["unsupported"] + counts["not-run"]),
            time=f"{sum(result.seconds for result in report.of_level(level)):.3f}",
        )
        for result in report.of_level(level):
            _add_case(suite, result)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _add_case(suite: ElementTree.Element, result: Result) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        name=result.case.id,
        classname=f"hicache.{result.case.level}",
        time=f"{result.seconds:.3f}",
    )
    if result.outcome == "fail":
        message = _xml(headline(result.detail))
        ElementTree.SubElement(case, "failure", message=message).text = _xml(result.detail)
    elif result.outcome != "pass":
        ElementTree.SubElement(case, "skipped", message=_xml(f"{result.outcome}: {result.detail}"))


def headline(text: str) -> str:
    """Give the line that says what was wrong: the first of pytest's ``E`` lines, or the first of all.

    The first is that of a case that was lost with its process; its stacks and its output follow.
    """
    told, _, _ = text.partition(OUTPUT_FOLLOWS)
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return (marked or lines or [""])[0][:300]


def _xml(text: str) -> str:
    """Drop what XML 1.0 cannot hold."""
    return "".join(c for c in text if c in "\t\n\r" or " " <= c < "\ud800" or "\ue000" <= c < "\ufffe")
