"""Extensions of `hicache replay`: an option each, from other distributions, that changes what plays the log.

An entry point in the group ``hicache.replay`` resolves to an Extension. The
group is scanned when `replay` is invoked, and never before. hicache-engine adds
``--l2-pages`` this way, which puts an engine's memory before the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import click

from hicache_core.errors import InvalidArgument

if TYPE_CHECKING:
    from hicache_cli.tally import Tally
    from hicache_cli.trace import Request
    from hicache_cli.workers import Job

REPLAY_GROUP = "hicache.replay"

#: (job, [(place in the log, request)], progress) -> what was counted; opens the job's store itself.
PlayThrough = Callable[["Job", Sequence[tuple[int, "Request"]], Callable[[int], None]], "Tally"]


@dataclass(frozen=True, slots=True)
class Extension:
    """One more option of `hicache replay`."""

    option: click.Option
    play_through: Callable[[Any], PlayThrough]
    """Give what plays the log, from the option's value."""


def add_options(command: click.Command) -> dict[str, Extension]:
    """Add the options of every installed extension to a command; return them by their parameters' names."""
    found: dict[str, Extension] = {}
    for point in entry_points(group=REPLAY_GROUP):
        try:
            extension = point.load()
        except ImportError as error:
            click.echo(f"an option of replay is left out: {point.value}: {error}", err=True)
            continue
        if extension.option.name not in found:
            found[extension.option.name] = extension
            command.params.append(extension.option)
    return found


def chosen(
    extensions: Mapping[str, Extension], values: Mapping[str, Any], workers: int
) -> PlayThrough | None:
    """Give what plays the log; None where no extension's option was used.

    Raises:
        InvalidArgument: two of them, or one with several workers.
    """
    used = [name for name in extensions if values.get(name) is not None]
    if not used:
        return None
    if len(used) > 1 or workers > 1:
        flags = " and ".join(extensions[name].option.opts[0] for name in used)
        raise InvalidArgument(
            "these options of replay exclude each other",
            value=flags if len(used) > 1 else f"{flags} and --workers {workers}",
            remedy="Leave one out.",
        )
    return extensions[used[0]].play_through(values[used[0]])
