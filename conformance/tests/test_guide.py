"""docs/writing-a-plugin.md is true: the plugin it prints is built from it and passes the suite."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "writing-a-plugin.md"

pytestmark = pytest.mark.skipif(
    not GUIDE.exists(), reason="run from a distribution without the repository's docs"
)


def _files() -> dict[str, str]:
    """Give the files that the guide prints: each block's first line is its path."""
    blocks = re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", GUIDE.read_text(), flags=re.M | re.S)
    return dict(blocks)


def _build(folder: Path) -> dict[str, str]:
    """Lay the plugin out as an installation would, without a network, and give the environment to run in."""
    files = _files()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    entry = re.search(r'^sqlite = "(.*)"$', files["pyproject.toml"], flags=re.M)
    assert entry is not None
    info = folder / "src" / "hicache_sqlite-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hicache-sqlite\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[hicache.backends]\nsqlite = {entry[1]}\n")
    return os.environ | {"PYTHONPATH": str(folder / "src")}


def test_guide_prints_every_file_it_names() -> None:
    assert sorted(_files()) == [
        "pyproject.toml",
        "src/hicache_sqlite/__init__.py",
        "src/hicache_sqlite/harness.py",
        "src/hicache_sqlite/options.py",
        "src/hicache_sqlite/spec.py",
        "src/hicache_sqlite/storage.py",
        "tests/test_conformance.py",
    ]


@pytest.mark.slow
def test_guide_its_plugin_passes_the_suite(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "hicache_conformance", "sqlite", "--json", str(report)]
    ran = subprocess.run(command, env=_build(tmp_path), cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    levels = {name: level["verdict"] for name, level in json.loads(report.read_text())["levels"].items()}
    assert levels == dict.fromkeys(
        ["core", "batch", "memory", "lifecycle", "identity", "shared", "durable", "threads", "fault"],
        "reached",
    ) | {"evict": "unsupported"}


def test_guide_its_three_lines_run_under_pytest(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests", "-k", "hole_at", "-p", "no:cacheprovider"]
    ran = subprocess.run(command, env=_build(tmp_path), cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "8 passed" in ran.stdout


@pytest.mark.slow
def test_guide_its_plugin_is_durable_as_it_says(tmp_path: Path) -> None:
    environment = _build(tmp_path)
    spec = tmp_path / "src" / "hicache_sqlite" / "spec.py"
    spec.write_text(spec.read_text().replace("persistent=True", "persistent=True, durable=True"))
    command = [
        sys.executable,
        "-m",
        "hicache_conformance",
        "sqlite",
        "--level",
        "durable",
        "--level",
        "shared",
    ]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
