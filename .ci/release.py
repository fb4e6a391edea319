"""Releases: `python .ci/release.py check`, and `python .ci/release.py cores DIST`.

Every distribution is released alone, under a tag ``<name>-<version>``.

``check`` tells for each one what changed since its last tag, and whether its
version moved. Status 1: something that is shipped changed and the version did
not move, moved backwards, the change has no fragment, or a distribution that
depends on it does not allow the new version.

``tagged`` takes a tag and gives the name and folder of the distribution that it releases.

``cores`` takes a folder of wheels, as `hatch build --all` makes it, and runs each light plugin's first
level of the suite with the oldest hicache-core that it allows (built from its
tag; before the first one, there is only this checkout's) and with the newest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("core", "conformance", "plugins/*", "packages/*")
#: What of a distribution reaches its users.
SHIPPED = ("src", "pyproject.toml")
#: Plugins that run where pip alone has installed them.
LIGHT = ("file", "hf3fs", "eic")


def git(*arguments: str, root: Path = ROOT) -> str:
    """Run git and give its output."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout


@dataclass(frozen=True)
class Distribution:
    """One folder that is released alone."""

    folder: str
    name: str
    version: Version
    requires: tuple[Requirement, ...]

    @property
    def changes(self) -> str:
        """The folder of its fragments."""
        return f"{self.folder}/changes"


@dataclass(frozen=True)
class Finding:
    """What `check` says of one distribution."""

    name: str
    tag: str
    changed: int
    version: str
    trouble: tuple[str, ...]

    def __str__(self) -> str:
        since = self.tag or "never released"
        files = f"{self.changed} shipped files changed" if self.changed else "unchanged"
        return f"{self.name:22} {self.version:10} {since:32} {files if self.tag else ''}".rstrip()


def distributions(root: Path = ROOT) -> list[Distribution]:
    """Read every pyproject.toml."""
    found = []
    for pattern in PATTERNS:
        for file in sorted(root.glob(f"{pattern}/pyproject.toml")):
            project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
            extras = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
            needs = tuple(map(Requirement, [*project["dependencies"], *extras]))
            folder = str(file.parent.relative_to(root))
            found.append(Distribution(folder, project["name"], Version(project["version"]), needs))
    return found


def tags(name: str, root: Path = ROOT) -> dict[Version, str]:
    """Give a distribution's released versions and their tags."""
    found = {}
    for tag in git("tag", "--list", f"{name}-*", root=root).split():
        try:
            found[Version(tag.removeprefix(f"{name}-"))] = tag
        except InvalidVersion:
            continue  # of another distribution whose name begins alike
    return found


def tagged(tag: str, root: Path = ROOT) -> Distribution:
    """Give the distribution that a tag releases; its version must be the tag's."""
    for one in distributions(root):
        if tag == f"{one.name}-{one.version}":
            return one
    raise SystemExit(f"tag {tag} is no distribution of this checkout with its present version")


def check(root: Path = ROOT) -> list[Finding]:
    """Compare every distribution with its last tag."""
    every = distributions(root)
    return [_finding(each, every, root) for each in every]


def _finding(one: Distribution, every: Sequence[Distribution], root: Path) -> Finding:
    released = tags(one.name, root)
    trouble = [*_refusals(one, every)]
    if not released:
        return Finding(one.name, "", 0, str(one.version), tuple(trouble))
    last = max(released)
    paths = [f"{one.folder}/{part}" for part in SHIPPED]
    changed = git("diff", "--name-only", released[last], "--", *paths, root=root).split()
    if one.version < last:
        trouble.append(f"version {one.version} is below the released {last}")
    if changed and one.version == last:
        trouble.append(f"changed since {released[last]}, and the version is still {last}")
    if changed and one.version != last and not _told(one, released[last], root):
        trouble.append(f"changed since {released[last]}, without a fragment or a new part of its CHANGELOG")
    if not changed and one.version > last:
        trouble.append(f"version moved to {one.version}, and nothing that is shipped changed")
    return Finding(one.name, released[last], len(changed), str(one.version), tuple(trouble))


def _told(one: Distribution, tag: str, root: Path) -> bool:
    """True where a fragment waits, or the changelog has grown since the tag."""
    waiting = [file for file in (root / one.changes).glob("*.*.md")]
    return bool(waiting) or bool(
        git("diff", "--name-only", tag, "--", f"{one.folder}/CHANGELOG.md", root=root)
    )


def _refusals(one: Distribution, every: Iterable[Distribution]) -> Iterable[str]:
    """Name the distributions of this checkout that do not allow this one's version."""
    for other in every:
        for need in other.requires:
            if need.name == one.name and not need.specifier.contains(one.version, prereleases=True):
                yield f"{other.name} wants {need}, and this is {one.version}"


def oldest_core(allowed: SpecifierSet, root: Path = ROOT) -> str | None:
    """Give the tag of the oldest released hicache-core in a range; None where none was released."""
    released = {
        v: tag for v, tag in tags("hicache-core", root).items() if allowed.contains(v, prereleases=True)
    }
    return released[min(released)] if released else None


def cores(dist: Path, root: Path = ROOT) -> int:
    """Run each light plugin with the oldest and the newest core; return how many failed."""
    failed = 0
    newest = _wheel(dist, "hicache-core")
    with tempfile.TemporaryDirectory(prefix="hicache-cores-") as work:
        for one in distributions(root):
            plugin = one.folder.removeprefix("plugins/")
            if plugin not in LIGHT:
                continue
            (need,) = [need for need in one.requires if need.name == "hicache-core"]
            tag = oldest_core(need.specifier, root)
            wheels = {"newest": newest}
            if tag is not None:
                wheels["oldest"] = _core_of(tag, Path(work) / "cores", root)
            for age, core in wheels.items():
                said = f"{one.name} with {age} core, {core.name.split('-')[1]}"
                good = _runs(plugin, _wheel(dist, one.name), core, dist, Path(work) / f"{plugin}-{age}")
                sys.stdout.write(f"{said}: {'passes' if good else 'FAILS'}\n")
                failed += not good
            if tag is None:
                sys.stdout.write(
                    f"{one.name}: no hicache-core {need.specifier} was released yet; this one is the oldest\n"
                )
    return failed


def _wheel(dist: Path, name: str) -> Path:
    (wheel,) = dist.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    return wheel


def _core_of(tag: str, place: Path, root: Path) -> Path:
    """Build hicache-core as it was at a tag."""
    folder = place / tag
    if not folder.exists():
        folder.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", tag, "core"], cwd=root, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
        subprocess.run([*build, str(folder / "core")], check=True)
    return _wheel(folder, "hicache-core")


def _runs(plugin: str, wheel: Path, core: Path, dist: Path, place: Path) -> bool:
    """Install a plugin's wheel and one core in a bare environment, and run the suite's first level."""
    venv.create(place, with_pip=True)
    python = str(place / "bin" / "python")
    suite = _wheel(dist, "hicache-conformance")
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--find-links",
        str(dist),
    ]
    commands = [
        [*install, str(core), str(suite), f"{wheel}[check]"],
        [python, "-m", "pip", "check"],
        [python, "-m", "hicache_conformance", plugin, "--level", "core"],
    ]
    # With PYTHONPATH, pip would find what is named there installed already.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return all(subprocess.run(each, cwd=place, env=clean, check=False).returncode == 0 for each in commands)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("check")
    verbs.add_parser("cores").add_argument("dist", type=Path)
    verbs.add_parser("tagged").add_argument("tag")
    given = parser.parse_args(arguments)
    if given.verb == "cores":
        return 1 if cores(given.dist.resolve()) else 0
    if given.verb == "tagged":
        one = tagged(given.tag)
        sys.stdout.write(f"name={one.name}\nfolder={one.folder}\n")
        return 0
    findings = check()
    for finding in findings:
        sys.stdout.write(f"{finding}\n")
        for line in finding.trouble:
            sys.stdout.write(f"    {line}\n")
    return 1 if any(finding.trouble for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(main())
