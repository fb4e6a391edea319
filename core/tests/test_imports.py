"""What importing core loads, in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

import hicache_core

#: What costs milliseconds, or belongs to somebody else.
HEAVY = (
    *("torch", "numpy", "pydantic", "pluggy", "importlib.metadata", "logging", "ctypes", "asyncio"),
    *("hashlib", "json", "inspect", "mmap", "dataclasses", "typing", "threading", "re", "difflib"),
)


@cache
def loaded_by(statement: str) -> set[str]:
    script = (
        f"import sys; before = set(sys.modules)\n{statement}\nimport json; print(json.dumps([*sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout)) - {"json"}


def test_importing_core_loads_none_of_its_modules() -> None:
    bare = loaded_by("import __future__, importlib, typing")
    assert {name for name in loaded_by("import hicache_core") - bare if not name.startswith("json")} == {
        "hicache_core"
    }


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("from hicache_core import BackendSpec, Capabilities, Requirement", {"re", "dataclasses", "inspect"}),
        (
            "from hicache_core import Identity, Component, Placement, Namespace",
            {"re", "dataclasses", "inspect"},
        ),
        ("from hicache_core import HostPool, Pages", {"re", "dataclasses", "inspect"}),
        ("from hicache_core import HiCacheStorage", {"re", "dataclasses", "inspect", "threading"}),
        ("from hicache_core import StorageBackendFactory", {"re", "dataclasses", "inspect", "threading"}),
        ("from hicache_core import HiCache", {"re", "dataclasses", "inspect", "threading", "mmap"}),
    ],
    ids=lambda value: value.rpartition("import ")[2] if isinstance(value, str) else "",
)
def test_names_load_only_what_they_need(statement: str, allowed: set[str]) -> None:
    bare = loaded_by("import __future__, importlib, typing")
    heavy = {name for name in HEAVY if name in loaded_by(statement) - bare}
    assert heavy <= allowed


def test_every_public_name_loads_and_is_listed() -> None:
    assert len(hicache_core.__all__) <= 30
    assert {name for name in hicache_core.__all__ if getattr(hicache_core, name, None) is None} == set()
    assert set(hicache_core.__all__) <= set(dir(hicache_core))


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert hicache_core.__version__ == version("hicache-core")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError) as caught:
        _: Any = hicache_core.no_such_name
    assert str(caught.value) == "module 'hicache_core' has no attribute 'no_such_name'"


def test_the_public_names_are_at_most_thirty_in_order() -> None:
    assert [*hicache_core.__all__] == sorted(hicache_core.__all__)
