"""The version data, held against the sources in the real wheels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sgl_release_source import class_of, functions_of

from hicache_sglang import identity, plugin, watch
from hicache_sglang.versions import RELEASES, has_plugins, has_zero_copy, release_of

IDS = [release.version for release in RELEASES]


@pytest.fixture(params=RELEASES, ids=IDS)
def release(request):
    return request.param


@pytest.fixture
def srt(release, wheel) -> Path:
    return wheel(release.version) / "sglang/srt"


def test_config_has_these_fields_in_this_order(release, srt):
    config = class_of(srt / "mem_cache/hicache_storage.py", "HiCacheStorageConfig")
    fields = [node.target.id for node in config.body if isinstance(node, ast.AnnAssign)]
    assert tuple(fields) == release.config_fields


def test_interface_has_these_verbs(release, srt):
    assert frozenset(functions_of(srt / "mem_cache/hicache_storage.py", "HiCacheStorage")) == release.verbs


def test_features_are_where_the_data_says(release, srt):
    controller = (srt / "managers/cache_controller.py").read_text()
    utils = srt / "mem_cache/utils.py"
    assert ('"interface_v1"' in controller) is release.zero_copy is has_zero_copy(release.version)
    assert ("def attach_storage_backend" in controller) is release.attaches
    assert (srt / "plugins/hook_registry.py").exists() is release.plugins is has_plugins(release.version)
    assert (utils.exists() and "def storage_namespace_seed" in utils.read_text()) is release.seeded


def test_plugin_hooks_have_their_targets(release, srt):
    if not release.plugins:
        return
    for target, path in (
        (plugin.CONSTRUCTOR, "mem_cache/storage/backend_factory.py"),
        (plugin.CHOICES, "server_args.py"),
        (plugin.ATTACH, "managers/cache_controller.py"),
    ):
        _, class_name, method = target.rsplit(".", 2)
        assert method in functions_of(srt / path, class_name), target


def test_weights_are_replaced_where_they_are_watched(release, srt):
    found = set()
    for module, class_name in watch.WEIGHT_CLASSES:
        path = srt / (module.removeprefix("sglang.srt.").replace(".", "/") + ".py")
        found |= set(functions_of(path, class_name)) & {watch.FROM_DISK, *watch.FROM_ELSEWHERE}
    assert {"update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"} <= found
    assert found & {"update_weights_from_distributed", "load_weights_from_distributed"}
    model_runner = functions_of(srt / "model_executor/model_runner.py", "ModelRunner")
    assert "load_lora_adapter" in model_runner
    assert [argument.arg for argument in model_runner["load_lora_adapter"].args.args][:2] == [
        "self",
        "lora_ref",
    ]


def test_every_reset_ends_in_the_one_that_is_watched(release, srt):
    assert watch.FLUSH_METHOD in functions_of(srt / "managers/cache_controller.py", "HiCacheController")
    hybrid = functions_of(srt / "mem_cache/hybrid_cache/hybrid_cache_controller.py", "HybridCacheController")
    if "reset" in hybrid:
        assert "super().reset()" in ast.unparse(hybrid["reset"])


def test_server_arguments_exist_under_these_names(release, srt):
    sources = [srt / "server_args.py", *(srt / "arg_groups").rglob("*.py")]
    known = set()
    for path in sources:
        if path.exists():
            tree = ast.parse(path.read_text())
            known |= {
                node.target.id
                for each in ast.walk(tree)
                if isinstance(each, ast.ClassDef)
                for node in each.body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            }
    gone = {"torchao_config"} if "torchao_config" not in known and release.version >= "0.5.20" else set()
    assert set(identity.SERVER_ARGUMENTS) - known == gone


def test_release_of_takes_the_newest_that_is_not_newer():
    assert release_of("0.5.18.post2").version == "0.5.15"
    assert release_of("0.6.0").version == "0.5.23"
    with pytest.raises(ValueError, match=r"the oldest is 0\.5\.5"):
        release_of("0.5.4")
