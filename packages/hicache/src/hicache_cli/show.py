"""`hicache show NAME`: a backend's options, where each present value comes from, and its capabilities."""

from __future__ import annotations

import dataclasses

import click
from rich.markup import escape
from rich.table import Table

from hicache_cli.described import Described, OptionRow, describe, provider_and_spec
from hicache_cli.output import console, emit_json, json_option, nbytes_text, yes_no
from hicache_core.capabilities import Capabilities
from hicache_core.errors import InvalidOptions
from hicache_core.registry import Provider
from hicache_core.spec import BackendSpec


@click.command()
@click.argument("name")
@json_option
def show(name: str, as_json: bool) -> None:
    """Show a backend's options and capabilities; values that cannot be read are an error (exit status 1)."""
    provider, spec = provider_and_spec(name)
    described = describe(provider, spec)
    if as_json:
        emit_json(
            {
                "name": spec.name,
                "summary": spec.summary,
                "version": provider.version,
                "distribution": provider.distribution,
                "options": [dataclasses.asdict(row) for row in described.rows],
                "capabilities": dataclasses.asdict(spec.capabilities),
                "requires": [dataclasses.asdict(requirement) for requirement in spec.requires],
                "problems": [
                    {"option": field, "complaint": complaint, "source": source}
                    for field, complaint, source in described.problems
                ],
            }
        )
    else:
        _print(provider, spec, described)
    if described.problems:
        raise click.exceptions.Exit(1)


def _print(provider: Provider, spec: BackendSpec, described: Described) -> None:
    out = console()
    origin = f"{provider.distribution} {provider.version}".strip()
    out.print(f"{spec.name} ({origin}): {spec.summary}", markup=False, soft_wrap=True)
    out.print(_options_table(described))
    for row in described.rows:
        if row.description:
            out.print(f"{row.name}: {row.description}", markup=False)
    out.print(_capabilities_table(spec.capabilities))
    for requirement in spec.requires:
        ways = [requirement.pip, f"apt-get install {requirement.apt}" if requirement.apt else ""]
        line = f"needs module {requirement.module} {requirement.versions}".rstrip()
        out.print(f"{line}: {'; '.join(filter(None, ways))}", markup=False, soft_wrap=True)
    out.print("Values: explicit > environment > the file that HICACHE_CONFIG names > default.", markup=False)
    if described.problems:
        click.echo(f"Error: {InvalidOptions(spec.name, described.problems)}", err=True)


def _options_table(described: Described) -> Table:
    table = Table(title="Options", title_justify="left")
    for column in ("option", "type", "default", "environment", "value", "from"):
        table.add_column(column, overflow="fold")
    for row in described.rows:
        kind = f"{row.type}, {row.bounds}" if row.bounds else row.type
        default, value = (_in_words(row, text) for text in (row.default, row.value))
        cells = (row.name, kind, default, row.environment, value, row.source)
        table.add_row(*map(escape, cells))
    return table


def _in_words(row: OptionRow, text: str) -> str:
    """Say "unset" for nothing, and give a size in units."""
    if row.type.startswith("size") and text.isdigit():
        return nbytes_text(int(text))
    return text or "unset"


def _capabilities_table(capabilities: Capabilities) -> Table:
    table = Table(title="Capabilities", title_justify="left")
    table.add_column("capability")
    table.add_column("")
    for field in dataclasses.fields(capabilities):
        table.add_row(field.name, yes_no(getattr(capabilities, field.name)))
    return table
