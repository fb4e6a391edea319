"""`hicache new`: what it writes, what it refuses. test_new_installed.py installs and proves the result."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from importlib.metadata import version

import pytest

from hicache_cli.new import generated

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def plugin(run, tmp_path):
    result = run("new", "acme_kv", "--output", str(tmp_path / "plugin"))
    assert result.exit_code == 0, result.output
    return tmp_path / "plugin"


def test_a_whole_distribution_is_written(plugin):
    written = sorted(str(file.relative_to(plugin)) for file in plugin.rglob("*") if file.is_file())
    assert written == [
        ".github/workflows/ci.yml",
        ".gitignore",
        "CHANGELOG.md",
        "README.md",
        "pyproject.toml",
        "src/hicache_acme_kv/__init__.py",
        "src/hicache_acme_kv/client.py",
        "src/hicache_acme_kv/harness.py",
        "src/hicache_acme_kv/options.py",
        "src/hicache_acme_kv/py.typed",
        "src/hicache_acme_kv/spec.py",
        "src/hicache_acme_kv/storage.py",
        "tests/test_acme_kv.py",
        "tests/test_conformance.py",
    ]


def test_every_word_is_filled_in_and_every_module_parses(plugin):
    for file in (file for file in plugin.rglob("*") if file.is_file()):
        text = file.read_text(encoding="utf-8")
        assert "@@" not in text, file
        if file.suffix == ".py":
            ast.parse(text)


def test_the_project_names_its_entry_point_and_the_range_of_the_installed_core(plugin):
    project = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    major, minor, *_ = version("hicache-core").split(".")
    wanted = f">={major}.{minor},<{major}.{int(minor) + 1}"
    assert project["name"] == "hicache-acme-kv"
    assert project["dependencies"] == [f"hicache-core{wanted}"]
    assert project["optional-dependencies"] == {"check": [f"hicache-conformance{wanted}"]}
    assert project["entry-points"] == {"hicache.backends": {"acme_kv": "hicache_acme_kv.spec:SPEC"}}


def test_the_spec_s_targets_are_there(plugin, monkeypatch):
    monkeypatch.syspath_prepend(str(plugin / "src"))
    try:
        from hicache_acme_kv.spec import SPEC

        assert (SPEC.name, SPEC.api) == ("acme_kv", 1)
        for target in (SPEC.target, SPEC.options):
            module, _, name = target.partition(":")
            assert getattr(import_module(module), name).__module__ == module
    finally:
        for name in [name for name in sys.modules if name.startswith("hicache_acme_kv")]:
            del sys.modules[name]


def test_the_default_folder_is_named_as_the_distribution(run_json, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer = run_json("new", "acme_kv")
    assert answer["folder"] == "hicache-acme-kv"
    assert (tmp_path / "hicache-acme-kv" / "pyproject.toml").is_file()
    assert len(answer["files"]) == 14


@pytest.mark.parametrize("name", ["Acme", "9lives", "acme-kv", "", "a" * 33])
def test_a_name_that_no_backend_may_have_is_refused(run_json, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    error = run_json("new", name, exit_code=1)["error"]
    assert error["remedy"] == "Use the pattern [a-z][a-z0-9_]{0,31}."
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "mooncake"])
def test_a_name_that_is_taken_is_refused_installed_or_not(run_json, name):
    error = run_json("new", name, exit_code=1)["error"]
    assert "a backend of this name is there already" in error["message"]


def test_a_folder_in_use_is_left_alone(run_json, tmp_path):
    (tmp_path / "mine").write_text("kept")
    error = run_json("new", "acme", "--output", str(tmp_path), exit_code=1)["error"]
    assert error["remedy"] == "Name another one with --output, or empty it."
    assert [file.read_text() for file in tmp_path.iterdir()] == ["kept"]


def test_a_word_that_nobody_fills_in_is_an_error_and_not_a_gap():
    with pytest.raises(KeyError):
        list(generated({"package": "p", "name": "n"}))
