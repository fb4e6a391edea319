"""Release tooling: what `release check` says of a repository with tags, and plugins with two cores."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".ci"))

release = pytest.importorskip("release", reason="packaging is not installed")


class Repository:
    """A repository of two distributions, with commits and tags."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet", "--initial-branch", "main")
        self.project("core", "hicache-core", "0.1.0", [])
        self.project("plugins/acme", "hicache-acme", "0.1.0", ["hicache-core>=0.1,<0.2"])
        self.commit()

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], cwd=self.root, check=True, capture_output=True)

    def project(self, folder: str, name: str, version: str, needs: list[str]) -> None:
        self.write(
            f"{folder}/pyproject.toml",
            f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {needs!r}\n',
        )

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def commit(self) -> None:
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", "change")

    def trouble(self) -> dict[str, list[str]]:
        return {one.name: list(one.trouble) for one in release.check(self.root) if one.trouble}


@pytest.fixture
def repository(tmp_path) -> Repository:
    made = Repository(tmp_path)
    made.git("tag", "hicache-core-0.1.0")
    made.git("tag", "hicache-acme-0.1.0")
    return made


def test_what_did_not_change_needs_nothing(repository):
    repository.write("plugins/acme/tests/test_x.py", "x = 1\n")
    repository.write("plugins/acme/README.md", "words\n")
    repository.commit()
    assert repository.trouble() == {}
    assert [(one.tag, one.changed) for one in release.check(repository.root)] == [
        ("hicache-core-0.1.0", 0),
        ("hicache-acme-0.1.0", 0),
    ]


def test_before_the_first_tag_everything_may_be_released(tmp_path):
    made = Repository(tmp_path)
    assert made.trouble() == {}
    assert {one.tag for one in release.check(tmp_path)} == {""}


def test_a_change_needs_a_version_and_a_fragment(repository):
    repository.write("plugins/acme/src/acme.py", "x = 1\n")
    repository.commit()
    assert repository.trouble() == {
        "hicache-acme": ["changed since hicache-acme-0.1.0, and the version is still 0.1.0"]
    }
    repository.project("plugins/acme", "hicache-acme", "0.1.1", ["hicache-core>=0.1,<0.2"])
    repository.commit()
    assert repository.trouble() == {
        "hicache-acme": [
            "changed since hicache-acme-0.1.0, without a fragment or a new part of its CHANGELOG"
        ]
    }
    repository.write("plugins/acme/changes/+x.fix.md", "fixed\n")
    assert repository.trouble() == {}


def test_a_version_that_falls_is_named(repository):
    repository.project("plugins/acme", "hicache-acme", "0.0.9", ["hicache-core>=0.1,<0.2"])
    repository.write("plugins/acme/changes/+x.fix.md", "fixed\n")
    assert repository.trouble() == {"hicache-acme": ["version 0.0.9 is below the released 0.1.0"]}


def test_a_core_that_a_plugin_does_not_allow_is_named(repository):
    repository.project("core", "hicache-core", "0.2.0", [])
    repository.write("core/changes/+x.feature.md", "new\n")
    assert repository.trouble() == {
        "hicache-core": ["hicache-acme wants hicache-core<0.2,>=0.1, and this is 0.2.0"]
    }


def test_names_that_begin_alike_are_told_apart(repository):
    repository.git("tag", "hicache-acme-extra-9.0.0")
    repository.git("tag", "hicache-acme-0.0.5")
    assert sorted(map(str, release.tags("hicache-acme", repository.root))) == ["0.0.5", "0.1.0"]


def test_the_oldest_core_is_the_lowest_that_is_allowed(repository):
    from packaging.specifiers import SpecifierSet

    for version in ("0.0.9", "0.1.5", "0.2.0"):
        repository.git("tag", f"hicache-core-{version}")
    assert release.oldest_core(SpecifierSet(">=0.1,<0.2"), repository.root) == "hicache-core-0.1.0"
    assert release.oldest_core(SpecifierSet(">=0.1.2,<0.2"), repository.root) == "hicache-core-0.1.5"
    assert release.oldest_core(SpecifierSet(">=0.3"), repository.root) is None


def test_a_tag_names_one_distribution_at_its_version(repository):
    assert release.tagged("hicache-acme-0.1.0", repository.root).folder == "plugins/acme"
    with pytest.raises(SystemExit, match="is no distribution of this checkout"):
        release.tagged("hicache-acme-0.1.1", repository.root)


def test_every_workflow_calls_what_there_is():
    """Scripts, stages and environments that workflows name exist."""
    import re

    text = "\n".join(file.read_text() for file in (ROOT / ".github/workflows").glob("*.yml"))
    stages = re.search(r"stage: \[(.*?)\]", text)[1].split(", ")
    environments = re.search(r"environment: \[(.*?)\]", text)[1].split(", ")
    script = (ROOT / ".ci/run").read_text()
    assert [stage for stage in stages if f"stage_{stage}()" not in script] == []
    assert [name for name in environments if not os.access(ROOT / ".ci/env" / name, os.X_OK)] == []
    assert (ROOT / ".ci/check-wheel").is_file()
    assert os.access(ROOT / ".ci/check-wheel", os.X_OK)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """Wheels of this checkout."""
    place = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place)]
    folders = ("core", "conformance", "plugins/file")
    subprocess.run([*build, *(str(ROOT / folder) for folder in folders)], check=True)
    return place


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plugin_runs_with_the_oldest_core_and_the_newest(wheels, tmp_path, monkeypatch, capfd):
    """The repository as it is, with core one version older under a tag."""
    root = tmp_path / "repository"
    for folder in ("core", "plugins/file"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    made = Repository.__new__(Repository)
    made.root = root
    made.git("init", "--quiet", "--initial-branch", "main")
    project = root / "core/pyproject.toml"
    now = project.read_text()
    project.write_text(now.replace('version = "0.1.0"', 'version = "0.1.0.dev7"'))
    made.commit()
    made.git("tag", "hicache-core-0.1.0.dev7")
    plugin = root / "plugins/file/pyproject.toml"
    plugin.write_text(plugin.read_text().replace("hicache-core>=0.1,<0.2", "hicache-core>=0.1.0.dev1,<0.2"))
    monkeypatch.setattr(release, "LIGHT", ("file",))
    assert release.cores(wheels, root) == 1  # the wheel itself asks for 0.1, which the older one is not
    said = capfd.readouterr().out
    assert "hicache-file with newest core, 0.1.0: passes" in said
    assert "hicache-file with oldest core, 0.1.0.dev7: FAILS" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_plain_script_runs_the_suite_on_a_wheel(wheels, tmp_path):
    (wheel,) = wheels.glob("hicache_file-*.whl")
    environment = os.environ | {
        "PIP_FIND_LINKS": str(wheels),
        "PYTHON": sys.executable,
        "REPORTS": str(tmp_path / "reports"),
    }
    script = [str(ROOT / ".ci/check-wheel"), str(wheel), "file", "--level", "core"]
    done = subprocess.run(script, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(file.name for file in (tmp_path / "reports").iterdir()) == [
        "junit.xml",
        "report.html",
        "report.json",
    ]
    absent = subprocess.run([*script[:2], "nobody"], env=environment, cwd=tmp_path, capture_output=True)
    assert absent.returncode == 2
    broken = tmp_path / "hicache_broken-1.0-py3-none-any.whl"
    broken.write_bytes(b"no wheel")
    refused = subprocess.run(
        [script[0], str(broken), "x"], env=environment, cwd=tmp_path, capture_output=True
    )
    assert refused.returncode == 3
