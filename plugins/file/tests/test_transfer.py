"""Moving pages: every layout, short system calls, and a checksum a page."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from hicache_file import _transfer as transfer
from hicache_file._transfer import CHUNK_NBYTES, Chunk, read_chunk, sum_of, write_pages


def views_of(buffer: bytearray, cuts: int) -> list[memoryview]:
    step = len(buffer) // cuts
    view = memoryview(buffer)
    return [view[i * step : (i + 1) * step] for i in range(cuts)]


@pytest.fixture
def fd(tmp_path: Path) -> int:
    return os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)


@pytest.fixture(params=[None, 1, 1000, 70_000], ids=["whole calls", "1 byte", "1000 bytes", "70000 bytes"])
def short_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Let the kernel move less than it was asked for."""
    most: int | None = request.param
    if most is not None:
        real_write, real_read = os.pwritev, os.preadv

        def clipped(views: list[memoryview]) -> list[memoryview]:
            return [views[0][:most]]

        monkeypatch.setattr(os, "pwritev", lambda fd, views, at: real_write(fd, clipped(views), at))
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, clipped(views), at))
    return most


@pytest.mark.parametrize(
    ("pages", "cuts", "nbytes"), [(5, 1, 1000), (3, 7, 7 * 300), (9, 2, 2 << 16), (2, 3, 3 << 19)]
)
def test_pages_come_back_with_their_sums(
    fd: int, short_calls: int | None, pages: int, cuts: int, nbytes: int
) -> None:
    if short_calls == 1 and nbytes > 3000:
        pytest.skip("unsupported: a call a byte would take minutes")
    source = bytearray(os.urandom(pages * nbytes))
    sums: list[int] = []
    write_pages(fd, 64, views_of(source, pages * cuts), cuts, nbytes, sums)
    wanted = [xxhash.xxh3_64_intdigest(source[i * nbytes : (i + 1) * nbytes]) for i in range(pages)]
    assert sums == wanted
    target = bytearray(pages * nbytes)
    bad: list[int] = []
    chunk = Chunk(fd, 64, list(range(pages)), sums)
    read_chunk(chunk, views_of(target, pages * cuts), cuts, nbytes, bad)
    assert (bad, target) == ([], source)


def test_pages_in_another_order_land_in_their_own_slots(fd: int) -> None:
    source = bytearray(os.urandom(4 * 100))
    write_pages(fd, 0, views_of(source, 4), 1, 100, None)
    target = bytearray(4 * 100)
    read_chunk(Chunk(fd, 0, [0, 2, 1, 3], None), views_of(target, 4), 1, 100, [])
    parts = [source[i * 100 : (i + 1) * 100] for i in (0, 2, 1, 3)]
    assert target == b"".join(parts)


@pytest.mark.parametrize("nbytes", [1000, CHUNK_NBYTES + 4096], ids=["small", "large"])
def test_a_short_file_and_a_wrong_sum_are_named_by_position(fd: int, nbytes: int) -> None:
    source = bytearray(os.urandom(3 * nbytes))
    sums: list[int] = []
    write_pages(fd, 0, views_of(source, 3), 1, nbytes, sums)
    os.ftruncate(fd, 3 * nbytes - 1)
    sums[0] ^= 1
    bad: list[int] = []
    read_chunk(Chunk(fd, 0, [4, 5, 6], sums), views_of(bytearray(7 * nbytes), 7), 1, nbytes, bad)
    assert sorted(bad) == [4, 6]


def test_a_page_of_many_segments_has_the_sum_of_its_bytes() -> None:
    page = bytearray(os.urandom(4096))
    assert sum_of(views_of(page, 128)) == xxhash.xxh3_64_intdigest(page)


def test_a_chunk_takes_no_more_buffers_than_the_kernel(fd: int) -> None:
    assert transfer.pages_per_chunk(64, 1, summed=True) == 1024
    assert transfer.pages_per_chunk(128, 128, summed=True) == 8
    assert transfer.pages_per_chunk(1 << 20, 1, summed=True) == 1
    assert transfer.pages_per_chunk(1 << 20, 1, summed=False) == 2
    source = bytearray(os.urandom(2000 * 64))
    write_pages(fd, 0, views_of(source, 2000), 1, 64, None)
    assert os.pread(fd, len(source), 0) == source
