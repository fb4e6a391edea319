"""What the commands share in talking to people and programs: consoles, JSON, common options."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from hicache_cli.main import JSON_WANTED

F = TypeVar("F", bound=Callable[..., Any])

#: Columns of a table that goes to a file or a pipe.
PIPE_WIDTH = 160


def console() -> Console:
    """Make a console on the current stdout; wide where nobody's terminal limits it."""
    # Without emoji: looking for their names costs 2 ms, and turns a `:file:` of an error into a picture.
    made = Console(highlight=False, emoji=False)
    if not made.is_terminal:
        made.width = PIPE_WIDTH
    return made


def json_option(command: F) -> F:
    """Add ``--json``; the flag arrives as ``as_json`` and also turns errors into JSON."""

    def remember(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
        ctx.find_root().meta[JSON_WANTED] = value
        return value

    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        callback=remember,
        help="Print JSON instead of text.",
    )(command)


def backend_options(command: F) -> F:
    """Add ``--option k=v``; the pairs arrive as a dict in ``options``."""
    return click.option(
        "--option",
        "options",
        multiple=True,
        metavar="K=V",
        callback=_pairs,
        help="An option of the backend; may be repeated. See `hicache show NAME`.",
    )(command)


def html_option(command: F) -> F:
    """Add ``--html FILE``; a file that cannot be written is refused before anything is measured."""

    def writable(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
        if value is None:
            return None
        path = Path(value)
        place = path if path.exists() else path.absolute().parent
        if path.is_dir() or not os.access(place, os.W_OK):
            raise click.BadParameter(f"{value!r} cannot be written; name a file in a folder of yours")
        return path

    return click.option(
        "--html", "html_file", metavar="FILE", callback=writable, help="Write a page with plots, in one file."
    )(command)


def emit_json(value: Any) -> None:
    """Print one JSON document."""
    import json  # on need, as in main.py: the tables of `hicache backends` start 1 ms sooner

    click.echo(json.dumps(value, indent=2))


def yes_no(value: object) -> str:
    """Show a capability's value in a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "-"
    return str(value)


def nbytes_text(nbytes: float) -> str:
    """Give a number of bytes in binary units, for example ``1.5 GiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(nbytes) >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:.0f} {units[0]}" if nbytes == int(nbytes) else f"{nbytes:.2f} {units[0]}"


def _pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"{value!r} is not an option (write NAME=VALUE, such as root=/tmp/kv)")
        pairs[name] = text
    return pairs
