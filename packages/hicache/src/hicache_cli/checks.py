"""What a doctor looks at before it opens anything: modules, versions, owners, the plugin's own checks.

A check is a result with a remedy, never an exception. Native modules are
imported in a process of their own, so that one that crashes or hangs takes
nobody with it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from hicache_cli.distributions import Owners, owners_of
from hicache_core.errors import HiCacheError
from hicache_core.spec import BackendSpec, Requirement

T = TypeVar("T")

#: Entry-point group of a plugin's own checks: backend name -> callable(options) -> iterable of
#: (check, ok, found, remedy); ok is None for a remark. README.md shows one.
DOCTOR_GROUP = "hicache.doctor"

#: Seconds that importing one native module may take; CUDA libraries take several.
_IMPORT_S = 60.0

_IMPORT_CODE = """
import importlib, json, sys
sys.path[:] = json.loads(sys.argv[2])
importlib.import_module(sys.argv[1])
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One result: ok, a failure with what to do about it, or (None) a remark."""

    backend: str
    name: str
    ok: bool | None
    found: str
    remedy: str = ""


class Overdue(Exception):
    """Work did not come back in time; its thread is left behind."""


def within(seconds: float, work: Callable[[], T]) -> T:
    """Do work in a thread and wait for it.

    Raises:
        Overdue: it has not returned; else whatever work raises, an attempt to exit as RuntimeError.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again where the caller waits
            failure.append(error)

    thread = threading.Thread(target=run, name="hicache-doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise Overdue(f"no answer within {seconds:g} s")
    if failure and not isinstance(failure[0], Exception):
        raise RuntimeError(f"it tried to end the process: {failure[0]!r}") from failure[0]
    if failure:
        raise failure[0]
    return outcome[0]


def failed(backend: str, name: str, error: BaseException) -> Check:
    """Turn what went wrong into a result."""
    if isinstance(error, HiCacheError):
        return Check(backend, name, False, str(error).removesuffix(error.remedy).strip(), error.remedy)
    remedy = "Report it to the backend's authors, with the traceback of a short script that does the same."
    if isinstance(error, Overdue):
        remedy = "See that its server answers; raise --timeout; or use the option bounce=true meanwhile."
    return Check(backend, name, False, f"{type(error).__name__}: {error}", remedy)


def dependency_checks(spec: BackendSpec, deadline_s: float = _IMPORT_S) -> list[Check]:
    """Check each requirement (importable, version in range) and that one distribution owns each package."""
    packages = {_top(requirement.module) for requirement in spec.requires}
    packages |= {_top(spec.target), _top(spec.options)}
    owners = owners_of(packages)
    checks = [_module_check(spec.name, each, owners[_top(each.module)], deadline_s) for each in spec.requires]
    for package in sorted(packages):
        contested = owners[package].contested
        if contested:
            checks.append(_contested(spec.name, package, owners[package]))
    return checks


def plugin_checks(spec: BackendSpec, options: Any, seconds: float) -> list[Check]:
    """Run the checks that the plugin itself offers, if it does."""
    from importlib.metadata import entry_points

    checks: list[Check] = []
    for point in entry_points(group=DOCTOR_GROUP, name=spec.name):
        try:
            rows = within(seconds, lambda point=point: list(point.load()(options)))  # type: ignore[misc]
            checks += [_plugin_row(spec.name, row) for row in rows]
        except Exception as error:  # noqa: BLE001 - another distribution's code
            checks.append(
                Check(
                    spec.name,
                    "the plugin's own checks",
                    False,
                    f"{point.value} raised {type(error).__name__}: {error}",
                    "Report it to the plugin's authors.",
                )
            )
    return checks


def _plugin_row(backend: str, row: Any) -> Check:
    name, ok, found, remedy = row
    return Check(backend, str(name), None if ok is None else bool(ok), str(found), str(remedy))


def _module_check(backend: str, requirement: Requirement, owners: Owners, deadline_s: float) -> Check:
    name = f"module {requirement.module}"
    complaint = _import_complaint(requirement.module, deadline_s)
    if complaint:
        return Check(backend, name, False, complaint, _install_lines(requirement))
    versions = [f"{project} {version}" for project, version in sorted(owners.versions.items())]
    found = ", ".join(versions) or "importable, of no installed distribution"
    try:
        wanted = SpecifierSet(requirement.versions)
    except InvalidSpecifier:
        remedy = "Report it to the plugin's authors."
        return Check(backend, name, False, f"{requirement.versions!r} is not a range of versions", remedy)
    bad = [v for v in owners.versions.values() if not wanted.contains(v, prereleases=True)]
    if bad:
        found = f"{found}, where {requirement.versions} is wanted"
        return Check(backend, name, False, found, _install_lines(requirement))
    return Check(backend, name, True, found)


def _import_complaint(module: str, deadline_s: float) -> str:
    """Import a module in a process of its own; empty when that went well."""
    command = [sys.executable, "-c", _IMPORT_CODE, module, json.dumps(sys.path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return f"importing it took more than {deadline_s:g} s"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"importing it ended the process with signal {-done.returncode}"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"importing it ended the process with status {done.returncode}"


def _install_lines(requirement: Requirement) -> str:
    lines = [line for line in (requirement.pip, _apt(requirement)) if line]
    return f"Run: {'; '.join(lines)}" if lines else f"Install what provides '{requirement.module}'."


def _apt(requirement: Requirement) -> str:
    return f"apt-get install {requirement.apt}" if requirement.apt else ""


def _contested(backend: str, package: str, owners: Owners) -> Check:
    names = sorted(owners.contested)
    versions = ", ".join(f"{name} {owners.versions[name]}" for name in names)
    return Check(
        backend,
        f"one owner of {package}",
        False,
        f"{len(names)} distributions own the import package '{package}': {versions} "
        f"(both wrote {next(iter(owners.contested.values()))})",
        f"Run: pip uninstall {' '.join(names)}; then install again the one that you want.",
    )


def _top(target: str) -> str:
    return target.partition(":")[0].partition(".")[0]


def failures(checks: Iterable[Check]) -> Sequence[Check]:
    """Keep what must make the exit status 1."""
    return [check for check in checks if check.ok is False]
