"""Options and the errors of opening that only the machine can tell."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_core.errors import BackendIncompatible, BackendUnavailable, InvalidOptions
from hicache_core.options import resolve
from hicache_file.options import FileOptions


def refusal(**given: Any) -> str:
    with pytest.raises(InvalidOptions) as refused:
        resolve("file", FileOptions, given, environment={})
    return str(refused.value)


def test_defaults_are_safe() -> None:
    options = resolve("file", FileOptions, {"root": "/x"}, environment={}).options
    assert options.model_dump() == {
        "bounce": False,
        "root": "/x",
        "read_only": False,
        "capacity": None,
        "checksum": True,
        "fsync": False,
        "lanes": 2,
        "segment_size": 64 << 20,
        "max_open_segments": 256,
        "network": None,
    }


def test_values_come_from_the_environment_too() -> None:
    environment = {"HICACHE_FILE_ROOT": "/y", "HICACHE_FILE_CAPACITY": "1.5GiB", "HICACHE_FILE_CHECKSUM": "0"}
    options: Any = resolve("file", FileOptions, {}, environment=environment).options
    assert (options.root, options.capacity, options.checksum) == ("/y", 3 << 29, False)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "root is required"),
        ({"root": ""}, "root='' is not a path"),
        ({"root": "/x", "capcity": "1gib"}, "capcity is unknown (capacity?)"),
        ({"root": "/x", "capacity": -1}, "-1 is negative"),
        ({"root": "/x", "segment_size": "1gib"}, "segment_size=1073741824"),
        ({"root": "/x", "lanes": 3}, "lanes=3"),
        ({"root": "/x", "read_only": True, "capacity": "1gib"}, "read_only and capacity exclude each other"),
        ({"root": "/x", "read_only": True, "fsync": True}, "read_only and fsync exclude each other"),
    ],
)
def test_bad_options_are_refused_with_the_value(given: dict[str, Any], complaint: str) -> None:
    assert complaint in refusal(**given)


def test_a_root_that_is_a_file_is_refused_and_left_alone(make: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"mine")
    with pytest.raises(InvalidOptions) as refused:
        make(root=str(path))
    assert f"root='{path}' is a file; name a folder" in str(refused.value)
    assert path.read_bytes() == b"mine"


def test_a_root_below_a_file_is_refused(make: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(BackendUnavailable, match="Name a folder on a working file system"):
        make(root=str(tmp_path / "file" / "root"))


def test_a_reader_of_a_root_that_is_not_there_is_refused(make: Callable[..., Any], root: str) -> None:
    with pytest.raises(BackendUnavailable, match="opening 'file'"):
        make(read_only=True)
    assert not os.path.exists(root)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_root_of_another_version_is_refused_and_left_alone(
    make: Callable[..., Any], root: str, read_only: bool
) -> None:
    make().close()
    books = Path(root) / "hicache.root"
    raw = bytearray(books.read_bytes())
    raw[8:12] = (9 | (9 ^ 0xFFFF) << 16).to_bytes(4, "little")
    books.write_bytes(raw)
    with pytest.raises(BackendIncompatible) as refused:
        make(read_only=read_only)
    assert "was written by another version of hicache-file: format version 9, this code knows 1" in str(
        refused.value
    )
    assert books.read_bytes() == raw


def test_the_manifest_is_readable(make: Callable[..., Any], root: str) -> None:
    import json

    store = make(tenant="somebody")
    manifest = json.loads((Path(root) / store.namespace.id / "manifest.json").read_text())
    assert manifest["namespace"] == store.namespace.id
    assert manifest["identity"]["tenant"] == "somebody"
