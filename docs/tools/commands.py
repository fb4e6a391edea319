"""Every command block of README.md, docs/ and the distributions' READMEs, and how each is run.

A block is a fenced ``sh`` block, or indented lines that begin with a program.
It is run as one script in an empty folder, with places that a reader would own
(``/var/cache/hicache``, ``/mnt/...``) moved into it. Not run are ``pip`` and
``apt-get`` lines (what they name is compared with what there is) and the entries
in ``.ci/``, which make environments of their own. A block that needs a foreign
server, a library or minutes is named in docs/commands.toml with the reason; one
that is named there and is not there any more is an error.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent
PROGRAMS = (
    "hicache",
    "pip",
    "python",
    "pytest",
    "mkdir",
    "export",
    "hatch",
    "apt-get",
    "cd",
    ".ci/",
    "mooncake_master",
)
_PROGRAM = re.compile(rf"    (?:{'|'.join(map(re.escape, PROGRAMS))})[\w./-]*(?:\s|$)")
#: Places of a reader's machine, and words that stand for a name of the reader's.
_PLACES = re.compile(r"(?<![\w.])/(?:var/cache|var/lib|mnt|data|run|etc)/[\w./-]+|/tmp/kv\b")
_NAMES = {"NAME": "memory", "64GiB": "1GiB"}
_INSTALLERS = ("pip", "apt-get")
#: Entries of this repository's own checks, each of which makes environments; CI itself runs them.
_CHECKS = ".ci/"


@dataclass(frozen=True)
class Block:
    """Lines that a reader would paste."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Give the commands, continued lines joined, without comments and output."""
        joined = self.text.replace("\\\n", " ")
        return [
            line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")
        ]

    @property
    def installs(self) -> list[list[str]]:
        """Give what installers are asked for, each in words."""
        parts = [part.strip() for line in self.commands for part in line.split("&&")]
        return [shlex.split(part, comments=True) for part in parts if part.split(" ")[0] in _INSTALLERS]

    def script(self, place: Path) -> str:
        """Give the script to run in a folder; empty where nothing is left to run."""
        kept = []
        for line in self.commands:
            words = line.split()
            if (
                words[0] in _INSTALLERS
                or words[0].startswith(_CHECKS)
                or any(row.line and row.has in line for row in _rows_of(self.page))
            ):
                continue
            for name, stands_for in _NAMES.items():
                line = re.sub(rf"\b{name}\b", stands_for, line)
            line = _PLACES.sub(lambda found: f"{place}{found[0]}", line)
            kept.append(re.sub(r"(?<!\S)(benchmarks/)", f"{ROOT}/\\1", line))
        return "\n".join(kept)


def pages() -> list[Path]:
    """Give every page with commands for people."""
    patterns = (
        "README.md",
        "core/README.md",
        "conformance/README.md",
        "plugins/*/README.md",
        "packages/*/README.md",
    )
    found = [file for pattern in patterns for file in ROOT.glob(pattern)]
    return sorted(found) + sorted(DOCS.glob("*.md"))


def blocks() -> list[Block]:
    """Give every block of every page."""
    return [block for page in pages() for block in _blocks(page)]


def _blocks(page: Path) -> Iterator[Block]:
    name = str(page.relative_to(ROOT))
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if found[1] in ("sh", "bash", "console", "shell"):
            yield Block(name, text.count("\n", 0, found.start()) + 2, found[2])
    fenced = re.sub(r"^```.*?^```", lambda f: "\n" * f[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    lines = fenced.splitlines()
    at = 0
    while at < len(lines):
        if not _PROGRAM.match(lines[at]) or (at and lines[at - 1].strip()):
            at += 1
            continue
        start = at
        while at < len(lines) and lines[at].startswith("    "):
            at += 1
        yield Block(name, start + 1, "\n".join(line[4:] for line in lines[start:at]))


@dataclass(frozen=True)
class Elsewhere:
    """A block that is not run here, and why."""

    page: str
    has: str
    """Some of its text."""
    because: str
    line: bool = False
    """Leave out only the lines that have it."""


def elsewhere() -> list[Elsewhere]:
    """Read docs/commands.toml."""
    rows = tomllib.loads((DOCS / "commands.toml").read_text(encoding="utf-8"))["elsewhere"]
    return [Elsewhere(**row) for row in rows]


def excused(block: Block) -> Elsewhere | None:
    """Give the reason why a block is not run here; None where it is."""
    return next((row for row in _rows_of(block.page) if not row.line and row.has in block.text), None)


def _rows_of(page: str) -> list[Elsewhere]:
    return [row for row in elsewhere() if row.page == page]
