"""Plugins that exist for one test: distributions as folders on sys.path, and their modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest

from hicache_core import observers
from hicache_core.registry import registry

#: A light module as a plugin ships it; ``{name}`` is the backend's name.
SPEC_SOURCE = """
from hicache_core import BackendSpec, Capabilities, Requirement
SPEC = BackendSpec(name="{name}", api=1, target="{module}_storage:Storage", options="core_toys:ToyOptions",
                   summary="of a test", requires={requires})
"""
STORAGE_SOURCE = """
from core_toys import ToyStorage
from {module} import SPEC
class Storage(ToyStorage):
    spec = SPEC
"""


class Plugins:
    """Writes distributions and modules; what it made is forgotten after the test."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._monkeypatch = monkeypatch
        self._modules: set[str] = set()
        self._folders: list[Path] = []
        self.scans = 0
        self._discover: Callable[..., object] = metadata.distributions

    def folder(self, name: str = "site") -> Path:
        """Give a folder on sys.path; the first one made is searched first."""
        path = self._root / name
        if path not in self._folders:
            path.mkdir(exist_ok=True)
            self._folders.append(path)
            self._monkeypatch.setattr(sys, "path", [*sys.path, str(path)])
        return path

    def alone(self) -> None:
        """Let scans see this test's distributions only, and count them."""

        def distributions(**_: object) -> object:
            self.scans += 1
            return self._discover(path=[str(folder) for folder in self._folders])

        self._monkeypatch.setattr(metadata, "distributions", distributions)
        self._monkeypatch.setattr(metadata, "entry_points", partial(self._entry_points, distributions))
        registry.refresh()

    def distribution(
        self,
        name: str,
        points: dict[str, str] | None = None,
        *,
        version: str = "1.0",
        folder: str = "site",
        group: str = "hicache.backends",
    ) -> Path:
        """Install a distribution: its metadata and entry points, no code."""
        info = self.folder(folder) / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{point} = {target}" for point, target in (points or {}).items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        importlib.invalidate_caches()
        return info

    def module(self, name: str, source: str, *, folder: str = "site") -> str:
        """Write an importable module."""
        (self.folder(folder) / f"{name}.py").write_text(source)
        self._modules.add(name)
        importlib.invalidate_caches()
        return name

    def backend(self, name: str, *, requires: str = "()", spec: str = "", storage: str = "") -> str:
        """Install a whole plugin of one backend; its parts may be replaced by other source text."""
        module = f"plugin_{name}"
        self.module(module, spec or SPEC_SOURCE.format(name=name, module=module, requires=requires))
        self.module(f"{module}_storage", storage or STORAGE_SOURCE.format(module=module))
        self.distribution(f"hicache-{name}", {name: f"{module}:SPEC"})
        return module

    def forget(self) -> None:
        for module in self._modules:
            sys.modules.pop(module, None)
        for name in registry.names():
            registry.unregister(name)
        registry.refresh()
        importlib.invalidate_caches()

    def imported(self) -> set[str]:
        """Which of this test's modules were imported."""
        return self._modules & set(sys.modules)

    @staticmethod
    def _entry_points(distributions: Callable[..., object], *, group: str) -> list[metadata.EntryPoint]:
        found = distributions()
        return [p for each in found for p in each.entry_points if p.group == group]  # type: ignore[attr-defined]


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugins]:
    """This test's plugins, and no others."""
    for variable in ("HICACHE_BACKENDS_ALLOW", "HICACHE_BACKENDS_DENY", "HICACHE_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(observers, "_hub", None)
    monkeypatch.setattr(observers, "_scanned_path", None)
    made = Plugins(tmp_path, monkeypatch)
    made.alone()
    yield made
    monkeypatch.undo()
    made.forget()
