"""What is counted as left behind by this process, and what is somebody else's."""

from __future__ import annotations

import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hicache_conformance.held import SharedMemory, held

SHM = Path("/dev/shm")
NBYTES = 1 << 17


@pytest.fixture
def stem() -> Iterator[str]:
    """A beginning of names in /dev/shm that nobody else uses; what has it is removed."""
    made = f"hicache-test-{secrets.token_urlsafe(9)}"
    yield made
    for path in SHM.glob(f"{made}*"):
        path.unlink()


def _mapped(name: str) -> mmap.mmap:
    descriptor = os.open(SHM / name, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return mmap.mmap(descriptor, mmap.PAGESIZE)
    finally:
        os.close(descriptor)


def test_held_names_another_process_makes_in_shared_memory_are_not_ours(stem: str) -> None:
    shared = SharedMemory()
    program = f"import pathlib; pathlib.Path('/dev/shm/{stem}-theirs').touch()"
    subprocess.run([sys.executable, "-c", program], check=True)
    shared.look()
    assert (SHM / f"{stem}-theirs").exists()
    assert shared.left() == set()


def test_held_a_name_that_was_mapped_is_ours_once_it_is_unmapped(stem: str) -> None:
    shared = SharedMemory()
    with _mapped(f"{stem}-ours"):
        shared.look()
    assert shared.left() == {f"{stem}-ours"}


def test_held_a_name_that_was_open_is_ours_and_gone_when_it_is_removed(stem: str) -> None:
    shared = SharedMemory()
    with (SHM / f"{stem}-ours").open("w"):
        shared.look()
    assert shared.left() == {f"{stem}-ours"}
    (SHM / f"{stem}-ours").unlink()
    assert shared.left() == set()


def test_held_a_name_with_this_processs_id_is_ours_though_it_was_never_seen_open(stem: str) -> None:
    shared = SharedMemory()
    for name in (f"{stem}.{os.getpid()}.0", f"{stem}.{os.getpid()}0"):
        (SHM / name).touch()
    assert shared.left() == {f"{stem}.{os.getpid()}.0"}


def test_held_a_name_that_was_there_before_is_not_ours(stem: str) -> None:
    with _mapped(f"{stem}-old"):
        shared = SharedMemory()
        shared.look()
    assert shared.left() == set()


def test_held_descriptors_are_counted() -> None:
    before = held()
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
    grown = held().since(before)
    for descriptor in opened:
        os.close(descriptor)
    assert (grown.descriptors, held().since(before).descriptors) == (5, 0)


def test_held_memory_kept_after_much_was_freed_is_seen() -> None:
    _free_in_the_heap(200 * NBYTES)
    before = held()
    kept = [bytearray(os.urandom(NBYTES)) for _ in range(100)]
    grown = held().since(before).rss_nbytes
    assert len(kept) == 100
    assert grown > 90 * NBYTES


def _free_in_the_heap(nbytes: int) -> None:
    """Leave this much free and resident: small blocks on top keep the heap from shrinking (mallopt(3))."""
    low = [bytearray(os.urandom(NBYTES // 2)) for _ in range(2 * nbytes // NBYTES)]
    top = [bytearray(1000) for _ in range(1000)]
    low.clear()
    top.clear()
