"""What needs no AIBrix: the description, the options, the record."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_aibrix.making import settings_of
from hicache_aibrix.options import AibrixOptions
from hicache_aibrix.record import TRAILER_NBYTES, copy_out, digest_of, seal, verdict
from hicache_core import Status, StorageBackendFactory
from hicache_core.errors import BackendDependencyMissing, InvalidOptions
from hicache_core.options import resolve

OK, CORRUPT, SIZE_MISMATCH = Status.OK, Status.CORRUPT, Status.SIZE_MISMATCH


def test_the_backend_is_found_by_its_name() -> None:
    spec = StorageBackendFactory.spec("aibrix")
    assert (spec.target, spec.capabilities.eviction) == ("hicache_aibrix.storage:AibrixKVCacheStorage", "ttl")


def test_the_description_imports_no_library() -> None:
    assert "aibrix_kvcache" not in sys.modules or StorageBackendFactory.spec("aibrix").requires


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "root"),
        ({"root": ""}, "root"),
        ({"root": "/x", "backend": "hpkv"}, "backend"),
        ({"root": "/x", "backend": "shfs", "ttl_s": 5}, ""),
        ({"root": "/x", "write_buffer": "4 gigs"}, "write_buffer"),
    ],
    ids=["no root", "empty root", "a store that was never run", "an age for files", "a size"],
)
def test_options_name_the_bad_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidOptions) as refused:
        resolve("aibrix", AibrixOptions, given, environment={})
    assert [name for name, _, _ in refused.value.problems] == [field]


def test_no_page_goes_by_its_age_or_its_share_of_the_time_unless_asked(tmp_path: Path) -> None:
    """The library drops RocksDB's pages after 600 seconds, and gives each token 20 ms."""
    settings = settings_of(AibrixOptions(root=str(tmp_path)), "n", 2.5)
    wanted = {"ROCKSDB_TTL_S": 0, "L2_CACHE_PER_TOKEN_TIMEOUT_MS": 2500, "L1_CACHE_ENABLED": False}
    assert {name: settings[f"AIBRIX_KV_CACHE_OL_{name}"] for name in wanted} == wanted
    asked = settings_of(AibrixOptions(root=str(tmp_path), ttl_s=60), "n", 2.5)
    assert asked["AIBRIX_KV_CACHE_OL_ROCKSDB_TTL_S"] == 60


def test_a_missing_library_is_said_with_its_pip_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aibrix_kvcache", None)
    from hicache_aibrix import library

    with pytest.raises(BackendDependencyMissing) as refused:
        library.open_library(AibrixOptions(root=str(tmp_path)), "0" * 32, 1.0)
    assert (refused.value.module, refused.value.remedy) == (
        "aibrix_kvcache",
        "Run: pip install 'hicache-aibrix[aibrix]'",
    )


def test_c5_a_record_is_ok_only_whole_undamaged_and_under_its_own_key() -> None:
    digest, page = digest_of("a.kv"), bytes(range(200))
    views = [memoryview(page)[:150], memoryview(page)[150:]]
    record = seal(views, 200, digest)
    slot = bytearray(200)
    copy_out(record, [memoryview(slot)[:10], memoryview(slot)[10:]])
    assert (bytes(slot), verdict(record, 200, digest)) == (page, OK)
    assert verdict(record, 199, digest) is SIZE_MISMATCH
    assert verdict(record, 200, digest_of("b.kv")) is CORRUPT
    assert verdict(b"", 200, digest) is CORRUPT
    assert verdict(record[:-1], 200, digest) is CORRUPT
    flipped = [bytes([*record[:at], record[at] ^ 1, *record[at + 1 :]]) for at in range(200 + TRAILER_NBYTES)]
    assert {verdict(value, 200, digest) for value in flipped} == {CORRUPT}
