"""Rounds that take minutes to hours: each mutant against everything, good backends with ever new seeds."""

from __future__ import annotations

import pytest

from hicache_conformance.mutants import all_mutants
from hicache_conformance.report import Report
from hicache_conformance.runner import Plan, run

GOOD = ["memory", "file"]


def _reached(report: Report) -> None:
    bad = [(r.case.id, r.outcome, r.detail) for r in report.results if r.outcome in ("fail", "not-run")]
    assert (report.unusable, bad) == ("", []), f"seed {report.seed}"
    assert report.exit_status == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("round_", range(2))
@pytest.mark.parametrize("backend", GOOD)
def test_a_good_backend_passes_with_a_fresh_seed(backend: str, round_: int) -> None:
    if backend == "file":
        pytest.importorskip("hicache_file")
    _reached(run(Plan(subject=backend)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_store_that_does_not_evict_passes() -> None:
    _reached(run(Plan(subject="memory", options=["eviction=none"], levels=["core", "evict", "threads"])))


@pytest.mark.soak
@pytest.mark.parametrize("round_", range(20))
@pytest.mark.parametrize("backend", GOOD)
def test_soak_a_good_backend_passes_twenty_fresh_seeds(backend: str, round_: int) -> None:
    if backend == "file":
        pytest.importorskip("hicache_file")
    _reached(run(Plan(subject=backend)))


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(all_mutants()))
def test_soak_a_mutant_is_caught_by_the_whole_suite(name: str) -> None:
    mutant = all_mutants()[name]
    report = run(
        Plan(subject=f"mutant={name}", case_budget_s=20.0 if mutant.hazard else None, recovery_s=5.0)
    )
    clauses = {clause for r in report.results if r.outcome == "fail" for clause in r.case.clauses}
    assert report.unusable == ""
    assert mutant.clause in clauses or (mutant.hazard and clauses)
