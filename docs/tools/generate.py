"""Writes the generated tables of docs/: `python docs/tools/generate.py [--check]`.

A page names a table between two comments, ``<!-- generated: NAME -->`` and
``<!-- end generated -->``; what stands between them is replaced. Tables come from the
specs and options models of the installed backends, from every pyproject.toml,
from docstrings, and from reports of the suite in docs/conformance/; nothing in
them is typed. ``--check`` writes nothing, and ends with status 1 naming each
table that differs from a fresh one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hicache_cli.backends import _LABELS
from hicache_cli.described import describe, provider_and_spec
from hicache_cli.output import nbytes_text, yes_no
from hicache_core import BackendSpec, Capabilities, Status
from hicache_core import storage as contract
from hicache_core.registry import INSTALL_HINTS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent
REPORTS = DOCS / "conformance"
#: The order of the tables' columns: the embedded default first.
BACKENDS = tuple(INSTALL_HINTS)

_MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(_cell(cell) for cell in line) + " |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def specs() -> list[BackendSpec]:
    """Give the specs of all backends of this repository, which must be installed."""
    return [provider_and_spec(name)[1] for name in BACKENDS]


def comparison() -> str:
    """What each backend can do."""
    fields = dataclasses.fields(Capabilities)
    rows = [
        [_LABELS[field.name], *(yes_no(getattr(spec.capabilities, field.name)) for spec in specs())]
        for field in fields
    ]
    return table(["", *BACKENDS], rows)


def backends() -> str:
    """One line a backend."""
    return table(
        ["backend", "over", "to install"],
        [[f"[{s.name}]({s.name}.md)", s.summary, f"`{INSTALL_HINTS[s.name]}`"] for s in specs()],
    )


def native() -> str:
    """What each backend needs on the machine, and the versions that were proven."""
    rows = [
        [s.name, f"`{need.module}`", f"`{need.versions}`" if need.versions else "any", *_ways(need)]
        for s in specs()
        for need in s.requires
    ]
    return table(["backend", "module", "versions proven", "pip", "Debian"], rows)


def _ways(need: Any) -> list[str]:
    return [f"`{need.pip}`" if need.pip else "-", f"`{need.apt}`" if need.apt else "-"]


def options() -> str:
    """Every backend's options, from its model."""
    parts = []
    for name in BACKENDS:
        provider, spec = provider_and_spec(name)
        rows = [_option(row) for row in describe(provider, spec).rows]
        parts.append(
            f"## {name}\n\n" + table(["option", "type", "default", "environment", "what it is"], rows)
        )
    return "\n".join(parts)


def _option(row: Any) -> list[str]:
    kind = f"{row.type}, {row.bounds}" if row.bounds else row.type
    default = row.default
    if row.type.startswith("size") and default.isdigit():
        default = nbytes_text(int(default))
    home = str(Path.home())
    if home in default or re.match(r"/tmp/|/root/", default):
        raise SystemExit(f"the default of {row.environment} names a place of this machine: {default}")
    return [f"`{row.name}`", kind, default or "unset", f"`{row.environment}`", row.description]


def distributions() -> str:
    """Every distribution, its version, and the ranges it states."""
    rows = []
    for folder in _folders():
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        core = [
            r.removeprefix("hicache-core") for r in project["dependencies"] if r.startswith("hicache-core")
        ]
        others = [r for r in project["dependencies"] if not r.startswith("hicache-core")]
        rows.append(
            [
                project["name"],
                project["version"],
                f"`{project['requires-python']}`",
                f"`{core[0]}`" if core else "-",
                ", ".join(f"`{other}`" for other in others) or "-",
            ]
        )
    return table(["distribution", "version", "Python", "hicache-core", "other dependencies"], rows)


def _folders() -> list[Path]:
    patterns = ("core", "conformance", "plugins/*", "packages/*")
    return sorted(f.parent for p in patterns for f in ROOT.glob(f"{p}/pyproject.toml"))


def levels() -> str:
    """What the suite said of each backend, from the reports kept in docs/conformance/."""
    files = sorted(REPORTS.glob("*.json"), key=lambda file: _place(file.stem))
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    order = list(dict.fromkeys(level for report in reports for level in report["levels"]))
    rows = []
    for report in reports:
        versions = [report["distribution"], *report["native"], f"core {report['core']}"]
        verdicts = [report["levels"].get(level, "-") for level in order]
        rows.append([report["backend"], ", ".join(versions), report["python"], *verdicts])
    return table(["backend", "versions", "Python", *order], rows)


def _place(stem: str) -> tuple[int, str]:
    return (BACKENDS.index(stem) if stem in BACKENDS else len(BACKENDS), stem)


def clauses() -> str:
    """The contract's clauses, from the docstring of hicache_core.storage."""
    text = contract.__doc__ or ""
    found = re.findall(r"^(C\d+)\s+(.*?)(?=^C\d+ |\Z)", text, re.DOTALL | re.MULTILINE)
    return table(["clause", ""], [[name, words.replace("``", "`")] for name, words in found])


def statuses() -> str:
    """Each Status and its docstring, from the source."""
    source = (ROOT / "core/src/hicache_core/status.py").read_text(encoding="utf-8")
    words = dict(re.findall(r'^    ([A-Z_]+) = \d+\n    """(.*?)"""', source, re.DOTALL | re.MULTILINE))
    return table(["status", "means"], [[f"`{status.name}`", words[status.name]] for status in Status])


TABLES: dict[str, Callable[[], str]] = {
    "comparison": comparison,
    "backends": backends,
    "native": native,
    "options": options,
    "distributions": distributions,
    "levels": levels,
    "clauses": clauses,
    "statuses": statuses,
}


def generated(text: str) -> str:
    """Give a page with its tables made anew."""

    def fresh(found: re.Match[str]) -> str:
        if found[2] not in TABLES:
            raise SystemExit(f"no table '{found[2]}'; there are: {', '.join(TABLES)}")
        return f"{found[1]}\n{TABLES[found[2]]()}\n{found[4]}"

    return _MARKED.sub(fresh, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check every page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    for name in [name for name in os.environ if name.startswith("HICACHE_") and "CI" not in name]:
        raise SystemExit(f"{name} is set, and would show in the tables")
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = generated(before)
        if after != before:
            stale.append(page.name)
            if not check:
                page.write_text(after, encoding="utf-8")
    if stale:
        sys.stdout.write(f"{'differs from a fresh generation' if check else 'written'}: {', '.join(stale)}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
