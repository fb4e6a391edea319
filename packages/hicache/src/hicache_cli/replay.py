"""`hicache replay`: sends a log of requests to a backend and tells what a cache would have given."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hicache_cli.described import provider_and_spec
from hicache_cli.extensions import add_options, chosen
from hicache_cli.html import replay_page
from hicache_cli.load import DEFAULT_REQUESTS, conversations
from hicache_cli.output import backend_options, console, emit_json, html_option, json_option
from hicache_cli.report import ReplayReport
from hicache_cli.sizes import SIZE
from hicache_cli.target import Target, opened_target
from hicache_cli.trace import Trace, read_trace
from hicache_cli.workers import Job, open_cache, play
from hicache_core.errors import HiCacheError, InvalidArgument, UnsupportedOperation

#: Unreadable lines that are named; the rest is counted.
_MAX_NAMED_LINES = 10


@click.command()
@click.option("--trace", "trace_file", type=click.File("rb"), help="A log in Mooncake's JSONL; - is stdin.")
@click.option("--backend", default="file", show_default=True, help="An installed backend.")
@backend_options
@click.option(
    "--page-bytes",
    type=SIZE,
    default="16kib",
    show_default=True,
    help="Bytes of the page that stands for a block of 512 tokens.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Play only the first N requests.")
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Processes that share the store.",
)
@click.option("--capacity-pages", type=click.IntRange(min=1), help="Limit the store to N times --page-bytes.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the load played without --trace.")
@click.option("--keep", metavar="NAME", help="Leave the pages under NAME; the next run with it finds them.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds that a call to the backend may take.",
)
@html_option
@json_option
def replay(
    trace_file: Any, backend: str, options: dict[str, str], page_bytes: int, as_json: bool, **rest: Any
) -> None:
    """Play requests on a backend: exists on the chain, get the leading run, set the rest, verify every byte.

    Pages are kept apart from all others in the store and removed afterwards. Exit status 1: a byte came back
    wrong, or the store answered with errors.
    """
    trace, source = _requests(trace_file, rest["limit"], rest["seed"])
    engine = chosen(_EXTENSIONS, rest, rest["workers"])
    capacity = rest["capacity_pages"] * page_bytes if rest["capacity_pages"] else None
    with opened_target(backend, options, capacity=capacity) as target:
        job = Job(
            backend=backend,
            options=target.options,
            tenant=f"replay-{rest['keep'] or uuid.uuid4().hex}",
            page_nbytes=page_bytes,
            timeout_s=rest["timeout_s"],
            engine=engine,
        )
        report = _run(job, target, trace, source, capacity, workers=rest["workers"], keep=bool(rest["keep"]))
    if rest["html_file"]:
        rest["html_file"].write_text(replay_page(report), encoding="utf-8")
    if as_json:
        emit_json(report.as_json())
    else:
        _print(report)
    if report.trouble:
        raise click.exceptions.Exit(1)


#: This module is imported when `replay` is invoked, so nothing else pays for the scan.
_EXTENSIONS = add_options(replay)


def _requests(trace_file: Any, limit: int | None, seed: int) -> tuple[Trace, str]:
    if trace_file is None:
        requests = list(islice(conversations(seed), limit or DEFAULT_REQUESTS))
        return Trace(requests), f"seeded conversations (seed {seed})"
    text = io.TextIOWrapper(trace_file, encoding="utf-8", errors="replace")
    trace = read_trace(text, limit)
    for number, reason in trace.unreadable[:_MAX_NAMED_LINES]:
        click.echo(f"line {number} is not a request: {reason}; skipped", err=True)
    if trace.unreadable:
        click.echo(f"{len(trace.unreadable)} unreadable lines were skipped", err=True)
    if not trace.requests:
        raise InvalidArgument(
            f"no request in {trace_file.name!r}",
            value=f"{len(trace.unreadable)} unreadable lines",
            remedy='A line is an object with "input_length" and "hash_ids"; docs/replay.md shows one.',
        )
    return trace, str(trace_file.name)


def _run(
    job: Job, target: Target, trace: Trace, source: str, capacity: int | None, *, workers: int, keep: bool
) -> ReplayReport:
    try:
        with _progress(len(trace.requests)) as progress:
            tally = play(job, trace.requests, workers, progress)
    finally:
        left = _remove_pages(job, target, keep=keep)
    notes = [note for note in (target.note, left) if note]
    return ReplayReport(
        backend=target.spec.name,
        version=provider_and_spec(job.backend)[0].version,
        source=source,
        page_nbytes=job.page_nbytes,
        workers=workers,
        capacity_nbytes=capacity,
        tally=tally,
        unreadable=trace.unreadable,
        notes=notes,
    )


def _remove_pages(job: Job, target: Target, *, keep: bool) -> str:
    """Remove the run's pages from the store; say what is left behind, or nothing."""
    promised = target.spec.capabilities
    if target.temporary_root is not None or not (promised.persistent or promised.shared):
        return ""  # gone with the folder, or with the player's own instance
    if keep:
        return "The pages are left in the store, as --keep asked."
    try:
        with open_cache(job) as cache:
            cache.clear()
    except UnsupportedOperation as error:
        return f"The pages are left in the store: {error}"
    except HiCacheError as error:
        return f"The pages may be left in the store: {error}"
    return ""


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Draw a bar on stderr where that is a terminal, and nothing elsewhere."""
    err = Console(stderr=True)
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("replay", total=total)
        yield lambda count: bar.advance(task, count)


def _print(report: ReplayReport) -> None:
    out = console()
    out.print(f"{report.backend} {report.version}: {report.source}".strip(), markup=False, soft_wrap=True)
    out.print(report.table())
    for line in report.headline():
        out.print(line, markup=False, soft_wrap=True)
    for note in report.notes:
        out.print(note, markup=False, soft_wrap=True)
    for line in report.trouble:
        click.echo(f"TROUBLE: {line}", err=True)
