"""Imports that fail, told in words of what to type."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from hicache_core.errors import BackendDependencyMissing, BackendIncompatible
from hicache_mooncake import _native

CPU, CUDA12 = "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"


def installed(monkeypatch, **versions):
    names = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(name):
        if name not in names:
            raise metadata.PackageNotFoundError(name)
        return names[name]

    monkeypatch.setattr(_native.metadata, "version", version)


def importing(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)
    monkeypatch.setattr(_native, "import_module", fail)


def test_no_wheel_names_the_three_extras(monkeypatch):
    installed(monkeypatch)
    importing(monkeypatch, ModuleNotFoundError("No module named 'mooncake'", name="mooncake"))
    with pytest.raises(BackendDependencyMissing) as raised:
        _native.load({})
    assert str(raised.value) == (
        "'mooncake' needs 'mooncake', which is not installed. "
        "Run: pip install 'hicache-mooncake[cpu]'  (or [cuda12], [cuda13])"
    )


@pytest.mark.parametrize(
    ("library", "wheel", "remedy"),
    [
        ("libibverbs.so.1", CPU, "Run: apt-get install libibverbs1"),
        ("libnuma.so.1", CPU, "Run: apt-get install libnuma1"),
        ("libcurl.so.4", CPU, "Run: apt-get install libcurl4"),
        ("libmlx5.so.1", CUDA12, "Run: apt-get install ibverbs-providers"),
        (
            "libcuda.so.1",
            CUDA12,
            f"It comes with a GPU driver. Without a GPU, run: pip uninstall {CUDA12}; "
            "pip install 'hicache-mooncake[cpu]'",
        ),
        (
            "libcudart.so.12",
            CUDA12,
            f"For CUDA 12 choose its wheel: pip uninstall {CUDA12}; pip install 'hicache-mooncake[cuda12]'. "
            "Without a GPU, take [cpu]",
        ),
        (
            "libcudart.so.13",
            CUDA12,
            f"For CUDA 13 choose its wheel: pip uninstall {CUDA12}; pip install 'hicache-mooncake[cuda13]'. "
            "Without a GPU, take [cpu]",
        ),
    ],
)
def test_a_missing_shared_library_names_its_package_or_wheel(monkeypatch, library, wheel, remedy):
    installed(monkeypatch, **{wheel.replace("-", "_"): "0.3.13.post1"})
    importing(
        monkeypatch, ImportError(f"{library}: cannot open shared object file: No such file or directory")
    )
    with pytest.raises(BackendDependencyMissing) as raised:
        _native.load({})
    assert (raised.value.module, raised.value.remedy) == (library, remedy)
    assert isinstance(raised.value.__cause__, ImportError)


def test_two_wheels_that_own_the_package_are_refused(monkeypatch):
    installed(monkeypatch, **{CPU.replace("-", "_"): "0.3.13.post1", CUDA12.replace("-", "_"): "0.3.12"})
    with pytest.raises(BackendIncompatible) as raised:
        _native.load({})
    assert f"{CPU} 0.3.13.post1, {CUDA12} 0.3.12" in raised.value.value
    assert raised.value.remedy.startswith(f"Run: pip uninstall {CPU} {CUDA12}; then one of: ")


@pytest.mark.parametrize(
    ("version", "old"), [("0.3.10", True), ("0.3.11", True), ("0.3.11.post1", False), ("0.4.0", False)]
)
def test_versions_that_crash_on_one_machine_are_refused(monkeypatch, version, old):
    installed(monkeypatch, **{CUDA12.replace("-", "_"): version})
    if not old:
        assert _native.check_wheels() is None
        return
    with pytest.raises(BackendIncompatible) as raised:
        _native.check_wheels()
    assert raised.value.remedy == f"Run: pip install -U {CUDA12}"


def test_the_store_is_imported_before_the_engine(real):
    """The other way round, the second import fails."""
    program = (
        "import sys; from hicache_mooncake import _native; _native.load({}); before = list(sys.modules);"
        "import mooncake.engine; sys.exit('mooncake.store' not in before)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_a_child_forked_after_the_import_is_told_to_spawn(monkeypatch):
    """The library's threads do not survive a fork: a call in the child would wait for ever."""
    monkeypatch.setattr(_native, "_loaded_by", 1)
    with pytest.raises(BackendIncompatible) as raised:
        _native.load({})
    assert "'spawn'" in raised.value.remedy
