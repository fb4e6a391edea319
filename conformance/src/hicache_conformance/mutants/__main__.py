"""``python -m hicache_conformance.mutants [NAME...]``: mutants against the whole suite, as a Markdown table.

What it prints goes to docs/conformance-soak.md with its date. It takes the
better part of an hour on two cores.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone

from hicache_conformance.mutants import all_mutants
from hicache_conformance.report import Report
from hicache_conformance.runner import Plan, run

_AT_ONCE = 2


def check(name: str) -> Report:
    """Run everything on one mutant."""
    hazard = all_mutants()[name].hazard
    return run(Plan(subject=f"mutant={name}", case_budget_s=10.0 if hazard else None, recovery_s=5.0))


def row(name: str, report: Report) -> tuple[str, bool]:
    """Give its line of the table, and whether a case of its clause has caught it."""
    mutant = all_mutants()[name]
    failed = [result for result in report.results if result.outcome == "fail"]
    # A hazard takes the process with it, in whatever case meets it first.
    by_clause = [result for result in failed if mutant.hazard or mutant.clause in result.case.clauses]
    first = f"`{by_clause[0].case.id}`" if by_clause else "**not caught**"
    levels = ", ".join(dict.fromkeys(result.case.level for result in failed))
    return f"| {name} | {mutant.clause} | {len(failed)} | {levels} | {first} |", bool(by_clause)


def main() -> int:
    """Print the table; 1 if a mutant got away."""
    names = sys.argv[1:] or sorted(all_mutants())
    today = datetime.now(timezone.utc).date().isoformat()
    out = sys.stdout
    out.write(f"{today}: {len(names)} mutants, each against the whole suite.\n\n")
    out.write("| mutant | breaks | cases that failed | of levels | the first of its clause |\n")
    out.write("|---|---|---|---|---|\n")
    missed = 0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for name, report in zip(names, pool.map(check, names), strict=True):
            line, caught = row(name, report)
            missed += not caught
            out.write(line + "\n")
            out.flush()
    out.write(f"\n{len(names) - missed} of {len(names)} caught by a case of the clause that they break.\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
