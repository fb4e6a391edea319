"""The `hicache` program: a group whose commands are found by name and imported when invoked.

Commands come from the entry-point group ``hicache.commands`` (name -> click
command). The ones of this distribution stand in ``OWN`` as well, so that they
start without a scan of everything that is installed; a name in it cannot be
taken over by another distribution.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hicache_core.errors import HiCacheError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMAND_GROUP = "hicache.commands"

#: Key in the root context's meta: True where --json was asked for.
JSON_WANTED = "hicache.json"


class OwnCommand(NamedTuple):
    """A command of this distribution: where it is, and its line in the help."""

    target: str
    summary: str


#: Equal to this distribution's own entry points, which a test compares.
OWN = {
    "backends": OwnCommand(
        "hicache_cli.backends:backends", "What is installed, what each can do, what else there is."
    ),
    "show": OwnCommand(
        "hicache_cli.show:show", "A backend's options, where each value comes from, its capabilities."
    ),
    "doctor": OwnCommand("hicache_cli.doctor:doctor", "Does it work here, and what to do if not."),
    "replay": OwnCommand("hicache_cli.replay:replay", "What a cache would give a log of requests."),
    "ls": OwnCommand("hicache_cli.upkeep:ls", "A store's namespaces: what, how much, since when."),
    "usage": OwnCommand("hicache_cli.upkeep:usage", "What a store takes, and what it may take."),
    "purge": OwnCommand("hicache_cli.upkeep:purge", "Remove namespaces by model, dtype, tenant or age."),
    "verify": OwnCommand("hicache_cli.upkeep:verify", "Read a store through for damaged pages."),
    "new": OwnCommand("hicache_cli.new:new", "Write a plugin of your own, ready to be filled in."),
    "bench": OwnCommand("hicache_cli.bench:bench", "Bytes a second beside memcpy and the raw system calls."),
}


class Failure(click.ClickException):
    """A hicache error on its way to the user: one message, exit status 1, JSON where that was asked for."""

    exit_code = 1

    def __init__(self, error: HiCacheError, *, as_json: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.as_json = as_json

    def show(self, file: Any = None) -> None:
        if self.as_json:
            import json

            click.echo(json.dumps({"error": error_fields(self.error)}, indent=2))
        super().show(file)


def error_fields(error: HiCacheError) -> dict[str, str]:
    """Give an error as JSON: its type, whole message, and remedy."""
    return {"type": type(error).__name__, "message": str(error), "remedy": error.remedy}


class CommandGroup(click.Group):
    """Finds commands by name; imports one when it is invoked, and none to list them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*OWN, *_installed()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = OWN.get(cmd_name)
        if own:
            return _load(cmd_name, own.target, "hicache")
        point = _installed().get(cmd_name)
        return _load(cmd_name, point.value, _origin(point)) if point else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, own.summary) for name, own in OWN.items()]
        rows += [(name, f"(from {_origin(point)})") for name, point in sorted(_installed().items())]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HiCacheError as error:
            raise Failure(error, as_json=bool(ctx.find_root().meta.get(JSON_WANTED))) from error


def _installed() -> dict[str, EntryPoint]:
    """Read other distributions' commands; the first of a name on the path counts, as an import would."""
    from importlib.metadata import entry_points

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=COMMAND_GROUP):
        if point.name not in OWN:
            found.setdefault(point.name, point)
    return found


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"


def _load(name: str, target: str, origin: str) -> click.Command:
    module, _, attribute = target.partition(":")
    try:
        command = getattr(import_module(module), attribute)
    except Exception as error:
        raise click.ClickException(
            f"command '{name}' of {origin} cannot be loaded: {type(error).__name__}: {error}. "
            f"Reinstall that distribution, or uninstall it."
        ) from error
    if not isinstance(command, click.Command):
        raise click.ClickException(
            f"command '{name}' of {origin} is not a click command: {target} is a {type(command).__name__}. "
            f"Report it to its authors."
        )
    return command


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"hicache {version('hicache')}, hicache-core {version('hicache-core')}")
        ctx.exit()


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the versions and exit.",
)
def main() -> None:
    """One storage contract for the KV-cache pages of LLM engines: see, check and measure its backends."""


if __name__ == "__main__":
    main()
