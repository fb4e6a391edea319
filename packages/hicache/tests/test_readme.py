"""What the root README says is run, as it stands there."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from hicache_core.registry import registry


def block(text: str, language: str, after: str = "") -> str:
    """Give the first fenced block of a language behind some text."""
    found = re.search(rf"```{language}\n(.*?)```", text[text.index(after) :], re.DOTALL)
    assert found, f"the README has no {language} block"
    return found[1]


@pytest.fixture
def readme(repository) -> str:
    return (repository / "README.md").read_text()


@pytest.fixture
def unpackaged(site, acme_source):
    """The two backends that a reader would have written: an installed third-party one, and a plain module."""
    site.backend("acme", acme_source())
    source = acme_source(module="mine.store").replace("AcmeStorage", "MineStore").replace('"acme"', '"mine"')
    site.install("nothing", modules={"mine/__init__.py": "", "mine/store.py": source})
    yield
    registry.unregister("mine")


def backends_of(statement: ast.stmt) -> set[str]:
    """Name the backends that a statement runs."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return {call.args[0].value for call in calls if isinstance(call.func, ast.Name) and call.func.id == "run"}


@pytest.mark.usefixtures("unpackaged")
def test_the_example_runs_with_every_backend_that_is_here(readme, tmp_path):
    source = block(readme, "python").replace("/tmp/kv", str(tmp_path / "kv"))
    module = ast.parse(source)
    served = [name for statement in module.body for name in backends_of(statement)]
    assert served == ["file", "mooncake", "acme", "mine"]
    here = {"file", "acme", "mine"}
    module.body = [statement for statement in module.body if backends_of(statement) <= here]
    exec(compile(module, "README.md", "exec"), {})
    assert (tmp_path / "kv").is_dir()


def test_the_example_is_the_design_s_and_fails_where_pages_do_not_come_back(
    readme, site, acme_source, tmp_path
):
    site.backend("acme", acme_source(damage="return [Status.MISS] * len(keys)"))
    module = ast.parse(block(readme, "python"))
    module.body = [statement for statement in module.body if backends_of(statement) <= {"acme"}]
    with pytest.raises(AssertionError):
        exec(compile(module, "README.md", "exec"), {})


def commands(text: str) -> list[list[str]]:
    lines = block(text, "sh", after="<!-- commands -->").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def test_the_commands_begin_with_an_installation_of_folders_that_exist(readme, repository):
    first, *others = commands(readme)
    assert first[:2] == ["pip", "install"]
    assert all((repository / folder / "pyproject.toml").is_file() for folder in first[2:])
    assert {line[0] for line in others} == {"hicache"}


@pytest.mark.slow
@pytest.mark.usefixtures("site")
def test_every_command_works(readme, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in commands(readme)[1:]:
        result = run(*line[1:])
        assert result.exit_code == 0, f"{shlex.join(line)}\n{result.output}"
    assert Path("replay.html").is_file()
