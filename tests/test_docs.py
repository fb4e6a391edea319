"""The documentation is true: tables as a fresh generation, commands as they stand.

The blocks are run (slow) where every light distribution is installed; what each
needs that this machine lacks is named in docs/commands.toml.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "tools"))

import commands  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BLOCKS = commands.blocks()
RUN = [block for block in BLOCKS if not commands.excused(block) and block.script(Path("/"))]
#: Names on PyPI that a page may ask for besides ours.
FOREIGN = {"hatch", "build", "pytest"}


def projects() -> dict[str, dict]:
    found = {}
    for pattern in ("core", "conformance", "plugins/*", "packages/*"):
        for file in ROOT.glob(f"{pattern}/pyproject.toml"):
            project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
            found[project["name"]] = project
    return found


def test_no_generated_table_differs_from_a_fresh_one():
    """Run: python docs/tools/generate.py"""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HICACHE_")}
    command = [sys.executable, str(ROOT / "docs/tools/generate.py"), "--check"]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\nRun: python docs/tools/generate.py"


def test_commands_that_run_elsewhere_are_there():
    unused = [
        row
        for row in commands.elsewhere()
        if not any(block.page == row.page and row.has in block.text for block in BLOCKS)
    ]
    assert unused == []


def test_there_are_commands_and_most_of_them_are_run():
    kept = [block for block in BLOCKS if block.script(Path("/"))]
    assert len(kept) > 30
    assert len(RUN) >= len(kept) / 2


def complaint(requirement: str, known: dict[str, dict]) -> str:
    """Say what is wrong with something that pip is asked for; empty when nothing is."""
    name, _, extras = requirement.partition("[")
    extras = [extra for extra in extras.rstrip("]").split(",") if extra]
    if name.startswith(("./", "PATH/")) or name == ".":
        folder = ROOT / name.removeprefix("PATH/")
        return "" if name == "." or (folder / "pyproject.toml").is_file() else f"no folder {name}"
    if name in FOREIGN:
        return ""
    if name not in known:
        return f"{name} is none of ours"
    missing = set(extras) - set(known[name].get("optional-dependencies", {}))
    return f"{name} has no extra {', '.join(sorted(missing))}" if missing else ""


def test_what_pip_is_asked_for_is_there():
    known = projects()
    wrong = []
    for block in BLOCKS:
        for words in block.installs:
            if words[:2] == ["pip", "install"]:
                asked = [word for word in words[2:] if not word.startswith("-")]
                wrong += [f"{block}: {text}" for word in asked if (text := complaint(word, known))]
    assert wrong == []


@pytest.mark.parametrize(
    ("requirement", "wrong"),
    [
        ("hicache[file]", ""),
        ("hicache[nothing]", "hicache has no extra nothing"),
        ("hicache-nothing", "hicache-nothing is none of ours"),
        ("./nowhere", "no folder ./nowhere"),
    ],
)
def test_the_check_of_pip_lines_finds_what_is_wrong(requirement, wrong):
    assert complaint(requirement, projects()) == wrong


def test_every_status_has_advice():
    from hicache_core import Status

    text = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    advice = text[text.index("| status | what to do |") : text.index("## Upgrading")]
    assert {name for name in re.findall(r"`([A-Z_]+)`", advice)} == {status.name for status in Status}


def test_every_backend_has_a_page_in_the_navigation():
    from hicache_core.registry import INSTALL_HINTS

    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [name for name in INSTALL_HINTS if f" {name}: {name}.md" not in text] == []
    assert [name for name in INSTALL_HINTS if not (ROOT / f"docs/{name}.md").is_file()] == []


def named(script: str) -> list[str]:
    """Name the backends that a reader has installed by then: the defaults, and those of the script."""
    from hicache_core.registry import INSTALL_HINTS

    return sorted({"file", "memory"} | {name for name in INSTALL_HINTS if re.search(rf"\b{name}\b", script)})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", RUN, ids=map(str, RUN))
def test_a_block_of_commands_runs(block, tmp_path):
    request = {"timestamp": 1, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}
    (tmp_path / "log.jsonl").write_text(json.dumps(request) + "\n")
    for folder in ("var/cache", "mnt", "data", "run"):
        (tmp_path / folder).mkdir(parents=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HICACHE_")}
    script = block.script(tmp_path)
    allowed = ",".join(named(script))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=clean | {"PATH": path, "TMPDIR": str(tmp_path), "HICACHE_BACKENDS_ALLOW": allowed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
