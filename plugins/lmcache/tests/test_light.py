"""What needs no LMCache: the description, the options, the record, the folder's ledger."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_core import Status, StorageBackendFactory
from hicache_core.errors import BackendUnavailable, InvalidOptions
from hicache_core.options import resolve
from hicache_lmcache.ledger import FolderLedger
from hicache_lmcache.native import model_name
from hicache_lmcache.options import LMCacheOptions
from hicache_lmcache.record import HEADER_NBYTES, Record, digest_of

OK, CORRUPT, SIZE_MISMATCH = Status.OK, Status.CORRUPT, Status.SIZE_MISMATCH


def test_the_backend_is_found_by_its_name() -> None:
    spec = StorageBackendFactory.spec("lmcache")
    assert (spec.target, spec.capabilities.deadline) == ("hicache_lmcache.storage:LMCacheStorage", "bounce")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, ""),
        ({"root": ""}, "root"),
        ({"l2": "resp", "root": "/x"}, ""),
        ({"l2": "s3", "root": "/x"}, "l2"),
        ({"l2": "resp", "port": 0}, "port"),
    ],
    ids=[
        "files without a folder",
        "an empty folder",
        "redis with a folder",
        "an adapter never run",
        "a port",
    ],
)
def test_options_name_the_bad_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidOptions) as refused:
        resolve("lmcache", LMCacheOptions, given, environment={})
    assert [name for name, _, _ in refused.value.problems] == [field]


def test_a_password_is_never_shown() -> None:
    options = LMCacheOptions(l2="resp", password="hunter2")
    assert "hunter2" not in f"{options!r} {options}"


def test_c5_a_record_is_ok_only_whole_undamaged_and_under_its_own_key() -> None:
    digest, page = digest_of("a.kv"), bytes(range(200))
    record = Record(memoryview(bytearray(200 + HEADER_NBYTES)))
    record.seal([memoryview(page)[:150], memoryview(page)[150:]], 200, digest)
    slot = bytearray(200)
    record.copy_out([memoryview(slot)[:10], memoryview(slot)[10:]])
    assert (bytes(slot), record.verdict(200, digest)) == (page, OK)
    assert record.verdict(199, digest) is SIZE_MISMATCH
    assert record.verdict(200, digest_of("b.kv")) is CORRUPT
    value = bytes(record.byte_array)
    assert Record(memoryview(value[:-1])).verdict(200, digest) is CORRUPT
    assert Record(memoryview(b"")).verdict(200, digest) is CORRUPT
    flipped = [bytes([*value[:at], value[at] ^ 1, *value[at + 1 :]]) for at in range(len(value))]
    assert {Record(memoryview(damaged)).verdict(200, digest) for damaged in flipped} == {CORRUPT}


def test_a_folder_tells_sizes_and_clears_only_its_own(tmp_path: Path) -> None:
    one, other = FolderLedger(str(tmp_path), "1" * 32), FolderLedger(str(tmp_path), "2" * 32)
    digests = [digest_of(name) for name in "ab"]
    for ledger in (one, other):
        Path(ledger.path(digests[0])).write_bytes(b"x" * 7)
    assert one.sizes(digests) == [7, None]
    assert list(one.all_sizes(time.monotonic() + 9)) == [7]
    assert (one.clear(time.monotonic() + 9), one.sizes(digests), other.sizes(digests)) == (
        1,
        [None, None],
        [7, None],
    )


def test_a_folder_that_cannot_be_made_is_said_with_user_and_path(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("a file")
    with pytest.raises(BackendUnavailable) as refused:
        FolderLedger(str(tmp_path / "root"), "1" * 32)
    assert f"opening 'lmcache' in {tmp_path / 'root' / ('1' * 32)}" in str(refused.value)
    assert "a folder that it can write" in refused.value.remedy


@pytest.mark.parametrize(
    ("free", "writable", "expected"),
    [(0, True, Status.NO_SPACE), (100, False, Status.DENIED), (100, True, Status.ERROR)],
    ids=["a full file system", "no permission", "neither"],
)
def test_a_store_that_failed_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, writable: bool, expected: Status
) -> None:
    ledger = FolderLedger(str(tmp_path), "1" * 32)
    room = SimpleNamespace(f_bavail=free, f_frsize=4096, f_favail=9)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    monkeypatch.setattr(os, "access", lambda *_: writable)
    assert ledger.refusal(8192) is expected


def test_a_store_whose_folder_has_gone_is_unavailable(tmp_path: Path) -> None:
    ledger = FolderLedger(str(tmp_path), "1" * 32)
    os.rmdir(ledger.folder)
    assert ledger.refusal(8192) is Status.UNAVAILABLE


def test_names_are_short_and_hold_no_separator_of_lmcaches(tmp_path: Path) -> None:
    """Longer ones than 150 characters fail in its background; ``@`` parts the fields of its keys."""
    ledger = FolderLedger(str(tmp_path), "1" * 32)
    name = Path(ledger.path(digest_of("k" * 200))).name
    assert (len(name), model_name("1" * 32).count("@")) == (91, 0)


def test_one_folder_is_made_by_many_at_once(tmp_path: Path) -> None:
    """Ranks that made one folder at a time raised (lmcache#2486)."""
    ready = threading.Barrier(8)

    def make(_: int) -> str:
        ready.wait(10)
        return FolderLedger(str(tmp_path / "root" / "deep"), "1" * 32).folder

    with ThreadPoolExecutor(8) as ranks:
        assert set(ranks.map(make, range(8))) == {str(tmp_path / "root" / "deep" / ("1" * 32))}
