"""Digests of LoRA adapters and small files."""

from __future__ import annotations

import pytest

from hicache_sglang.fingerprint import adapter_paths, adapters_digest, file_digest


def test_adapters_are_told_apart_by_content(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(folder.name.encode())
    sets = [{"a": str(one)}, {"a": str(two)}, {"a": str(one), "b": str(two)}, {}]
    assert len({adapters_digest(paths) for paths in sets}) == 4
    with pytest.raises(LookupError, match="'gone' at '/no/such'"):
        adapters_digest({"gone": "/no/such"})


@pytest.mark.parametrize(
    "given",
    [
        ["one=/a", "/b"],
        {"one": "/a", "/b": "/b"},
        [{"lora_name": "one", "lora_path": "/a"}, {"lora_name": "/b", "lora_path": "/b"}],
        {"one": {"lora_name": "one", "lora_path": "/a"}, "two": {"lora_name": "/b", "lora_path": "/b"}},
    ],
    ids=["texts", "mapping", "records", "mapping of records"],
)
def test_lora_paths_are_read_in_every_form(given):
    assert adapter_paths(given) == {"one": "/a", "/b": "/b"}
    assert adapter_paths(None) == {}


def test_a_scales_file_is_read_whole(tmp_path):
    (tmp_path / "scales.json").write_text("1")
    assert file_digest(str(tmp_path / "scales.json")) != file_digest(str(tmp_path / "none"))
    assert file_digest(str(tmp_path / "none")) is None
