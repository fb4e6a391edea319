"""`hicache bench NAME...`: backends beside memcpy and the raw system calls, as ratios within one run."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hicache_cli.benchreport import BenchReport, Cell
from hicache_cli.contestants import Entry, Plan, options_of
from hicache_cli.measure import measure
from hicache_cli.output import backend_options, console, emit_json, html_option, json_option, nbytes_text
from hicache_cli.sizes import SIZE, SIZES
from hicache_cli.target import ROOT_OPTION, Target, opened_target
from hicache_cli.workers import Job

#: A backend with this transport is measured beside the raw system calls.
_LOCAL = "local"


@click.command()
@click.argument("names", nargs=-1, required=True)
@backend_options
@click.option(
    "--page-bytes",
    type=SIZES,
    default="64kib,256kib,1mib,4mib",
    show_default=True,
    help="Page sizes, separated by commas.",
)
@click.option("--batch", type=click.IntRange(1, 65536), default=128, show_default=True, help="Pages a call.")
@click.option(
    "--threads", type=click.IntRange(1, 64), default=1, show_default=True, help="Threads a process."
)
@click.option("--processes", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes.")
@click.option(
    "--rounds", type=click.IntRange(1, 1000), default=5, show_default=True, help="Rounds that count."
)
@click.option(
    "--total",
    type=SIZE,
    default="256mib",
    show_default=True,
    help="Bytes set and got in a round by all threads together, at least a batch each.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds that a call to a backend may take.",
)
@html_option
@json_option
def bench(
    names: tuple[str, ...], options: dict[str, str], page_bytes: list[int], as_json: bool, **rest: Any
) -> None:
    """Measure backends in one run, beside memcpy and, for local ones, one pwritev and preadv a batch.

    An --option goes to every backend; write NAME.k=v for one of them. Pages go to namespaces of their own and
    are removed after each round. Exit status 1: a store answered with errors or wrong bytes.
    """
    if len(set(names)) != len(names):
        raise click.UsageError("a backend is named twice; it takes part once.")
    with ExitStack() as stack:
        targets = [
            stack.enter_context(opened_target(name, options_of(name, options, names))) for name in names
        ]
        entries, reference = _entries(stack, targets, rest["timeout_s"])
        plans = [_plan(nbytes, rest) for nbytes in page_bytes]
        cells = list(_cells(plans, entries, reference))
        report = BenchReport(cells, [target.note for target in targets if target.note])
    if rest["html_file"]:
        rest["html_file"].write_text(report.page(), encoding="utf-8")
    if as_json:
        emit_json(report.as_json())
    else:
        _print(report)
    if report.trouble:
        raise click.exceptions.Exit(1)


def _entries(stack: ExitStack, targets: Sequence[Target], timeout_s: float) -> tuple[list[Entry], str]:
    """Describe who takes part, and name whom the ratios are to."""
    entries = [Entry("memcpy")]
    local = [target for target in targets if target.spec.capabilities.transport == _LOCAL]
    if local:
        beside = local[0].options.get(ROOT_OPTION)
        parent = os.path.dirname(os.path.abspath(beside)) if beside else None
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="hicache-raw-", dir=_existing(parent))
        )
        entries.append(Entry("raw", raw_folder=folder))
    for target in targets:
        job = Job(target.backend, target.options, f"bench-{uuid.uuid4().hex}", 0, timeout_s)
        entries.append(Entry(target.backend, job=job))
    return entries, entries[1].name if local else entries[0].name


def _existing(folder: str | None) -> str | None:
    """Give the nearest folder above that exists, so that the raw file lies on the store's file system."""
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


def _plan(page_nbytes: int, settings: Mapping[str, Any]) -> Plan:
    workers = settings["threads"] * settings["processes"]
    return Plan(
        page_nbytes=page_nbytes,
        batch=settings["batch"],
        batches=max(1, settings["total"] // (workers * settings["batch"] * page_nbytes)),
        threads=settings["threads"],
        processes=settings["processes"],
        rounds=settings["rounds"],
    )


def _cells(plans: Sequence[Plan], entries: Sequence[Entry], reference: str) -> Iterator[Cell]:
    total = sum((plan.rounds + 1) * len(entries) for plan in plans)
    with _progress(total) as progress:
        for plan in plans:
            sized = [
                replace(entry, job=replace(entry.job, page_nbytes=plan.page_nbytes)) if entry.job else entry
                for entry in entries
            ]
            yield Cell(plan, measure(plan, sized, progress), reference)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    err = Console(stderr=True)
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("bench", total=total)
        yield lambda: bar.advance(task)


def _print(report: BenchReport) -> None:
    out = console()
    out.print(report.table())
    out.print(report.headline(), markup=False, soft_wrap=True)
    largest = max(cell.plan.thread_nbytes * cell.plan.threads * cell.plan.processes for cell in report.cells)
    out.print(f"A round moves up to {nbytes_text(largest)} each way.", markup=False)
    for note in report.notes:
        out.print(note, markup=False, soft_wrap=True)
    for line in report.trouble:
        click.echo(f"TROUBLE: {line}", err=True)
