"""A digest that changes with the weights and with nothing else."""

from __future__ import annotations

import os

import pytest

from hicache_sglang import fingerprint
from hicache_sglang.fingerprint import adapter_paths, adapters_digest, file_digest, weights_digest


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(os.urandom(4 << 20))
    (folder / "README.md").write_text("words")
    return folder


def test_equal_files_in_another_place_and_time_have_the_same_digest(model, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    os.utime(copy / "model-1.safetensors", (1, 1))
    (copy / "README.md").write_text("other words")
    assert weights_digest(str(model)) == weights_digest(str(copy)) is not None


def test_another_fine_tune_of_the_same_shape_has_another_digest(model):
    before = weights_digest(str(model))
    (model / "model-1.safetensors").write_bytes(os.urandom(4 << 20))
    assert weights_digest(str(model)) != before


@pytest.mark.parametrize("offset", [0, (4 << 20) - 1], ids=["head", "tail"])
def test_head_and_tail_are_always_read(model, offset):
    before = weights_digest(str(model))
    with open(model / "model-1.safetensors", "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    assert weights_digest(str(model)) != before


def test_another_config_or_another_file_has_another_digest(model):
    digests = {weights_digest(str(model))}
    (model / "config.json").write_text('{"hidden_size": 16}')
    digests.add(weights_digest(str(model)))
    (model / "model-2.safetensors").write_bytes(b"x")
    digests.add(weights_digest(str(model)))
    assert len(digests) == 3


def test_dummy_weights_are_those_of_the_config(model):
    before = weights_digest(str(model), load_format="dummy")
    (model / "model-1.safetensors").write_bytes(b"other")
    assert weights_digest(str(model), load_format="dummy") == before
    (model / "config.json").write_text("{}")
    assert weights_digest(str(model), load_format="dummy") != before


def test_a_cached_snapshot_is_found_by_id_and_named_by_its_blobs(tmp_path, monkeypatch):
    entry = tmp_path / "models--org--name"
    for folder in ("refs", "blobs", "snapshots/abc"):
        (entry / folder).mkdir(parents=True)
    (entry / "refs/main").write_text("abc")
    (entry / "blobs" / ("f" * 64)).write_bytes(b"weights")
    (entry / "snapshots/abc/model.safetensors").symlink_to(f"../../blobs/{'f' * 64}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(fingerprint.os, "pread", None)
    assert weights_digest("org/name") == weights_digest("org/name", "abc") is not None
    assert weights_digest("org/name", "def") is None


@pytest.mark.parametrize("model", ["s3://bucket/model", "org/absent", "/no/such/folder"])
def test_weights_that_are_not_here_have_none(model, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert weights_digest(model) is None


def test_adapters_are_told_apart_by_content(model, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "adapter_model.safetensors").write_bytes(b"adapter")
    one, two = adapters_digest({"a": str(model)}), adapters_digest({"a": str(other)})
    assert len({one, two, adapters_digest({"a": str(model), "b": str(other)}), adapters_digest({})}) == 4
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
