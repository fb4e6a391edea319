"""`hicache backends`: what is installed, how the backends compare, and what else there is.

Everything comes from distributions' metadata and the light spec modules; no
backend is imported, and a broken plugin is a row with its error.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import click
from rich.table import Table

from hicache_cli.main import error_fields
from hicache_cli.output import console, emit_json, json_option, yes_no
from hicache_core.capabilities import Capabilities
from hicache_core.factory import StorageBackendFactory
from hicache_core.registry import INSTALL_HINTS, Listed, allowed_but_missing

#: Capability -> what a reader sees in the first column.
_LABELS = {
    "shared": "seen by other instances",
    "persistent": "survives a restart",
    "durable": "survives kill -9",
    "eviction": "eviction",
    "remove": "removes pages",
    "clear": "clears a namespace",
    "listing": "lists namespaces",
    "verify": "verifies what is stored",
    "checksum": "finds damage",
    "zero_copy": "zero copy",
    "device_memory": "device memory",
    "needs_registered": "needs registered memory",
    "deadline": "means to keep a deadline",
    "max_segments": "most segments a page",
    "max_batch": "most pages a call",
    "max_page_nbytes": "largest page, bytes",
    "transport": "transport",
}


@click.command()
@json_option
def backends(as_json: bool) -> None:
    """List the installed backends and compare what they can do."""
    rows = list(StorageBackendFactory.list())
    names = {row.name for row in rows}
    missing = {name: line for name, line in INSTALL_HINTS.items() if name not in names}
    not_there = allowed_but_missing()
    if as_json:
        emit_json(
            {
                "backends": [_as_json(row) for row in rows],
                "not_installed": [{"name": name, "install": line} for name, line in missing.items()],
                "allowed_but_not_installed": not_there,
            }
        )
        return
    out = console()
    out.print(_installed_table(rows) if rows else "No backend is installed.")
    good = [(row.name, row.spec.capabilities) for row in rows if row.spec]
    if good:
        out.print(_comparison_table(good))
    for row in rows:
        if row.error:
            out.print(f"{row.name}: {row.error}", markup=False, soft_wrap=True)
    if missing:
        out.print(_missing_table(missing))
    for name in not_there:
        out.print(
            f"HICACHE_BACKENDS_ALLOW names '{name}', which is not installed.", markup=False, soft_wrap=True
        )


def _as_json(row: Listed) -> dict[str, Any]:
    provider = row.provider
    return {
        "name": row.name,
        "version": provider.version if provider else "",
        "distribution": provider.distribution if provider else "",
        "summary": row.spec.summary if row.spec else "",
        "capabilities": dataclasses.asdict(row.spec.capabilities) if row.spec else None,
        "error": error_fields(row.error) if row.error else None,
    }


def _installed_table(rows: list[Listed]) -> Table:
    table = Table(title="Installed", title_justify="left")
    for column in ("backend", "version", "distribution", "what it is"):
        table.add_column(column, overflow="fold")
    for row in rows:
        provider = row.provider
        version, distribution = (provider.version, provider.distribution) if provider else ("", "")
        what = row.spec.summary if row.spec else f"not usable: {type(row.error).__name__}, see below"
        table.add_row(row.name, version or "-", distribution, what)
    return table


def _comparison_table(specs: list[tuple[str, Capabilities]]) -> Table:
    table = Table(title="What each can do", title_justify="left")
    table.add_column("")
    for name, _ in specs:
        table.add_column(name, overflow="fold")
    for field in dataclasses.fields(Capabilities):
        cells = [yes_no(getattr(capabilities, field.name)) for _, capabilities in specs]
        table.add_row(_LABELS.get(field.name, field.name), *cells)
    return table


def _missing_table(missing: dict[str, str]) -> Table:
    table = Table(title="Known, not installed", title_justify="left")
    table.add_column("backend")
    table.add_column("to install", overflow="fold")
    for name, line in missing.items():
        table.add_row(name, line.replace("[", r"\["))
    return table
