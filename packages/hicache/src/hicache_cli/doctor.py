"""`hicache doctor [NAME]`: does a backend work here, and what to do about each thing that does not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from importlib.metadata import version

import click

from hicache_cli.canary import canary_checks
from hicache_cli.checks import Check, Overdue, dependency_checks, failed, failures, plugin_checks, within
from hicache_cli.described import provider_and_spec
from hicache_cli.output import backend_options, console, emit_json, json_option
from hicache_cli.target import opened_target
from hicache_core.errors import BackendBlocked, HiCacheError, InvalidOptions
from hicache_core.factory import StorageBackendFactory
from hicache_core.registry import INSTALL_HINTS, allowed_but_missing, registry

#: Seconds that importing a backend's own modules may take.
_LOAD_S = 60.0


@click.command()
@click.argument("name", required=False)
@backend_options
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Seconds that opening and each call may take.",
)
@json_option
def doctor(name: str | None, options: dict[str, str], timeout_s: float, as_json: bool) -> None:
    """Check one backend, or all that are installed; exit status 1 when anything fails."""
    if options and not name:
        raise click.UsageError("--option needs a NAME: options belong to one backend.")
    checks: list[Check] = []
    for check in _all_checks(name, options, timeout_s):
        checks.append(check)
        if not as_json:
            _print(check)
    bad = failures(checks)
    if as_json:
        emit_json({"ok": not bad, "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        tried = len([check for check in checks if check.ok is not None])
        click.echo(f"{len(bad)} of {tried} checks failed." if bad else f"All {tried} checks passed.")
    if bad:
        raise click.exceptions.Exit(1)


def _all_checks(name: str | None, options: Mapping[str, str], timeout_s: float) -> Iterator[Check]:
    yield Check("", "versions", True, f"hicache {version('hicache')}, hicache-core {version('hicache-core')}")
    if name:
        yield from _backend_checks(name, options, timeout_s)
        return
    for missing in allowed_but_missing():
        line = INSTALL_HINTS.get(missing)
        remedy = f"Run: {line}" if line else "Install it, or take it out of HICACHE_BACKENDS_ALLOW."
        yield Check(missing, "installed", False, "named by HICACHE_BACKENDS_ALLOW and not installed", remedy)
    names = registry.names()
    if not names:
        yield Check("", "backends", False, "no backend is installed", f"Run: {INSTALL_HINTS['file']}")
    for each in names:
        yield from _backend_checks(each, {}, timeout_s)


def _backend_checks(name: str, options: Mapping[str, str], timeout_s: float) -> Iterator[Check]:
    """Check one backend, from the outside in; what cannot be tried after a failure is left out."""
    try:
        provider, spec = provider_and_spec(name)
    except BackendBlocked as error:
        yield Check(name, "plugin", None, str(error))
        return
    except HiCacheError as error:
        yield failed(name, "plugin", error)
        return
    yield Check(spec.name, "plugin", True, f"{provider.distribution} {provider.version}".strip())
    dependencies = dependency_checks(spec)
    yield from dependencies
    if failures(dependencies):
        return
    try:
        with opened_target(name, options) as target:
            loaded = within(_LOAD_S, lambda: StorageBackendFactory.load(name, target.options))
            yield Check(spec.name, "options", True, "valid")
            if target.note:
                yield Check(spec.name, "place", None, target.note)
            yield from plugin_checks(spec, loaded.options, _LOAD_S)
            yield from canary_checks(loaded, timeout_s)
    except (HiCacheError, Overdue) as error:
        yield failed(spec.name, "options" if isinstance(error, InvalidOptions) else "loading", error)


def _print(check: Check) -> None:
    mark = {True: "[green]ok  [/]", False: "[red]FAIL[/]", None: "[yellow]note[/]"}[check.ok]
    subject = f"{check.backend}: {check.name}" if check.backend else check.name
    out = console()
    out.print(mark, end=" ")
    out.print(f"{subject}: {check.found}", markup=False, soft_wrap=True)
    if check.ok is False and check.remedy:
        out.print(f"       {check.remedy}", markup=False, soft_wrap=True)
