"""Weights that change under a running server: no page of the old ones passes for one of the new."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from hicache_sglang import watch
from hicache_sglang.identity import Server
from hicache_sglang.settings import read_settings
from hicache_sglang.weights import Weights


class Cache:
    """Remembers what it was bound to."""

    def __init__(self):
        self.bound = []

    def rebind(self, identity):
        self.bound.append(identity)

    @property
    def namespace(self):
        return "namespace"


def folder(path, content: bytes) -> str:
    path.mkdir()
    (path / "model.safetensors").write_bytes(content)
    return str(path)


@pytest.fixture
def old(tmp_path):
    return folder(tmp_path / "old", b"old")


def watched(model, *, seeded=True, **arguments):
    server = Server(SimpleNamespace(model_path=model, **arguments), read_settings({}), None, seeded)
    weights = Weights(server, kv_dtype="bfloat16", page_tokens=64)
    weights.serve(Cache())
    return weights, weights._cache


@pytest.fixture
def scheduler(monkeypatch):
    """The classes of a scheduler process, as far as they are watched."""

    class WeightUpdater:
        def update_weights_from_disk(self, model_path, load_format="auto"):
            return self.result

        def update_weights_from_tensor(self, named_tensors):
            return True, "ok"

        result = (True, "ok")

    class ModelRunner:
        def load_lora_adapter(self, lora_ref):
            return SimpleNamespace(success=True)

    class HiCacheController:
        def reset(self):
            return "reset"

    for (module_name, class_name), made in (
        (watch.WEIGHT_CLASSES[0], WeightUpdater),
        (watch.WEIGHT_CLASSES[1], ModelRunner),
        (watch.FLUSH_CLASS, HiCacheController),
    ):
        module = ModuleType(module_name)
        setattr(module, class_name, made)
        monkeypatch.setitem(watch.sys.modules, module_name, module)
    monkeypatch.setattr(watch, "_installed", {})
    return SimpleNamespace(updater=WeightUpdater(), runner=ModelRunner(), controller=HiCacheController())


def test_an_update_from_disk_is_off_until_the_flush_and_then_bound_to_the_new_weights(
    old, tmp_path, scheduler
):
    new = folder(tmp_path / "new", b"new")
    weights, cache = watched(old)
    assert watch.listen(weights) == []
    assert scheduler.updater.update_weights_from_disk(new) == (True, "ok")
    assert weights.off
    assert cache.bound == []
    assert scheduler.controller.reset() == "reset"
    assert (weights.off, [identity.weights == weights.identity().weights for identity in cache.bound]) == (
        "",
        [True],
    )
    assert cache.bound[0].model == new
    watch.forget(weights)


def test_off_begins_before_the_first_weight_is_touched(old, scheduler):
    weights, _ = watched(old)
    seen = []
    scheduler.updater.__class__.update_weights_from_disk = lambda self, path: (
        seen.append(weights.off) or (True, "")
    )
    watch.listen(weights)
    scheduler.updater.update_weights_from_disk("/new")
    assert seen == ["the weights are being replaced"]
    watch.forget(weights)


def test_weights_of_unknown_content_turn_storage_off_for_good_with_one_line(old, scheduler, caplog):
    weights, cache = watched(old)
    watch.listen(weights)
    for _ in range(3):
        scheduler.updater.update_weights_from_tensor([])
        scheduler.controller.reset()
    assert weights.off == "for good: the weights were replaced by some whose content is not known"
    assert cache.bound == []
    assert len([line for line in caplog.messages if "storage is off" in line]) == 1
    watch.forget(weights)


def test_a_failed_update_turns_storage_off(old, scheduler):
    weights, cache = watched(old)
    watch.listen(weights)
    scheduler.updater.result = (False, "out of memory")
    scheduler.updater.update_weights_from_disk("/new")
    scheduler.controller.reset()
    assert weights.off
    assert cache.bound == []
    watch.forget(weights)


def test_a_flush_alone_changes_nothing(old, scheduler):
    weights, cache = watched(old)
    watch.listen(weights)
    scheduler.controller.reset()
    assert (weights.off, cache.bound) == ("", [])
    watch.forget(weights)


def test_an_adapter_loaded_while_running_joins_the_identity(old, tmp_path, scheduler):
    lora = folder(tmp_path / "lora", b"adapter")
    weights, cache = watched(old)
    watch.listen(weights)
    scheduler.runner.load_lora_adapter(SimpleNamespace(lora_name="a", lora_path=lora))
    assert weights.off == ""
    assert [identity.lora is not None for identity in cache.bound] == [True]
    scheduler.runner.load_lora_adapter(SimpleNamespace(lora_name="a", lora_path=lora))
    assert len(cache.bound) == 1
    watch.forget(weights)


def test_an_adapter_replaced_under_its_name_waits_for_the_flush(old, tmp_path, scheduler):
    lora = tmp_path / "lora"
    weights, cache = watched(old, lora_paths=[f"a={folder(lora, b'one')}"])
    before = weights.identity().lora
    watch.listen(weights)
    (lora / "model.safetensors").write_bytes(b"two")
    scheduler.runner.load_lora_adapter(SimpleNamespace(lora_name="a", lora_path=str(lora)))
    assert (bool(weights.off), cache.bound) == (True, [])
    scheduler.controller.reset()
    assert weights.off == ""
    assert cache.bound[0].lora != before
    watch.forget(weights)


@pytest.mark.parametrize(
    ("seeded", "path", "reason"),
    [(True, None, "is not known"), (True, "/no/such", "is not known"), (False, "/any", "leaves it out")],
    ids=["as tensors", "unreadable", "hashes without LoRA"],
)
def test_an_adapter_that_cannot_be_told_apart_turns_storage_off(old, scheduler, seeded, path, reason):
    weights, _ = watched(old, seeded=seeded)
    watch.listen(weights)
    scheduler.runner.load_lora_adapter(SimpleNamespace(lora_name="a", lora_path=path))
    assert reason in weights.off
    watch.forget(weights)


def test_a_listener_that_is_gone_or_raises_does_not_reach_into_the_engines_call(old, scheduler, caplog):
    class Broken:
        def cache_flushed(self):
            raise RuntimeError("broken")

    broken = Broken()
    watch.listen(broken)
    assert scheduler.controller.reset() == "reset"
    assert "cache_flushed failed" in caplog.text
    watch.forget(broken)


def test_what_a_process_has_not_loaded_cannot_be_heard(monkeypatch):
    for module_name, _ in (*watch.WEIGHT_CLASSES, watch.FLUSH_CLASS):
        monkeypatch.delitem(watch.sys.modules, module_name, raising=False)
    monkeypatch.setattr(watch, "_installed", {})
    listener = object.__new__(Cache)
    assert watch.listen(listener) == ["weight updates", "LoRA adapters loaded while running", "cache flushes"]
    watch.forget(listener)


def test_wrapping_twice_wraps_once(scheduler, monkeypatch):
    calls = []
    listener = type("Listener", (), {"cache_flushed": lambda self: calls.append(1)})()
    watch.listen(listener)
    monkeypatch.setattr(watch, "_installed", {})
    watch.listen(listener)
    scheduler.controller.reset()
    assert calls == [1]
    watch.forget(listener)
