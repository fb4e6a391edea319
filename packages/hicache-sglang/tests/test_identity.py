"""SGLang's server arguments as an Identity: whatever changes a page's bytes changes the namespace."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from hicache_core import Namespace
from hicache_core.errors import InvalidOptions
from hicache_sglang import identity
from hicache_sglang.identity import Server, refuse_unseeded, server_arguments
from hicache_sglang.settings import read_settings


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/model.safetensors").write_bytes(b"weights")
    return str(tmp_path / "model")


def namespace(
    model, *, extra=None, seeded=True, kv_dtype="bfloat16", page_tokens=64, adapters=None, **arguments
):
    server = Server(
        SimpleNamespace(**{"model_path": model} | arguments), read_settings(extra), "served", seeded
    )
    made = server.identity(kv_dtype=kv_dtype, page_tokens=page_tokens, adapters=adapters)
    return str(Namespace.of(made))


@pytest.mark.parametrize(
    "change",
    [
        dict(revision="v2"),
        dict(quantization="awq"),
        dict(kv_cache_dtype="fp8_e4m3"),
        dict(kv_dtype="float8_e5m2"),
        dict(page_tokens=128),
        dict(json_model_override_args='{"rope_scaling": {"factor": 2.0}}'),
        dict(context_length=4096),
        dict(dtype="float16"),
        dict(extra={"tenant": "b"}),
        dict(extra={"weights": "v2"}),
        dict(extra={"model": "other"}),
        dict(quantization_param_path="/no/such/scales.json"),
        dict(load_format="dummy"),
        dict(seeded=False),
    ],
    ids=lambda change: " ".join(change) if isinstance(change, dict) else str(change),
)
def test_a_change_of_meaning_is_another_namespace(model, change):
    assert namespace(model, **change) != namespace(model)


@pytest.mark.parametrize(
    "change",
    [
        dict(dtype="auto"),
        dict(json_model_override_args="{}"),
        dict(context_length=None),
        dict(tp_size=8),
        dict(mem_fraction_static=0.5),
        dict(hicache_mem_layout="page_first_direct"),
        dict(extra={"timeout_s": 1.0}),
        dict(extra={"options": {"root": "/other"}}),
        dict(lora_paths=[]),
    ],
    ids=lambda change: " ".join(change) if isinstance(change, dict) else str(change),
)
def test_a_change_of_circumstances_is_the_same_namespace(model, change):
    assert namespace(model, **change) == namespace(model)


def test_other_weights_under_the_same_path_are_another_namespace(model, tmp_path):
    before = namespace(model)
    (tmp_path / "model/model.safetensors").write_bytes(b"another fine-tune")
    assert namespace(model) != before


def test_adapters_join_by_content(model, tmp_path):
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora/adapter_model.safetensors").write_bytes(b"one")
    paths = [f"a={tmp_path / 'lora'}"]
    before = namespace(model, lora_paths=paths)
    (tmp_path / "lora/adapter_model.safetensors").write_bytes(b"two")
    assert len({namespace(model), before, namespace(model, lora_paths=paths)}) == 3
    with pytest.raises(LookupError):
        namespace(model, lora_paths=["gone=/no/such"])


def test_weights_that_cannot_be_read_are_said_once_and_model_and_revision_stand_alone(caplog):
    assert namespace("org/absent", revision="a") != namespace("org/absent", revision="b")
    assert "the weights of 'org/absent' cannot be read" in caplog.text


def test_without_a_server_the_storage_config_names_the_model():
    server = Server(None, read_settings({}), "org/model", seeded=True)
    assert server.identity(kv_dtype="bfloat16", page_tokens=1).model == "org/model"
    assert server.draft_model() is None


def test_a_draft_model_is_named_with_its_weights(model):
    server = Server(SimpleNamespace(speculative_draft_model_path=model), read_settings({}), None, seeded=True)
    assert server.draft_model().startswith(f"{model}@#sampled:")


@pytest.mark.parametrize(
    ("settings", "arguments", "fields"),
    [
        ({}, dict(enable_lora=True), ["enable_lora"]),
        ({}, dict(lora_paths=["a=/b"]), ["enable_lora"]),
        ({"cache_salts": True}, {}, ["cache_salts"]),
        ({"cache_salts": True}, dict(enable_lora=True), ["cache_salts", "enable_lora"]),
    ],
)
def test_lora_and_salts_are_refused_where_page_hashes_leave_them_out(settings, arguments, fields):
    read, server = read_settings(settings), SimpleNamespace(**arguments)
    with pytest.raises(InvalidOptions) as refused:
        refuse_unseeded(read, server, seeded=False)
    assert [field for field, _, _ in refused.value.problems] == fields
    refuse_unseeded(read, server, seeded=True)


def test_server_arguments_are_asked_of_loaded_modules_only(monkeypatch):
    arguments = SimpleNamespace(model_path="m")
    new, old = ModuleType("sglang.srt.runtime_context"), ModuleType("sglang.srt.server_args")
    monkeypatch.delitem(identity.sys.modules, new.__name__, raising=False)
    monkeypatch.delitem(identity.sys.modules, old.__name__, raising=False)
    assert server_arguments() is None
    old.get_global_server_args = lambda: arguments
    monkeypatch.setitem(identity.sys.modules, old.__name__, old)
    assert server_arguments() is arguments

    def unpublished():
        raise ValueError("not published")

    new.get_server_args = unpublished
    monkeypatch.setitem(identity.sys.modules, new.__name__, new)
    assert server_arguments() is arguments
