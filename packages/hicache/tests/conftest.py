"""Builders: the program run in and out of process, and installed distributions made of a few files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hicache_cli.main import main


@pytest.fixture(autouse=True)
def _no_settings_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("HICACHE_") and variable != "HICACHE_TRACE":
            monkeypatch.delenv(variable)


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run the program in this process; exceptions other than exits go through."""

    def invoke(*arguments: str, **kwargs: Any) -> Result:
        result = CliRunner().invoke(main, arguments, **kwargs)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def run_json(run: Callable[..., Result]) -> Callable[..., Any]:
    """Run the program with --json and read what it printed on stdout."""

    def invoke(*arguments: str, exit_code: int = 0) -> Any:
        result = run(*arguments, "--json")
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    return invoke


@pytest.fixture
def program(site: Site) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the program as a process of its own, with the fake distributions on its path."""

    def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "hicache_cli.main", *arguments],
            env=os.environ | {"PYTHONPATH": str(site.folder)} | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return start


class Site:
    """A folder on sys.path that looks like installed distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        project: str,
        version: str = "1.0",
        *,
        entry_points: dict[str, dict[str, str]] | None = None,
        modules: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> Path:
        """Write modules (path -> source) and the metadata of one distribution; give the folder it is in."""
        place = folder or self.folder
        info = place / f"{project.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        sections = [
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
            for group, points in (entry_points or {}).items()
        ]
        (info / "entry_points.txt").write_text("\n".join(sections))
        paths = [f"{info.name}/METADATA", f"{info.name}/entry_points.txt"]
        for path, source in (modules or {}).items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            (place / path).write_text(dedent(source))
            paths.append(path)
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in paths))
        return place

    def backend(self, name: str, source: str, *, project: str = "", version: str = "1.0") -> None:
        """Install a distribution with one backend whose spec module has this source."""
        project = project or f"hicache-{name}"
        module = f"fake_{project.replace('-', '_')}_spec"
        points = {"hicache.backends": {name: f"{module}:SPEC"}}
        self.install(project, version, entry_points=points, modules={f"{module}.py": source})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A fresh folder for fake distributions; what was imported from it is forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    yield Site(folder)
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds every distribution; a test skips where it runs from a wheel alone."""
    for parent in Path(__file__).resolve().parents:
        if (parent / "hatch.toml").is_file() and (parent / "core").is_dir():
            return parent
    pytest.skip("not run from the repository")


#: A whole backend in one module: pages in a dict of the process, an option of each kind.
ACME = """
from pydantic import Field, SecretStr
from typing import Annotated, Literal
from hicache_core import BackendSpec, Capabilities, HiCacheStorage, Requirement, Status, Usage
from hicache_core.options import Options, Size

SPEC = BackendSpec(
    name="acme", api=1, target="{module}:AcmeStorage", options="{module}:AcmeOptions", summary="an example",
    capabilities=Capabilities({capabilities}), requires=({requires}),
)

class AcmeOptions(Options):
    url: str = Field(default="acme://localhost", description="Where the server is.")
    token: SecretStr | None = Field(default=None, description="How to get in.")
    streams: int = Field(default=4, ge=1, le=64, description="Connections.")
    cache: Size = Field(default="64mib", description="Client cache.")
    mode: Literal["fast", "safe"] = "safe"
    {options}

class AcmeStorage(HiCacheStorage):
    spec = SPEC
    def open(self, pools=()):
        self.pages = {{}}
        {open}
        super().open(pools)
    def batch_contains(self, keys):
        return [Status.OK if key in self.pages else Status.MISS for key in keys]
    def batch_get(self, keys, locs):
        statuses = []
        for i, key in enumerate(keys):
            if key in self.pages:
                value = bytearray(self.pages[key])
                {damage}
                locs.views(i)[0][:] = value
            statuses.append(Status.OK if key in self.pages else Status.MISS)
        return statuses
    def batch_set(self, keys, locs):
        {set}
        for i, key in enumerate(keys):
            self.pages.setdefault(key, bytes(locs.views(i)[0]))
        return [Status.OK] * len(keys)
    def batch_remove(self, keys):
        return [Status.OK if self.pages.pop(key, None) else Status.MISS for key in keys]
    def clear(self):
        n = len(self.pages)
        self.pages.clear()
        return n
    def usage(self):
        return Usage(len(self.pages), 0, 0, None)
"""


def acme(**parts: str) -> str:
    """Fill in the source of the acme backend: capabilities, requires, options, open, damage, set."""
    defaults = {
        "module": "fake_hicache_acme_spec",
        "capabilities": 'remove=True, clear=True, deadline="cancel"',
        "requires": "",
        "options": "",
        "open": "",
        "damage": "",
        "set": "",
    }
    filled = defaults | parts
    statements = ("options", "open", "damage", "set")
    return ACME.format(
        **{part: text or ("pass" if part in statements else "") for part, text in filled.items()}
    )


@pytest.fixture
def acme_source() -> Callable[..., str]:
    """Give the acme backend's source with parts replaced."""
    return acme
