"""Adapters in page hashes: by content, whatever they are called and wherever they lie."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from hicache_vllm import lora


@pytest.fixture
def adapter(tmp_path):
    def make(content: bytes, folder: str = "a", name: str = "tuned", number: int = 1):
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        (place / "adapter_model.safetensors").write_bytes(content)
        return SimpleNamespace(lora_name=name, lora_path=str(place), lora_int_id=number)

    return make


def hashed(modules, request):
    function = modules["vllm.v1.core.kv_cache_utils"]._gen_lora_extra_hash_keys
    return function(SimpleNamespace(lora_request=request))


@pytest.mark.parametrize("old", [False, True], ids=["0.31", "0.24"])
def test_content_takes_the_paths_place_or_stands_behind_the_name(fake, adapter, old):
    modules = fake(old=old)
    assert lora.hash_by_content()
    assert lora.hash_by_content()
    assert hashed(modules, None) == []
    keys = hashed(modules, adapter(b"one"))
    kept, digest = (keys[0], keys[1]) if old else (keys[0][:2], keys[0][2])
    assert kept == ("tuned" if old else ("lora", "tuned"))
    assert digest.startswith("sampled:")
    assert len(keys) == (2 if old else 1)


def test_equal_content_is_equal_wherever_it_lies_and_other_content_is_not(fake, adapter):
    modules = fake()
    lora.hash_by_content()
    one = hashed(modules, adapter(b"one", "x", number=11))
    assert hashed(modules, adapter(b"one", "y", number=12)) == one
    assert hashed(modules, adapter(b"two", "z", number=13)) != one


def test_files_that_change_under_a_loaded_adapter_make_it_a_secret(adapter, caplog):
    adapters = lora.Adapters()
    request = adapter(b"one")
    first = adapters.digest(request)
    assert adapters.digest(request) == first
    adapter(b"two")
    os.utime(f"{request.lora_path}/adapter_model.safetensors", ns=(1, 1))
    changed = adapters.digest(request)
    assert changed.startswith("secret:")
    assert adapters.digest(request) == changed
    assert lora.Adapters().digest(request) not in (first, changed)
    assert "changed while it was loaded" in caplog.text


def test_an_adapter_that_cannot_be_read_is_a_secret_of_the_process():
    request = SimpleNamespace(lora_name="n", lora_path="/nowhere/at/all", lora_int_id=1)
    first, second = lora.Adapters(), lora.Adapters()
    assert first.digest(request) == first.digest(request)
    assert first.digest(request) != second.digest(request)
