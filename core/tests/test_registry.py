"""Which backends there are: scans, conflicts, blocks, and what is said of a name that is not there."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
from core_caches import in_child
from core_plugins import Plugins

from hicache_core.errors import BackendBlocked, BackendConflict, BackendNotFound
from hicache_core.registry import INSTALL_HINTS, Registry, allowed_but_missing, registry


def test_an_installed_name_is_found_with_its_distribution(plugins: Plugins) -> None:
    plugins.distribution("hicache-acme", {"acme": "acme_spec:SPEC"}, version="2.1")
    found = registry.find("acme")
    assert (found.name, found.target, found.distribution, found.version, found.registered) == (
        *("acme", "acme_spec:SPEC", "hicache-acme", "2.1"),
        False,
    )
    assert Path(found.where) == plugins.folder()
    assert registry.names() == ["acme"]
    assert plugins.imported() == set()


def test_one_distribution_seen_twice_is_one_the_first_on_the_path(plugins: Plugins) -> None:
    plugins.distribution("hicache-acme", {"acme": "acme_spec:SPEC"}, folder="editable", version="1.1")
    plugins.distribution("HiCache_Acme", {"acme": "old_spec:SPEC"}, folder="wheel", version="1.0")
    found = registry.find("acme")
    assert (found.version, found.target) == ("1.1", "acme_spec:SPEC")
    assert len(registry.providers("acme")) == 1


def test_one_folder_twice_on_the_path_is_one(plugins: Plugins) -> None:
    plugins.distribution("hicache-acme", {"acme": "acme_spec:SPEC"})
    plugins._folders.append(plugins.folder())
    assert registry.find("acme").distribution == "hicache-acme"


def test_one_name_of_two_distributions_is_a_conflict_with_both_sides(plugins: Plugins) -> None:
    plugins.distribution("acme-one", {"acme": "one:SPEC"}, version="1.0", folder="a")
    plugins.distribution("acme-two", {"acme": "two:SPEC"}, version="2.0", folder="b")
    a, b = str(plugins.folder("a")), str(plugins.folder("b"))
    with pytest.raises(BackendConflict) as caught:
        registry.find("acme")
    assert [(name, version, Path(where)) for name, version, where in caught.value.providers] == [
        ("acme-one", "1.0", Path(a)),
        ("acme-two", "2.0", Path(b)),
    ]
    assert str(caught.value).replace(f"{a}/", a).replace(f"{b}/", b) == (
        f"'acme' is provided by 2 distributions: acme-one 1.0 ({a}); acme-two 2.0 ({b}). "
        "Uninstall all but one, or name the one you mean: 'acme@acme-one' or 'acme@acme-two'."
    )


@pytest.mark.parametrize("reference", ["acme@acme-two", "acme@Acme_Two", "acme@acme.two"])
def test_the_qualifier_names_one_side_of_a_conflict(plugins: Plugins, reference: str) -> None:
    plugins.distribution("acme-one", {"acme": "one:SPEC"})
    plugins.distribution("acme-two", {"acme": "two:SPEC"})
    assert registry.find(reference).target == "two:SPEC"


def test_a_qualifier_that_fits_nothing_names_the_distributions_that_provide_it(plugins: Plugins) -> None:
    plugins.distribution("acme-one", {"acme": "one:SPEC"})
    with pytest.raises(BackendNotFound) as caught:
        registry.find("acme@acme-three")
    assert str(caught.value) == (
        "no backend named 'acme@acme-three'; installed: acme. Did you mean 'acme@acme-one'?"
    )


# Scans.


def test_one_scan_serves_all_look_ups_until_the_path_changes(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.distribution("hicache-acme", {"acme": "acme_spec:SPEC"})
    for _ in range(3):
        registry.find("acme")
        registry.names()
    assert plugins.scans == 1
    monkeypatch.setattr(sys, "path", [*sys.path, "/nowhere"])
    registry.names()
    registry.names()
    assert plugins.scans == 2


def test_refresh_finds_what_was_installed_meanwhile(plugins: Plugins) -> None:
    plugins.folder()
    assert registry.names() == []
    plugins.distribution("hicache-acme", {"acme": "acme_spec:SPEC"})
    assert registry.names() == []
    registry.refresh()
    assert registry.names() == ["acme"]


def test_a_registered_name_needs_no_scan(plugins: Plugins) -> None:
    registry.register("mine", "mine.store", "MineStore")
    found = registry.find("mine")
    assert (found.target, found.registered, found.distribution) == (
        "mine.store:MineStore",
        True,
        "this process",
    )
    assert plugins.scans == 0


def test_a_registered_name_comes_before_an_installed_one_and_the_last_one_wins(plugins: Plugins) -> None:
    plugins.distribution("hicache-acme", {"acme": "acme_spec:SPEC"})
    registry.register("acme", "first", "Store")
    registry.register("acme", "second", "Store")
    assert registry.find("acme").target == "second:Store"
    assert registry.find("acme@hicache-acme").target == "acme_spec:SPEC"
    registry.unregister("acme")
    registry.unregister("acme")
    assert registry.find("acme").target == "acme_spec:SPEC"


def test_a_registry_of_ones_own_shares_nothing(plugins: Plugins) -> None:
    registry.register("mine", "mine.store", "MineStore")
    assert Registry().names() == []


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("entry_points.txt", b"[hicache.backends]\nno equals sign\n"),
        ("entry_points.txt", b"[hicache.backends]\nx = \xff\xfe:SPEC\n"),
        ("entry_points.txt", b"[hicache.backends]\nx = !!\n"),
        ("METADATA", None),
        ("METADATA", b""),
    ],
    ids=["not a pair", "not text", "not a target", "no metadata", "empty metadata"],
)
def test_a_broken_distribution_hides_no_other(plugins: Plugins, file: str, content: bytes | None) -> None:
    broken = plugins.distribution("broken", {"x": "x:SPEC"}, folder="a")
    plugins.distribution("hicache-acme", {"acme": "acme_spec:SPEC"}, folder="b")
    if content is None:
        (broken / file).unlink()
    else:
        (broken / file).write_bytes(content)
    assert registry.find("acme").distribution == "hicache-acme"
    assert "acme" in registry.names()


@pytest.mark.parametrize("value", ["acme_spec:SPEC [extra]", "acme_spec : SPEC", "  acme_spec:SPEC  "])
def test_a_target_is_read_without_extras_and_spaces(plugins: Plugins, value: str) -> None:
    plugins.distribution("hicache-acme", {"acme": value})
    assert registry.find("acme").target == "acme_spec:SPEC"


def test_other_groups_are_not_backends(plugins: Plugins) -> None:
    plugins.distribution("hicache-cli", {"acme": "x:SPEC"}, group="hicache.commands")
    assert registry.names() == []


# Names that are not there.


def test_an_unknown_name_is_met_with_the_installed_and_the_close_ones(plugins: Plugins) -> None:
    plugins.distribution("a", {"acme": "a:SPEC", "bolt": "b:SPEC"})
    with pytest.raises(BackendNotFound) as caught:
        registry.find("acne")
    assert (caught.value.backend, caught.value.installed, caught.value.close, caught.value.install) == (
        *("acne", ("acme", "bolt"), ("acme",)),
        "",
    )
    assert str(caught.value) == ("no backend named 'acne'; installed: acme, bolt. Did you mean 'acme'?")


def test_a_name_like_nothing_is_met_with_what_to_do(plugins: Plugins) -> None:
    with pytest.raises(BackendNotFound) as caught:
        registry.find("zzz")
    assert str(caught.value) == (
        "no backend named 'zzz'; installed: none. "
        "Install a plugin that provides it, or name one that is installed."
    )


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("name", INSTALL_HINTS)
def test_a_known_name_is_met_with_the_line_to_type(name: str) -> None:
    with pytest.raises(BackendNotFound) as caught:
        registry.find(name)
    assert caught.value.install == INSTALL_HINTS[name]
    assert str(caught.value) == f"'{name}' is not installed. Run: {INSTALL_HINTS[name]}"


@pytest.mark.usefixtures("plugins")
def test_a_close_name_may_be_known_and_not_installed() -> None:
    with pytest.raises(BackendNotFound) as caught:
        registry.find("moncake")
    assert str(caught.value) == "no backend named 'moncake'; installed: none. Did you mean 'mooncake'?"


# Allowed and denied.


def test_the_allow_list_blocks_all_others(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.distribution("a", {"acme": "a:SPEC", "bolt": "b:SPEC"})
    monkeypatch.setenv("HICACHE_BACKENDS_ALLOW", "acme, other")
    assert registry.find("acme").name == "acme"
    with pytest.raises(BackendBlocked) as caught:
        registry.find("bolt")
    assert (caught.value.backend, caught.value.variable) == ("bolt", "HICACHE_BACKENDS_ALLOW")
    assert str(caught.value) == (
        "'bolt' is blocked by HICACHE_BACKENDS_ALLOW: acme, other. "
        "Change HICACHE_BACKENDS_ALLOW to let it load."
    )


def test_the_deny_list_blocks_its_own(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.distribution("a", {"acme": "a:SPEC", "bolt": "b:SPEC"})
    monkeypatch.setenv("HICACHE_BACKENDS_DENY", "bolt")
    assert registry.find("acme").name == "acme"
    with pytest.raises(BackendBlocked) as caught:
        registry.find("bolt@a")
    assert str(caught.value) == (
        "'bolt' is blocked by HICACHE_BACKENDS_DENY: bolt. Change HICACHE_BACKENDS_DENY to let it load."
    )


def test_deny_outweighs_allow(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.distribution("a", {"acme": "a:SPEC"})
    monkeypatch.setenv("HICACHE_BACKENDS_ALLOW", "acme")
    monkeypatch.setenv("HICACHE_BACKENDS_DENY", "acme")
    with pytest.raises(BackendBlocked) as caught:
        registry.find("acme")
    assert caught.value.variable == "HICACHE_BACKENDS_DENY"


def test_empty_lists_block_nothing(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins.distribution("a", {"acme": "a:SPEC"})
    monkeypatch.setenv("HICACHE_BACKENDS_ALLOW", " , ")
    monkeypatch.setenv("HICACHE_BACKENDS_DENY", "")
    assert registry.find("acme").name == "acme"


def test_registered_names_are_blocked_too(plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register("mine", "mine.store", "MineStore")
    monkeypatch.setenv("HICACHE_BACKENDS_DENY", "mine")
    with pytest.raises(BackendBlocked):
        registry.find("mine")


def test_an_allowed_name_that_is_not_installed_is_said(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.distribution("a", {"acme": "a:SPEC"})
    monkeypatch.setenv("HICACHE_BACKENDS_ALLOW", "acme,gone")
    assert allowed_but_missing() == ["gone"]


# Forks.


@pytest.mark.clause("C12")
def test_c12_a_forks_child_does_not_wait_for_a_scan_of_the_parent(plugins: Plugins) -> None:
    plugins.distribution("hicache-acme", {"acme": "acme_spec:SPEC"})
    with registry._lock:
        assert in_child(lambda: registry.find("acme").target == "acme_spec:SPEC") == "ok"


# The scan itself, not narrowed to a test's folders.


def test_the_real_scan_sees_distributions_on_the_path(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.distribution("hicache-acme", {"acme": "acme_spec:SPEC"})
    monkeypatch.setattr(metadata, "distributions", plugins._discover)
    registry.refresh()
    assert registry.find("acme").distribution == "hicache-acme"
