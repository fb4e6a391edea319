"""The plugin's hooks, apart from SGLang: names on the command line, construction, the zero-copy calls."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from hicache_core import StorageBackendFactory
from hicache_core.registry import registry
from hicache_sglang import plugin


@pytest.fixture
def toy():
    StorageBackendFactory.register_backend("toy", "sgl_toy", "ToyStore")
    yield
    registry.unregister("toy")


def test_choices_gain_our_names_once_and_keep_sglangs(toy):
    parser = argparse.ArgumentParser()
    parser.add_argument(plugin.OPTION, choices=["file", "dynamic"])
    for _ in range(2):
        plugin.extend_choices(None, parser)
    assert parser.parse_args([plugin.OPTION, "hicache.toy"]).hicache_storage_backend == "hicache.toy"
    assert parser.parse_args([plugin.OPTION, "file"]).hicache_storage_backend == "file"
    action = next(each for each in parser._actions if plugin.OPTION in each.option_strings)
    assert action.choices.count("hicache.toy") == 1


def test_a_free_text_option_stays_free():
    parser = argparse.ArgumentParser()
    parser.add_argument(plugin.OPTION)
    plugin.extend_choices(None, parser)
    assert parser.parse_args([plugin.OPTION, "anything"]).hicache_storage_backend == "anything"


def test_only_our_names_are_constructed_here():
    calls = []
    ours = SimpleNamespace(from_plugin=lambda config, name: ("ours", config, name))

    def original(cls, *arguments):
        calls.append(arguments)
        return "theirs"

    assert plugin.create(original, object, "hicache.toy", ours, "config", "pool") == (
        "ours",
        "config",
        "hicache.toy",
    )
    assert plugin.create(original, object, "file", ours, "config", "pool") == "theirs"
    assert calls == [("file", ours, "config", "pool")]


@pytest.mark.parametrize(
    ("name", "chosen"), [("hicache.toy", "zero-copy"), ("file", "generic"), (None, "generic")]
)
def test_zero_copy_calls_are_chosen_for_our_names(name, chosen):
    controller = SimpleNamespace(
        storage_backend_type=name, page_get_func="generic", page_set_func="generic",
        _page_get_zero_copy="zero-copy", _page_set_zero_copy="zero-copy",
    )  # fmt: skip
    plugin.use_zero_copy(None, controller)
    assert (controller.page_get_func, controller.page_set_func) == (chosen, chosen)


def test_a_missing_target_is_said_and_is_no_error(caplog):
    assert plugin._resolved("hicache_sglang.plugin", "no_such_thing", "names are not accepted") is None
    assert plugin._resolved("hicache_sglang.no_such_module", "x", "names are not accepted") is None
    assert len([line for line in caplog.messages if "names are not accepted" in line]) == 2
    assert plugin._resolved("hicache_sglang.plugin", "register", "") is plugin
