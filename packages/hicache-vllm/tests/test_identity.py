"""Any change of what the bytes mean must miss; any change of who asks must hit."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import vllm_fake

from hicache_core import Namespace
from hicache_core.errors import InvalidOptions
from hicache_vllm.identity import draft_model_of, identity_of, placement_of
from hicache_vllm.layout import read_layout, split_key
from hicache_vllm.settings import Settings

NBYTES = 4096


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return str(tmp_path)


def address(model, *, spec=None, settings=None, release="0.32.0", platform="cuda:9.0", seed="s", **changes):
    """Give what a page's place in a store is made of: namespace and component."""
    config = vllm_fake.vllm_config(model, **changes)
    spec = vllm_fake.spec(config, **(spec or {}))
    layout = read_layout(spec, config, release=release, platform=platform)
    identity = identity_of(config, layout, settings or Settings(backend="file"), seed_constant=seed)
    components = layout.components(NBYTES, draft_model_of(config))
    return Namespace.of(identity).id, tuple(component.key for component in components.values())


TABLE = {"rope_type": "yarn", "factor": 4.0}
MEANING = {
    "revision": {"model_config__revision": "abc"},
    "quantisation": {"model_config__quantization": "awq"},
    "model dtype": {"model_config__dtype": "torch.float16"},
    "overrides": {"model_config__hf_overrides": {"rope_theta": 5e5}},
    "kv dtype": {"cache_config__cache_dtype": "fp8_e4m3"},
    "hash function": {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
    "hash seed": {"seed": "other"},
    "blocks a chunk": {"spec": {"blocks": 2}},
    "cache groups": {"spec": {"groups": 2}},
    "block layout": {"spec": {"kv_cache_layout": "HND"}},
    "canonical": {"spec": {"canonical_layout": True}},
    "single copy": {"spec": {"replicated_layout": True}},
    "tensor parallel": {"parallel_config__tensor_parallel_size": 2},
    "pipeline parallel": {"parallel_config__pipeline_parallel_size": 2},
    "context parallel": {"parallel_config__decode_context_parallel_size": 2},
    "attention backend": {"attention_config__backend": "FLASHINFER"},
    "device": {"platform": "cuda:10.0"},
    "release": {"release": "0.33.0"},
    "dummy weights": {"load_config__load_format": "dummy"},
    "tenant": {"settings": Settings(backend="file", tenant="a")},
    "stated weights": {"settings": Settings(backend="file", weights="v2")},
    "draft model": {"speculative_config": SimpleNamespace(model="org/draft", revision=None)},
    "scaled rope": {
        "model_config__hf_text_config": SimpleNamespace(rope_parameters=TABLE),
        "model_config__hf_overrides": {"rope_parameters": TABLE},
    },
}
PLACE = {
    "patch release": {"release": "0.32.1"},
    "data parallel": {"parallel_config__data_parallel_size": 4, "parallel_config__data_parallel_index": 3},
    "engine id": {"kv_transfer_config__engine_id": "engine-2"},
    "request length": {"model_config__max_model_len": 8192},
    "timeout": {"settings": Settings(backend="file", timeout_s=1.0, load_threads=8)},
    "lora allowed": {"lora_config": object()},
}


@pytest.mark.parametrize("change", MEANING.values(), ids=MEANING)
def test_a_change_of_meaning_misses(model, change):
    assert address(model, **change) != address(model)


@pytest.mark.parametrize("change", PLACE.values(), ids=PLACE)
def test_a_change_of_place_hits(model, change):
    assert address(model, **change) == address(model)


def test_other_weights_at_the_same_path_miss_and_the_same_elsewhere_hit(model, tmp_path):
    named = Settings(backend="file", model="org/model")
    before = address(model, settings=named)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "model.safetensors").write_bytes(b"weights")
    assert address(str(copy), settings=named) == before
    (copy / "model.safetensors").write_bytes(b"WEIGHTS")
    assert address(str(copy), settings=named) != before


def test_with_scaled_rope_the_longest_request_counts(model):
    for table in (TABLE, {"full_attention": TABLE, "sliding_attention": {"rope_type": "default"}}):
        scaled = {"model_config__hf_text_config": SimpleNamespace(rope_parameters=table)}
        longer = scaled | {"model_config__max_model_len": 8192}
        assert address(model, **scaled) != address(model, **longer)


def test_canonical_and_single_copy_rows_are_shared_by_tensor_parallel_sizes(model):
    portable = {"canonical_layout": True, "parallel": SimpleNamespace(is_parallelism_agnostic=True)}
    for spec in (portable, {"replicated_layout": True}):
        wide = {"parallel_config__tensor_parallel_size": 2}
        assert address(model, spec=spec, **wide) == address(model, spec=spec)


def test_overrides_by_a_function_are_told_apart_by_the_config_they_made(model):
    def config(text):
        return SimpleNamespace(to_json_string=lambda: text)

    def with_(text):
        return {"model_config__hf_overrides": lambda c: c, "model_config__hf_config": config(text)}

    assert address(model, **with_("a")) == address(model, **with_("a"))
    assert address(model, **with_("a")) != address(model, **with_("b"))


def test_scales_that_each_process_computes_are_refused(model):
    changes = {"cache_config__cache_dtype": "fp8", "cache_config__calculate_kv_scales": True}
    with pytest.raises(InvalidOptions, match="serve without --calculate-kv-scales"):
        address(model, **changes)


@pytest.mark.parametrize(
    ("constant", "algorithm", "given", "seed", "warned"),
    [
        ("c", "sha256", None, "c", False),
        (None, "sha256", None, None, True),
        ("c", "xxhash", None, None, True),
        (None, "xxhash", "7", "7", False),
    ],
)
def test_the_seed_is_the_variable_or_the_releases_constant_else_it_is_said(
    model, monkeypatch, caplog, constant, algorithm, given, seed, warned
):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    config = vllm_fake.vllm_config(model, cache_config__prefix_caching_hash_algo=algorithm)
    layout = read_layout(vllm_fake.spec(config), config, release="0.32.0", platform="cpu")
    with caplog.at_level(logging.WARNING, "hicache"):
        identity = identity_of(config, layout, Settings(backend="file"), seed_constant=constant)
    assert identity.hash_seed == seed
    assert ("PYTHONHASHSEED" in caplog.text) is warned


def test_a_spec_of_0_24_gives_the_same_facts(model):
    config = vllm_fake.vllm_config(model)
    old = read_layout(vllm_fake.spec(config, old=True, blocks=2), config, release="0.24.0", platform="cpu")
    new = read_layout(vllm_fake.spec(config, blocks=2), config, release="0.24.0", platform="cpu")
    assert dataclasses.replace(new, kv_layout=None) == old
    assert old.page_tokens == 32


def test_placement_is_the_schedulers(model):
    config = vllm_fake.vllm_config(model, parallel_config__data_parallel_size=2)
    placement = placement_of(config, "cuda:9.0")
    assert (placement.dp_size, placement.tp_rank, placement.device) == (2, 0, "cuda:9.0")


def test_a_key_is_a_hash_and_a_group():
    assert split_key(bytes(range(32)) + b"\0\0\1\2") == (bytes(range(32)).hex(), 258)
