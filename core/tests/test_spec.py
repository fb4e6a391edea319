"""BackendSpec: all text, checked when it is made, and light to import."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from hicache_core.errors import InvalidArgument
from hicache_core.spec import API_VERSION, BackendSpec, Requirement


def a_spec(**changes: Any) -> BackendSpec:
    fields: dict[str, Any] = {
        "name": "acme",
        "api": API_VERSION,
        "target": "hicache_acme.storage:AcmeStorage",
        "options": "hicache_acme.options:AcmeOptions",
    }
    return BackendSpec(**(fields | changes))


def test_the_version_of_the_contract_is_frozen() -> None:
    assert API_VERSION == 1


@pytest.mark.parametrize("name", ["a", "acme", "acme_2", "a" * 32])
def test_a_name_that_is_well_formed(name: str) -> None:
    assert a_spec(name=name).name == name


@pytest.mark.parametrize("name", ["", "Acme", "2acme", "ac-me", "ac.me", "a" * 33, "acme\n", "_a", None, 3])
def test_a_malformed_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        a_spec(name=name)
    assert str(caught.value) == (
        f"a backend's name is not well formed: {name!r}. Use the pattern [a-z][a-z0-9_]{{0,31}}."
    )


@pytest.mark.parametrize("field", ["target", "options", "harness"])
@pytest.mark.parametrize("target", ["module", ":Class", "module:", "a:b:c", "a b:C", "a:C ", None, 3])
def test_a_malformed_target_is_refused(field: str, target: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        a_spec(**{field: target})
    assert str(caught.value) == (
        f"'{field}' of backend 'acme' is not a target: {target!r}. Write \"package.module:Class\"."
    )


def test_only_the_harness_may_be_empty() -> None:
    assert a_spec(harness="").harness == ""
    with pytest.raises(InvalidArgument):
        a_spec(target="")


@pytest.mark.parametrize("api", ["1", 1.0, True, None])
def test_a_version_that_is_no_integer_is_refused(api: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        a_spec(api=api)
    assert str(caught.value) == (
        f"'api' of backend 'acme' is not a version: {api!r}. "
        "Write the contract's major version as an integer, for example api=1."
    )


def test_a_spec_is_frozen_and_compared_by_value() -> None:
    requires = (Requirement(module="acme_native", pip="pip install acme"),)
    assert a_spec(requires=requires) == a_spec(requires=requires)
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_spec().name = "other"  # type: ignore[misc]


def test_a_light_module_loads_no_other_part_of_core() -> None:
    script = (
        "import sys\nfrom hicache_core import BackendSpec, Capabilities, Requirement\n"
        "print(*sorted(m for m in sys.modules if m.startswith('hicache_core.')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["hicache_core.capabilities", "hicache_core.errors", "hicache_core.spec"]
