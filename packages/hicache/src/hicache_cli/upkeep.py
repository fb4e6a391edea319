"""`hicache ls`, `usage`, `purge`, `verify`: what a store holds, and getting rid of what nobody needs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hicache_cli.main import error_fields
from hicache_cli.output import backend_options, console, emit_json, json_option, nbytes_text
from hicache_cli.stored import (
    DEFAULT_TIMEOUT_S,
    Chosen,
    choice_options,
    find,
    identity_of,
    opened_storage,
    rows_of,
)
from hicache_core.cache import HiCache
from hicache_core.errors import HiCacheError, InvalidArgument
from hicache_core.identity import Identity, Placement
from hicache_core.upkeep import NamespaceUse, Verified

#: Digits of a namespace's id in a table.
_SHORT_ID = 12

timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_TIMEOUT_S,
    show_default=True,
    help="Seconds that a call to the backend may take.",
)


@click.command()
@click.argument("backend")
@backend_options
@choice_options
@timeout_option
@json_option
def ls(backend: str, options: dict[str, str], chosen: Chosen, timeout_s: float, as_json: bool) -> None:
    """List a store's namespaces: what each is, how much of it there is, and when it was last written."""
    with opened_storage(backend, options, timeout_s) as storage:
        uses = find(storage, chosen)
    if as_json:
        emit_json({"backend": backend, "namespaces": rows_of(uses)})
        return
    out = console()
    out.print(_table(uses) if uses else "No namespace matches.")


@click.command()
@click.argument("backend")
@backend_options
@choice_options
@timeout_option
@json_option
def usage(backend: str, options: dict[str, str], chosen: Chosen, timeout_s: float, as_json: bool) -> None:
    """Tell what a store takes and may take, and what the chosen namespaces have of it."""
    with opened_storage(backend, options, timeout_s) as storage:
        whole = storage.usage()
        uses = find(storage, chosen) if storage.capabilities.listing or chosen.manifests else []
    if chosen.manifests:
        uses = [_measured(backend, options, use, timeout_s) for use in uses]
    taken = max(whole.store_bytes, sum(use.bytes for use in uses))
    if as_json:
        emit_json(
            {
                "backend": backend,
                "store_bytes": taken,
                "capacity": whole.capacity,
                "namespaces": rows_of(uses),
            }
        )
        return
    out = console()
    limit = f" of {nbytes_text(whole.capacity)} ({taken / whole.capacity:.1%})" if whole.capacity else ""
    out.print(f"The store takes {nbytes_text(taken)}{limit}.")
    if uses:
        pages, nbytes = sum(use.pages for use in uses), sum(use.bytes for use in uses)
        out.print(_table(uses))
        out.print(f"{len(uses)} namespaces, {pages:,} pages, {nbytes_text(nbytes)}.")


@click.command()
@click.argument("backend")
@backend_options
@choice_options
@click.option("--all", "everything", is_flag=True, help="Every namespace of the store.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@timeout_option
@json_option
def purge(
    backend: str, options: dict[str, str], chosen: Chosen, timeout_s: float, as_json: bool, **rest: Any
) -> None:
    """Remove every page of the chosen namespaces, for every process that uses the store.

    Engines that run go on: they miss, and may store anew. Exit status 1 where some could not be purged.
    """
    if chosen.everything != rest["everything"]:
        raise InvalidArgument(
            "which namespaces to purge is not clear",
            value="--all together with a choice" if rest["everything"] else "no choice",
            remedy="Choose by --namespace, --model, --dtype, --tenant, --where, --older-than, or say --all.",
        )
    with opened_storage(backend, options, timeout_s) as storage:
        uses = find(storage, chosen)
    if not rest["dry_run"] and uses:
        _confirm(backend, uses, agreed=rest["yes"], as_json=as_json)
    removed: dict[str, int] = {}
    errors: dict[str, HiCacheError] = {}
    for use in uses if not rest["dry_run"] else ():
        try:
            removed[use.id] = _clear(backend, options, use, timeout_s)
        except HiCacheError as error:
            errors[use.id] = error
    if as_json:
        emit_json(
            {
                "backend": backend,
                "dry_run": rest["dry_run"],
                "namespaces": [row | {"removed": removed.get(row["namespace"], 0)} for row in rows_of(uses)],
                "errors": {id: error_fields(error) for id, error in errors.items()},
            }
        )
    else:
        _print_purged(uses, removed, dry_run=rest["dry_run"])
    _fail(errors)


@click.command()
@click.argument("backend")
@backend_options
@choice_options
@click.option("--remove", is_flag=True, help="Remove damaged pages, for every process.")
@timeout_option
@json_option
def verify(
    backend: str, options: dict[str, str], chosen: Chosen, timeout_s: float, as_json: bool, remove: bool
) -> None:
    """Read the chosen namespaces through and name or remove damaged pages.

    Exit status 1 where damage was found and is still there, or a namespace could not be verified.
    """
    with opened_storage(backend, options, timeout_s) as storage:
        uses = find(storage, chosen)
    found: dict[str, Verified] = {}
    errors: dict[str, HiCacheError] = {}
    with _progress(sum(use.pages for use in uses)) as advance:
        for use in uses:
            found[use.id] = Verified()
            try:
                for piece in _pieces(backend, options, use, timeout_s, remove=remove):
                    found[use.id] += piece
                    advance(piece.pages)
            except HiCacheError as error:
                errors[use.id] = error
    total = sum(found.values(), Verified())
    if as_json:
        rows = [row | _verified_as_json(found[row["namespace"]]) for row in rows_of(uses)]
        emit_json(
            {
                "backend": backend,
                "namespaces": rows,
                "total": _verified_as_json(total),
                "errors": {id: error_fields(error) for id, error in errors.items()},
            }
        )
    else:
        _print_verified(uses, found, total)
    _fail(errors)
    if total.damaged > total.removed:
        raise click.exceptions.Exit(1)


# Work on one namespace.


def _measured(backend: str, options: Mapping[str, Any], use: NamespaceUse, timeout_s: float) -> NamespaceUse:
    """Ask how much there is of a namespace that was named by its manifest."""
    with opened_storage(backend, options, timeout_s, _readable_identity(use)) as storage:
        own = storage.usage()
    return dataclasses.replace(use, pages=own.pages, bytes=own.bytes)


def _clear(backend: str, options: Mapping[str, Any], use: NamespaceUse, timeout_s: float) -> int:
    """Clear through HiCache, whose guard sees to it that a store that hangs does not hang the command."""
    identity = _readable_identity(use)
    with HiCache.open(
        backend, identity=identity, placement=Placement(), timeout_s=timeout_s, options=options, strict=True
    ) as cache:
        return cache.clear()


def _pieces(
    backend: str, options: Mapping[str, Any], use: NamespaceUse, timeout_s: float, *, remove: bool
) -> Iterator[Verified]:
    identity = _readable_identity(use)
    with opened_storage(backend, options, timeout_s, identity, writes=remove) as storage:
        yield from storage.verify(remove=remove)


def _readable_identity(use: NamespaceUse) -> Identity:
    identity = identity_of(use)
    if identity is None:
        raise InvalidArgument(
            f"namespace {use.id} was left: its manifest cannot be read by this version",
            remedy="Use the hicache that wrote it.",
        )
    return identity


def _confirm(backend: str, uses: Sequence[NamespaceUse], *, agreed: bool, as_json: bool) -> None:
    if agreed:
        return
    if as_json:
        raise InvalidArgument("nobody can be asked", remedy="Say --yes, or --dry-run to see what would go.")
    console().print(_table(uses))
    pages = sum(use.pages for use in uses)
    click.confirm(f"Remove these {len(uses)} namespaces ({pages:,} pages) from '{backend}'?", abort=True)


def _fail(errors: Mapping[str, HiCacheError]) -> None:
    for error in errors.values():
        click.echo(f"Error: {error}", err=True)
    if errors:
        raise click.exceptions.Exit(1)


# For people.


def _table(uses: Sequence[NamespaceUse]) -> Table:
    table = Table()
    for column in ("namespace", "model", "dtype", "tokens a page", "LoRA", "tenant"):
        table.add_column(column, overflow="fold")
    for column in ("pages", "bytes", "last set"):
        table.add_column(column, justify="right")
    for use in uses:
        manifest = use.manifest or {}
        fields = [manifest.get(name) for name in ("model", "kv_dtype", "page_tokens", "lora", "tenant")]
        texts = ["-" if value is None else str(value) for value in fields]
        row = (use.id[:_SHORT_ID], *texts, f"{use.pages:,}", nbytes_text(use.bytes), _ago(use.written_s))
        table.add_row(*map(escape, row))
    return table


def _ago(written_s: float | None) -> str:
    if written_s is None:
        return "-"
    seconds = max(time.time() - written_s, 0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _print_purged(uses: Sequence[NamespaceUse], removed: Mapping[str, int], *, dry_run: bool) -> None:
    out = console()
    if not uses:
        out.print("No namespace matches.")
    elif dry_run:
        out.print(_table(uses))
        pages, nbytes = sum(use.pages for use in uses), sum(use.bytes for use in uses)
        out.print(f"Would remove {pages:,} pages, {nbytes_text(nbytes)}. Nothing was removed.")
    else:
        out.print(f"Removed {sum(removed.values()):,} pages of {len(removed)} namespaces.")


def _print_verified(uses: Sequence[NamespaceUse], found: Mapping[str, Verified], total: Verified) -> None:
    out = console()
    for use in uses:
        one = found[use.id]
        if one.damaged:
            words = f"{one.damaged:,} of {one.pages:,} pages damaged, {one.removed:,} removed"
            out.print(f"{use.id}: {words}", markup=False, soft_wrap=True)
    out.print(
        f"{total.pages:,} pages of {len(uses)} namespaces read ({nbytes_text(total.bytes)}): "
        f"{total.damaged:,} damaged, {total.removed:,} removed.",
        soft_wrap=True,
    )


def _verified_as_json(found: Verified) -> dict[str, int]:
    return {
        "read": found.pages,
        "read_bytes": found.bytes,
        "damaged": found.damaged,
        "removed": found.removed,
    }


@contextmanager
def _progress(pages: int) -> Iterator[Any]:
    err = Console(stderr=True)
    columns = (TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("verify", total=pages)
        yield lambda count: bar.advance(task, count)
