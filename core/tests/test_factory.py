"""One path from a name to an open instance, and each way in which it can end early."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import core_toys
import pytest
from core_builders import a_pool
from core_plugins import SPEC_SOURCE, STORAGE_SOURCE, Plugins

import hicache_core
from hicache_core import (
    Identity,
    Namespace,
    Placement,
    StorageBackendFactory,
)
from hicache_core.errors import (
    BackendBlocked,
    BackendConflict,
    BackendDependencyMissing,
    BackendImportFailed,
    BackendIncompatible,
    BackendLoadError,
    BackendNotFound,
    InvalidOptions,
)
from hicache_core.registry import INSTALL_HINTS
from hicache_core.storage import HiCacheStorageConfig

pytestmark = pytest.mark.usefixtures("plugins")


def a_config() -> HiCacheStorageConfig:
    identity = Identity.for_tests()
    return HiCacheStorageConfig(
        namespace=Namespace.of(identity), identity=identity, placement=Placement(), timeout_s=1.0
    )


def create(name: str, /, **options: Any) -> core_toys.ToyStorage:
    storage = StorageBackendFactory.create_backend(name, a_config(), **options)
    assert isinstance(storage, core_toys.ToyStorage)
    return storage


# The one path.


def test_an_installed_backend_is_built_and_opened_with_its_pools(plugins: Plugins) -> None:
    plugins.backend("acme")
    pool, config = a_pool(), a_config()
    storage = StorageBackendFactory.create_backend("acme", config, pool, size=3)
    assert type(storage).__name__ == "Storage"
    assert (storage.spec.name, storage.is_open, storage.options.size) == ("acme", True, 3)
    assert storage.config is config
    assert list(storage._pools.values()) == [pool]
    storage.close()


def test_several_pools_are_given_as_any_iterable(plugins: Plugins) -> None:
    plugins.backend("acme")
    pools = [a_pool(), a_pool()]
    storage = StorageBackendFactory.create_backend("acme", a_config(), iter(pools))
    assert list(storage._pools.values()) == pools


def test_an_option_may_be_called_name_or_config(plugins: Plugins) -> None:
    plugins.backend("acme")
    storage = create("acme", name="n", config="c")
    assert (storage.options.name, storage.options.config) == ("n", "c")


def test_a_registered_class_takes_the_same_path(plugins: Plugins) -> None:
    StorageBackendFactory.register_backend("mine", "core_toys", "ToyStorage")
    storage = create("mine", size=5)
    assert (storage.is_open, storage.options.size) == (True, 5)
    assert plugins.scans == 0


def test_a_dynamic_class_takes_the_same_path(plugins: Plugins) -> None:
    storage = create("dynamic", backend_name="mine", module_path="core_toys", class_name="ToyStorage", size=5)
    assert (storage.is_open, storage.options.size) == (True, 5)
    assert plugins.scans == 0


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, ["backend_name", "module_path", "class_name"]),
        ({"backend_name": "a", "class_name": ""}, ["module_path", "class_name"]),
        ({"backend_name": 1, "module_path": "m", "class_name": "C"}, ["backend_name"]),
    ],
    ids=["none", "one and an empty one", "a number"],
)
def test_dynamic_names_all_its_missing_fields(given: dict[str, Any], missing: list[str]) -> None:
    with pytest.raises(InvalidOptions) as caught:
        create("dynamic", **given)
    assert caught.value.problems == tuple((name, f"{name} is required, as text", "") for name in missing)


def test_dynamic_is_held_to_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_BACKENDS_DENY", "mine")
    with pytest.raises(BackendBlocked) as caught:
        create("dynamic", backend_name="mine", module_path="core_toys", class_name="ToyStorage")
    assert caught.value.backend == "mine"


def test_the_spec_comes_without_importing_the_backend(plugins: Plugins) -> None:
    module = plugins.backend("acme")
    assert StorageBackendFactory.spec("acme").summary == "of a test"
    assert plugins.imported() == {module}


def test_neighbours_of_an_installed_backend_keep_their_variables(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.backend("acme")
    plugins.backend("acme_two")
    monkeypatch.setenv("HICACHE_ACME_TWO_SIZE", "7")
    assert create("acme").options.size == 1
    assert create("acme_two").options.size == 7


# Imports that fail.


def test_an_import_that_raises_is_told_with_its_cause(plugins: Plugins) -> None:
    plugins.backend("acme", storage="raise OSError('no GPU')")
    with pytest.raises(BackendImportFailed) as caught:
        create("acme")
    assert (caught.value.backend, caught.value.target) == ("acme", "plugin_acme_storage:Storage")
    assert isinstance(caught.value.__cause__, OSError)
    assert str(caught.value) == (
        "importing 'plugin_acme_storage:Storage' of hicache-acme 1.0 for backend 'acme' failed: "
        "OSError: no GPU. "
        "Report it to the authors of hicache-acme 1.0, or leave it out with HICACHE_BACKENDS_DENY=acme."
    )


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("import os; os.no_such_thing", "AttributeError: module 'os' has no attribute 'no_such_thing'"),
        ("pass", "AttributeError: module 'plugin_acme_storage' has no attribute 'Storage'"),
        (
            "def __getattr__(name): raise RuntimeError('lazy')",
            "RuntimeError: lazy",
        ),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("def f(:", "SyntaxError: invalid syntax (plugin_acme_storage.py, line 1)"),
    ],
    ids=["attribute error inside", "no such class", "lazy name that raises", "exit", "syntax"],
)
def test_whatever_an_import_raises_is_import_failed(plugins: Plugins, source: str, value: str) -> None:
    plugins.backend("acme", storage=source)
    with pytest.raises(BackendImportFailed) as caught:
        create("acme")
    assert caught.value.value == value


def test_a_module_that_is_missing_from_the_plugin_itself_is_import_failed(plugins: Plugins) -> None:
    plugins.backend("acme", spec=SPEC_SOURCE.format(name="acme", module="plugin_gone", requires="()"))
    with pytest.raises(BackendImportFailed) as caught:
        create("acme")
    assert caught.value.value == "ModuleNotFoundError: No module named 'plugin_gone_storage'"


def test_a_part_of_the_plugins_own_package_that_is_missing_is_import_failed(plugins: Plugins) -> None:
    (plugins.folder() / "acme_package").mkdir()
    (plugins.folder() / "acme_package" / "__init__.py").write_text("")
    (plugins.folder() / "acme_package" / "storage.py").write_text("import acme_package._native")
    StorageBackendFactory.register_backend("acme", "acme_package.storage", "Storage")
    with pytest.raises(BackendImportFailed) as caught:
        create("acme")
    assert caught.value.value == "ModuleNotFoundError: No module named 'acme_package._native'"


@pytest.mark.parametrize(
    ("requires", "remedy"),
    [
        (
            '(Requirement(module="no_such_native", pip="pip install acme-native"),)',
            "Run: pip install acme-native",
        ),
        (
            '(Requirement(module="other"),'
            'Requirement(module="no_such_native.sub", pip="pip install a", apt="libacme1"))',
            "Run: pip install a; apt-get install libacme1",
        ),
        ('(Requirement(module="no_such_native", apt="libacme1"),)', "Run: apt-get install libacme1"),
        ("()", "Install the distribution that provides 'no_such_native'."),
    ],
    ids=["pip", "pip and apt", "apt", "nothing is known"],
)
def test_a_missing_dependency_is_told_with_the_line_to_type(
    plugins: Plugins, requires: str, remedy: str
) -> None:
    storage = STORAGE_SOURCE.format(module="plugin_acme")
    plugins.backend("acme", requires=requires, storage=f"import no_such_native.lib\n{storage}")
    with pytest.raises(BackendDependencyMissing) as caught:
        create("acme")
    assert caught.value.module == "no_such_native"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert str(caught.value) == f"'acme' needs 'no_such_native', which is not installed. {remedy}"


def test_a_shared_library_that_is_missing_is_a_missing_dependency(plugins: Plugins) -> None:
    message = "libacme.so.1: cannot open shared object file: No such file or directory"
    plugins.backend(
        "acme",
        requires='(Requirement(module="acme_native", pip="pip install a", apt="libacme1"),)',
        storage=f"raise ImportError({message!r}, name='acme_native._lib')",
    )
    with pytest.raises(BackendDependencyMissing) as caught:
        create("acme")
    assert caught.value.module == "libacme.so.1"
    assert str(caught.value) == (
        "'acme' needs 'libacme.so.1', which is not installed. Run: pip install a; apt-get install libacme1"
    )


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        ("ModuleNotFoundError('no', name='acme_native.lib')", "acme_native.lib"),
        (
            "ImportError('libacme.so.1: cannot open shared object file: No such', name='acme_native')",
            "libacme.so.1",
        ),
    ],
    ids=["module", "shared library"],
)
def test_a_dependency_that_open_does_not_find_is_told_with_the_line_to_type(
    plugins: Plugins, error: str, missing: str
) -> None:
    plugins.backend(
        "acme",
        requires='(Requirement(module="acme_native", pip="pip install a"),)',
        storage=STORAGE_SOURCE.format(module="plugin_acme")
        + f"    def open(self, pools=()): raise {error}\n",
    )
    with pytest.raises(BackendDependencyMissing) as caught:
        create("acme")
    assert str(caught.value) == f"'acme' needs '{missing}', which is not installed. Run: pip install a"


def test_another_import_error_in_open_goes_on(plugins: Plugins) -> None:
    source = (
        STORAGE_SOURCE.format(module="plugin_acme") + "    def open(self, pools=()): import no_such_one\n"
    )
    plugins.backend("acme", storage=source)
    with pytest.raises(ModuleNotFoundError):
        create("acme")


def test_a_plugin_may_tell_of_its_missing_dependency_itself(plugins: Plugins) -> None:
    plugins.backend(
        "acme",
        storage="from hicache_core.errors import BackendDependencyMissing\n"
        "raise BackendDependencyMissing('acme', 'libacme', remedy='Run: make')",
    )
    with pytest.raises(BackendDependencyMissing) as caught:
        create("acme")
    assert str(caught.value) == "'acme' needs 'libacme', which is not installed. Run: make"


# Plugins that do not fit.


@pytest.mark.parametrize(
    ("api", "age", "fix"),
    [(0, "older", "pip install -U hicache-acme"), (2, "newer", "pip install -U hicache-core")],
)
def test_another_api_version_is_refused_before_the_target_is_imported(
    plugins: Plugins, api: int, age: str, fix: str
) -> None:
    spec = SPEC_SOURCE.format(name="acme", module="plugin_acme", requires="()").replace("api=1", f"api={api}")
    plugins.backend("acme", spec=spec)
    with pytest.raises(BackendIncompatible) as caught:
        create("acme")
    assert plugins.imported() == {"plugin_acme"}
    assert str(caught.value) == (
        f"'acme' of hicache-acme 1.0 speaks version {api} of the contract, {age} than this core's: "
        f"version 1. Run: {fix}"
    )


def test_a_registered_class_of_another_api_version_is_not_sent_to_pip(plugins: Plugins) -> None:
    plugins.module(
        "plugin_old",
        "import dataclasses, core_toys\n"
        "class Storage(core_toys.ToyStorage): spec = dataclasses.replace(core_toys.SPEC, api=0)\n",
    )
    StorageBackendFactory.register_backend("old", "plugin_old", "Storage")
    with pytest.raises(BackendIncompatible) as caught:
        create("old")
    assert str(caught.value) == (
        "'old' of this process speaks version 0 of the contract, older than this core's: version 1. "
        "Port the class to version 1 of the contract, then write that into its spec."
    )


@pytest.mark.parametrize(
    ("source", "what", "value"),
    [
        (
            "class Storage: pass",
            "the target of backend 'acme' is not a HiCacheStorage",
            "plugin_acme_storage:Storage",
        ),
        (
            "def Storage(): pass",
            "the target of backend 'acme' is not a HiCacheStorage",
            "plugin_acme_storage:Storage",
        ),
        (
            "from hicache_core import HiCacheStorage\nclass Storage(HiCacheStorage): pass",
            "class 'plugin_acme_storage.Storage' has no spec",
            "",
        ),
        (
            "from plugin_acme import SPEC\nfrom hicache_core import HiCacheStorage\n"
            "class Storage(HiCacheStorage):\n"
            "  spec = SPEC\n"
            "  def batch_get(self, keys, locs): return []\n"
            "  def usage(self): ...",
            "class 'plugin_acme_storage.Storage' does not implement the contract",
            "batch_contains, batch_set",
        ),
        (
            "from core_toys import ToyStorage\nfrom plugin_acme import SPEC\n"
            "class Storage(ToyStorage):\n  spec = SPEC\n  def __init__(self): pass",
            "constructing 'acme' failed",
            "TypeError: ",
        ),
    ],
    ids=["no subclass", "no class", "no spec", "verbs missing", "another constructor"],
)
def test_a_class_that_does_not_fit_is_refused(plugins: Plugins, source: str, what: str, value: str) -> None:
    plugins.backend("acme", storage=source)
    with pytest.raises(BackendIncompatible) as caught:
        create("acme")
    assert caught.value.what == what
    assert caught.value.value.startswith(value)
    assert caught.value.remedy


def test_a_class_without_a_spec_is_told_the_line_to_add(plugins: Plugins) -> None:
    plugins.module("plugin_bare", "from hicache_core import HiCacheStorage\nclass Bare(HiCacheStorage): pass")
    StorageBackendFactory.register_backend("bare", "plugin_bare", "Bare")
    with pytest.raises(BackendIncompatible) as caught:
        create("bare")
    assert str(caught.value) == (
        "class 'plugin_bare.Bare' has no spec. "
        "Add to the class:  spec = BackendSpec(name=..., api=1, target=..., options=...)"
    )


def test_an_entry_point_that_is_no_spec_is_refused(plugins: Plugins) -> None:
    plugins.backend("acme", spec="SPEC = 'acme'")
    with pytest.raises(BackendIncompatible) as caught:
        create("acme")
    assert str(caught.value) == (
        "the entry point 'acme' of hicache-acme is not a BackendSpec: plugin_acme:SPEC is a str. "
        "Point it at a BackendSpec; the docstring of hicache_core.spec shows one."
    )


def test_an_entry_point_under_another_name_than_its_spec_is_refused(plugins: Plugins) -> None:
    plugins.backend("acme", spec=SPEC_SOURCE.format(name="bolt", module="plugin_acme", requires="()"))
    with pytest.raises(BackendIncompatible) as caught:
        create("acme")
    assert str(caught.value) == (
        "the entry point 'acme' of hicache-acme gives the spec of another backend: 'bolt'. "
        "Give both one name: options, variables and the allow list go by it."
    )


def test_options_that_are_no_model_are_refused(plugins: Plugins) -> None:
    spec = SPEC_SOURCE.format(name="acme", module="plugin_acme", requires="()")
    plugins.backend("acme", spec=spec.replace("core_toys:ToyOptions", "core_toys:ToyStorage"))
    with pytest.raises(BackendIncompatible) as caught:
        create("acme")
    assert str(caught.value) == (
        "the options of backend 'acme' are not an Options model: core_toys:ToyStorage. "
        "Derive the model from hicache_core.options.Options."
    )


def test_a_validator_that_raises_anything_is_named(plugins: Plugins) -> None:
    plugins.module(
        "plugin_odd",
        "import dataclasses, core_toys, pydantic\n"
        "class Odd(core_toys.ToyOptions):\n"
        "  @pydantic.field_validator('size')\n"
        "  def check(cls, value): raise KeyError('odd')\n"
        "class Storage(core_toys.ToyStorage):\n"
        "  spec = dataclasses.replace(core_toys.SPEC, options='plugin_odd:Odd')\n",
    )
    StorageBackendFactory.register_backend("odd", "plugin_odd", "Storage")
    with pytest.raises(BackendIncompatible) as caught:
        create("odd")
    assert caught.value.what == "the options of backend 'odd' could not be checked"
    assert caught.value.value == "KeyError: 'odd'"


def test_bad_options_are_told_before_the_backend_is_constructed(plugins: Plugins) -> None:
    plugins.backend("acme")
    with pytest.raises(InvalidOptions) as caught:
        create("acme", size="x", nme="y")
    assert [field for field, _, _ in caught.value.problems] == ["size", "nme"]


def test_a_backend_that_promises_more_than_its_spec_is_closed_again(plugins: Plugins) -> None:
    plugins.module(
        "plugin_wide",
        "import dataclasses, core_toys\n"
        "class Storage(core_toys.ToyStorage):\n"
        "  closed = []\n"
        "  def open(self, pools=()):\n"
        "    self.capabilities = dataclasses.replace(self.capabilities, shared=True)\n"
        "    super().open(pools)\n"
        "  def close(self):\n"
        "    self.closed.append(1)\n"
        "    super().close()\n",
    )
    StorageBackendFactory.register_backend("wide", "plugin_wide", "Storage")
    with pytest.raises(BackendIncompatible) as caught:
        create("wide")
    assert caught.value.value == "shared: False to True"
    from plugin_wide import Storage  # type: ignore[import-not-found]

    assert Storage.closed == [1]


# Listing.


def test_a_listing_shows_what_works_and_what_does_not(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.backend("good")
    plugins.backend("raising", spec="raise OSError('no GPU')")
    plugins.backend("lacking", spec="import no_such_native")
    plugins.backend("wrong", spec="SPEC = 1")
    plugins.backend("exiting", spec="raise SystemExit(3)")
    plugins.backend("malformed", spec="from hicache_core import BackendSpec\nSPEC = BackendSpec(name='A!')")
    plugins.backend(
        "texting", spec=SPEC_SOURCE.format(name="texting", module="m", requires="()").replace("1", "'1'")
    )
    plugins.backend("old", spec=SPEC_SOURCE.format(name="old", module="m", requires="()").replace("1", "0"))
    plugins.backend("denied")
    plugins.distribution("other", {"twice": "a:SPEC"})
    plugins.distribution("another", {"twice": "b:SPEC"})
    monkeypatch.setenv("HICACHE_BACKENDS_DENY", "denied")
    rows = {row.name: row for row in StorageBackendFactory.list()}
    assert {name: type(row.error) for name, row in rows.items()} == {
        "good": type(None),
        "raising": BackendImportFailed,
        "lacking": BackendDependencyMissing,
        "wrong": BackendIncompatible,
        "exiting": BackendImportFailed,
        "malformed": BackendImportFailed,
        "texting": BackendImportFailed,
        "old": BackendIncompatible,
        "denied": BackendBlocked,
        "twice": BackendConflict,
    }
    assert rows["good"].spec is not None
    assert all(row.provider is not None for row in rows.values())
    assert [name for name in plugins.imported() if name.endswith("_storage")] == []


def test_listing_includes_registered_names(plugins: Plugins) -> None:
    StorageBackendFactory.register_backend("mine", "core_toys", "ToyStorage")
    StorageBackendFactory.register_backend("gone", "no_such_module", "Storage")
    rows = {row.name: row.error for row in StorageBackendFactory.list()}
    assert rows["mine"] is None
    assert isinstance(rows["gone"], BackendLoadError)


def test_an_unknown_name_is_not_found() -> None:
    with pytest.raises(BackendNotFound):
        create("nothing")


# No branch on a name.


def test_no_backends_name_stands_in_core_outside_the_hints() -> None:
    names = re.compile(rf"[\"'](?:{'|'.join(INSTALL_HINTS)})[\"']")
    root = Path(hicache_core.__file__).parent
    hits = [
        (path.name, number, line.strip())
        for path in sorted(root.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if names.search(line)
    ]
    hints = (root / "registry.py").read_text().split("INSTALL_HINTS", 1)[1].split("\n}", 1)[0]
    assert [hit for hit in hits if hit[0] != "registry.py" or hit[2] not in hints] == []
