"""A generated plugin, built by hatch and installed beside wheels, outside of the repository, with no edit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NAME = "acme_kv"
#: What the plugin is installed beside.
NEIGHBOURS = ("core", "plugins/file", "conformance", "packages/hicache")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        find_spec("hatch") is None and not os.environ.get("HICACHE_CI_DOCS_REQUIRED"),
        reason="hatch is not installed",
    ),
]


def done(command: list[str], **where) -> str:
    """Run with nothing of ours set: what is on PYTHONPATH, pip would find installed already."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HICACHE_", "PYTHON"))}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=clean, **where)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def outside(tmp_path_factory, repository) -> Path:
    """A folder with a bare environment, wheels of this checkout, and what `hicache new` wrote."""
    place = tmp_path_factory.mktemp("outside")
    wheels = place / "wheels"
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(wheels)]
    done([*build, *(str(repository / folder) for folder in NEIGHBOURS)])
    done([sys.executable, "-m", "venv", str(place / "venv")])
    python = place / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--find-links", str(wheels)]
    done([*install, *map(str, wheels.glob("*.whl"))])
    done([str(python.with_name("hicache")), "new", NAME], cwd=place)
    plugin = place / "hicache-acme-kv"
    done([sys.executable, "-m", "hatch", "build", "--target", "wheel"], cwd=plugin)
    (wheel,) = (plugin / "dist").glob("*.whl")
    done([*install, f"{wheel}[check]", "pytest-timeout"])
    done([str(python), "-m", "pip", "check"])
    return place


@pytest.fixture
def hicache(outside):
    """Run the installed program, in a folder that has nothing to do with the repository."""

    def run(*arguments: str) -> str:
        return done([str(outside / "venv" / "bin" / "hicache"), *arguments], cwd=outside)

    return run


def test_it_is_listed(hicache):
    rows = {row["name"]: row for row in json.loads(hicache("backends", "--json"))["backends"]}
    assert (rows[NAME]["distribution"], rows[NAME]["version"]) == ("hicache-acme-kv", "0.1.0")
    assert rows[NAME]["error"] is None
    options = [row["name"] for row in json.loads(hicache("show", NAME, "--json"))["options"]]
    assert options == ["bounce", "root"]


def test_it_passes_the_suite(hicache, outside):
    hicache("check", NAME, "--json", str(outside / "report.json"))
    levels = json.loads((outside / "report.json").read_text())["levels"]
    verdicts = {name: level["verdict"] for name, level in levels.items()}
    reached = ("core", "batch", "memory", "lifecycle", "identity", "shared", "durable", "threads", "fault")
    assert verdicts == dict.fromkeys(reached, "reached") | {"evict": "unsupported"}


@pytest.mark.parametrize("workers", ["1", "2"])
def test_it_runs_the_replay(hicache, workers):
    report = json.loads(
        hicache("replay", "--backend", NAME, "--limit", "200", "--workers", workers, "--json")
    )
    assert (report["backend"], report["version"]) == (NAME, "0.1.0")
    assert (report["wrong_pages"], report["trouble"]) == (0, [])
    assert report["verified_pages"] == report["verbs"]["get"]["statuses"]["OK"] > 1000


def test_its_doctor_is_content(hicache, tmp_path):
    report = json.loads(hicache("doctor", NAME, "--option", f"root={tmp_path}", "--json"))
    assert report["ok"] is True


def test_its_own_tests_pass(outside):
    command = [str(outside / "venv" / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    out = done([*command, "tests/test_acme_kv.py"], cwd=outside / "hicache-acme-kv")
    assert "2 passed" in out
