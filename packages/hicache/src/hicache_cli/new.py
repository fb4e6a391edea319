"""`hicache new NAME`: writes a whole plugin distribution, which passes the suite before any change to it.

Its files are in the folder ``template``, with ``@@word@@`` where a name goes and
``.in`` behind their names, so that nothing takes them for code of this package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click
from packaging.version import Version

from hicache_cli.output import emit_json, json_option
from hicache_core.errors import InvalidArgument
from hicache_core.registry import INSTALL_HINTS, registry

if TYPE_CHECKING:
    import sys

    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_WORD = re.compile(r"@@(\w+)@@")
_SUFFIX = ".in"
#: The folder in the template that takes the package's name.
_PACKAGE = "package"


@click.command()
@click.argument("name")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where to write it; default: ./hicache-NAME. It must not exist, or be empty.",
)
@json_option
def new(name: str, output: Path | None, as_json: bool) -> None:
    """Write a plugin for a backend NAME: a distribution of its own, to be filled in.

    It keeps pages in a folder until you replace its client, so it can be checked and replayed at once.
    """
    words = _words(name)
    folder = output or Path(words["distribution"])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument(
            "the plugin's folder is in use",
            value=str(folder),
            remedy="Name another one with --output, or empty it.",
        )
    written = []
    for path, text in generated(words):
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
        written.append(path)
    if as_json:
        emit_json({"name": name, "folder": str(folder), "files": sorted(written)})
        return
    click.echo(f"{folder}: {len(written)} files. Next:")
    click.echo(f"  pip install -e '{folder}[check]'")
    click.echo(f"  hicache check {name}")
    click.echo(f"Then read {folder / 'README.md'}.")


def _words(name: str) -> dict[str, str]:
    """Give what stands for each ``@@word@@``.

    Raises:
        InvalidArgument: the name is not well formed, or taken.
    """
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            "a backend's name is not well formed",
            value=repr(name),
            remedy=f"Use the pattern {_NAME.pattern}.",
        )
    if name in INSTALL_HINTS or name in registry.names():
        raise InvalidArgument(
            "a backend of this name is there already",
            value=repr(name),
            remedy="Choose another; two distributions with one name are a conflict wherever both are.",
        )
    core = Version(version("hicache-core"))
    oldest = f"{core.major}.{core.minor}"
    return {
        "name": name,
        "upper": name.upper(),
        "distribution": f"hicache-{name.replace('_', '-')}",
        "package": f"hicache_{name}",
        "prefix": "".join(part.capitalize() for part in name.split("_")),
        "core_range": f">={oldest},<{core.major}.{core.minor + 1}",
        "oldest_core": f"{oldest}.0",
    }


def generated(words: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Give every file of the plugin: its path, with slashes, and its text."""
    for path, text in _files(resources.files("hicache_cli") / "template"):
        parts = [words["package"] if part == _PACKAGE else part for part in path.split("/")]
        yield _filled("/".join(parts), words), _filled(text, words)


def _files(folder: Traversable, path: str = "") -> Iterator[tuple[str, str]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _files(entry, f"{path}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            yield path + entry.name.removesuffix(_SUFFIX), entry.read_text(encoding="utf-8")


def _filled(text: str, words: Mapping[str, str]) -> str:
    return _WORD.sub(lambda found: words[found[1]], text)
