"""``hicache check NAME``: run the suite on a backend and say what it may be trusted with.

Exit status: 0 when every level is reached (or not declared), 1 when a check
failed or could not be run, 2 when nothing could be run at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hicache_conformance.cases import LEVELS
from hicache_conformance.page import to_html
from hicache_conformance.report import Report, Result, headline, to_json, to_junit
from hicache_conformance.runner import Plan, run
from hicache_conformance.subject import kinds

_FILE = click.Path(path_type=Path, dir_okay=False, writable=True)
_COLOURS = {"pass": "green", "fail": "red", "not-run": "red", "reached": "green", "not reached": "red"}


@click.command(name="check")
@click.argument("name", required=False)
@click.option(
    "--option", "-o", "options", multiple=True, metavar="K=V", help="An option of the backend; repeatable."
)
@click.option(
    "--level", "levels", multiple=True, type=click.Choice(LEVELS), help="Only this level; repeatable."
)
@click.option("--clause", "clauses", multiple=True, metavar="C2", help="Only this clause; repeatable.")
@click.option("--json", "json_file", type=_FILE, metavar="F", help="Write the report as JSON.")
@click.option("--junit", "junit_file", type=_FILE, metavar="F", help="Write it as JUnit XML.")
@click.option("--html", "html_file", type=_FILE, metavar="F", help="Write it as one HTML page.")
@click.option("--match", default="", metavar="WORDS", help="Only cases whose names match, as pytest -k.")
@click.option(
    "--subject", "subject", metavar="KIND=VALUE", help="Something other than a backend.", hidden=True
)
@click.option("--seed", type=int, help="Repeat a run: its page contents, orders and moments.")
@click.option("--budget", default=600.0, show_default=True, help="Seconds for the whole run.")
@click.option("--case-budget", type=float, help="At most so many seconds for each case.")
@click.option("--slack", default=2.0, show_default=True, help="Seconds that a busy machine may be late.")
@click.pass_context
def check(context: click.Context, /, name: str | None, **given: Any) -> None:
    """Prove backend NAME against the contract, in a process of its own."""
    report_to = {"json": given["json_file"], "junit": given["junit_file"], "html": given["html_file"]}
    plan = Plan(
        subject=_subject(name, given),
        options=given["options"],
        levels=given["levels"],
        clauses=given["clauses"],
        match=given["match"],
        seed=given["seed"],
        budget_s=given["budget"],
        case_budget_s=given["case_budget"],
        slack_s=given["slack"],
    )
    for text in plan.options:
        if not text.partition("=")[0] or "=" not in text:
            raise click.UsageError(f"an option is written k=v, not {text!r}")
    for path in report_to.values():
        if path is not None and not path.absolute().parent.is_dir():
            raise click.UsageError(f"there is no folder for the report {path}")
    report = run(plan, _tell)
    _write(report, report_to)
    _summarise(report)
    context.exit(report.exit_status)


# Distributions that add kinds of subjects add an option each; none of them is imported for that.
# A parameter's name is an identifier, which a kind's need not be.
_KINDS = {f"kind_{number}": point.name for number, point in enumerate(kinds())}
for _parameter, _kind in _KINDS.items():
    _option = click.Option([f"--{_kind}", _parameter], metavar="VALUE", help=f"Prove this {_kind}.")
    check.params.append(_option)


def _subject(name: str | None, given: dict[str, Any]) -> str:
    chosen = [f"{kind}={given[parameter]}" for parameter, kind in _KINDS.items() if given.get(parameter)]
    chosen += [given["subject"]] if given["subject"] else []
    chosen += [f"backend={name}"] if name else []
    if len(chosen) != 1:
        more = f", not {len(chosen)} things: {', '.join(chosen)}" if chosen else ""
        raise click.UsageError(f"name one backend to check{more}")
    return chosen[0]


def _tell(result: Result) -> None:
    if result.outcome == "fail":
        clauses = ", ".join(result.case.clauses)
        click.secho(f"fail {result.case.level}: {result.case.id} ({clauses})", fg="red")
        click.echo(f"     {headline(result.detail)}")


def _write(report: Report, files: dict[str, Path | None]) -> None:
    writers = {"json": to_json, "junit": to_junit, "html": to_html}
    for kind, path in files.items():
        if path is None:
            continue
        try:
            path.write_text(writers[kind](report), encoding="utf-8")
        except OSError as error:
            raise click.ClickException(
                f"the {kind} report cannot be written to {path}: {error.strerror}"
            ) from error


def _summarise(report: Report) -> None:
    if report.unusable:
        click.echo(f"'{report.subject.partition('=')[2]}' cannot be checked: {report.unusable}", err=True)
        return
    if not report.results:
        click.echo("no case matches", err=True)
        return
    for level in report.present():
        verdict = report.verdict(level)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in report.counts(level).items() if count)
        click.echo(f"{level:10} {click.style(f'{verdict:12}', fg=_COLOURS.get(verdict))} {counts}")
    for reason in dict.fromkeys(r.detail for r in report.results if r.outcome == "not-run"):
        click.echo(f"not run: {headline(reason)}")
    words, _ = report.badge()
    click.echo(
        f"{report.description.get('distribution', '')}: {words}, {report.seconds:.0f} s, seed {report.seed}"
    )
