"""A digest that changes with the weights and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hicache_core import fingerprint
from hicache_core.fingerprint import stamp_of, weights_digest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "model-1.safetensors").write_bytes(os.urandom(4 << 20))
    (folder / "README.md").write_text("words")
    return folder


def test_equal_files_in_another_place_and_time_have_the_same_digest(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    os.utime(copy / "model-1.safetensors", (1, 1))
    (copy / "README.md").write_text("other words")
    assert weights_digest(str(model)) == weights_digest(str(copy)) is not None


def test_another_fine_tune_of_the_same_shape_has_another_digest(model: Path) -> None:
    before = weights_digest(str(model))
    (model / "model-1.safetensors").write_bytes(os.urandom(4 << 20))
    assert weights_digest(str(model)) != before


@pytest.mark.parametrize("offset", [0, (4 << 20) - 1], ids=["head", "tail"])
def test_head_and_tail_are_always_read(model: Path, offset: int) -> None:
    before = weights_digest(str(model))
    with open(model / "model-1.safetensors", "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    assert weights_digest(str(model)) != before


def test_another_config_or_another_file_has_another_digest(model: Path) -> None:
    digests = {weights_digest(str(model))}
    (model / "config.json").write_text('{"hidden_size": 16}')
    digests.add(weights_digest(str(model)))
    (model / "model-2.safetensors").write_bytes(b"x")
    digests.add(weights_digest(str(model)))
    assert len(digests) == 3


def test_dummy_weights_are_those_of_the_config(model: Path) -> None:
    before = weights_digest(str(model), load_format="dummy")
    (model / "model-1.safetensors").write_bytes(b"other")
    assert weights_digest(str(model), load_format="dummy") == before
    (model / "config.json").write_text("{}")
    assert weights_digest(str(model), load_format="dummy") != before


def test_a_cached_snapshot_is_found_by_id_and_named_by_its_blobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_weights_that_are_not_here_have_none(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert weights_digest(model) is None


def test_dummy_weights_without_a_config_have_none(tmp_path: Path) -> None:
    assert weights_digest(str(tmp_path), load_format="dummy") is None


def test_a_stamp_changes_with_the_files_that_count(model: Path, tmp_path: Path) -> None:
    before = stamp_of(str(model))
    assert before is not None
    names = ["config.json", "model-1.safetensors", "model.safetensors.index.json"]
    assert [name for name, *_ in before] == names
    (model / "README.md").write_text("other words")
    assert stamp_of(str(model)) == before
    os.utime(model / "model-1.safetensors", (1, 1))
    assert stamp_of(str(model)) != before
    assert stamp_of(str(tmp_path / "none")) is None
