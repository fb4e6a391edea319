"""The page file: its label, who may open it, and two that make it at once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys

import pytest
from hf3fs_builders import NBYTES

from hicache_core.errors import BackendIncompatible, BackendUnavailable, InvalidOptions
from hicache_hf3fs import pagefile
from hicache_hf3fs.metadata import PageFileLabel
from hicache_hf3fs.pagefile import FORMAT_VERSION, LABEL_NBYTES, open_page_file


def test_a_new_file_is_preallocated_private_and_found_again(tmp_path):
    made = open_page_file(str(tmp_path / "root"), "kv", NBYTES, 8 * NBYTES + 100)
    about = os.stat(made.path)
    assert (about.st_size, stat.S_IMODE(about.st_mode)) == (8 * NBYTES + LABEL_NBYTES, 0o600)
    assert about.st_blocks * 512 >= about.st_size, "not preallocated"
    assert (made.offset(0), made.offset(7)) == (0, 7 * NBYTES)
    made.close()
    again = open_page_file(str(tmp_path / "root"), "kv", NBYTES, 8 * NBYTES)
    assert again.label == made.label
    again.close()
    assert os.listdir(tmp_path / "root") == ["kv.pages"]


def test_a_file_too_small_for_one_page_names_the_least(tmp_path):
    with pytest.raises(InvalidOptions) as caught:
        open_page_file(str(tmp_path), "kv", NBYTES, NBYTES - 1)
    assert f"the least is {NBYTES} bytes" in str(caught.value)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("at", "byte", "said"),
    [(0, b"X", "is not a page file"), (30, b"\xff", "its label is damaged")],
    ids=["another magic", "a flipped byte"],
)
def test_a_damaged_label_is_refused(tmp_path, at, byte, said):
    made = open_page_file(str(tmp_path), "kv", NBYTES, 8 * NBYTES)
    os.pwrite(made.fd, byte, 8 * NBYTES + at)
    made.close()
    with pytest.raises(BackendIncompatible) as caught:
        open_page_file(str(tmp_path), "kv", NBYTES, 8 * NBYTES)
    assert said in str(caught.value)
    assert "Move it away" in str(caught.value)


def test_pages_lie_at_multiples_of_their_size_and_the_last_one_before_the_label(tmp_path):
    made = open_page_file(str(tmp_path), "kv", NBYTES, 8 * NBYTES)
    for index in range(8):
        assert made.offset(index) == index * NBYTES
        os.pwrite(made.fd, bytes([index + 1]) * NBYTES, made.offset(index))
    made.close()
    again = open_page_file(str(tmp_path), "kv", NBYTES, 8 * NBYTES)
    assert again.label == made.label
    assert os.pread(again.fd, 8 * NBYTES, 0) == b"".join(bytes([index + 1]) * NBYTES for index in range(8))
    again.close()


def test_a_file_that_was_cut_is_refused(tmp_path):
    made = open_page_file(str(tmp_path), "kv", NBYTES, 8 * NBYTES)
    made.close()
    for nbytes in (8 * NBYTES, 10, 0):
        os.truncate(made.path, nbytes)
        with pytest.raises(BackendIncompatible, match="is not a page file"):
            open_page_file(str(tmp_path), "kv", NBYTES, 8 * NBYTES)


def test_another_format_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("hicache_hf3fs.pagefile.FORMAT_VERSION", FORMAT_VERSION + 1)
    open_page_file(str(tmp_path), "kv", NBYTES, 8 * NBYTES).close()
    monkeypatch.undo()
    with pytest.raises(BackendIncompatible) as caught:
        open_page_file(str(tmp_path), "kv", NBYTES, 8 * NBYTES)
    assert f"version {FORMAT_VERSION + 1}, this program reads {FORMAT_VERSION}" in str(caught.value)


def test_no_symbolic_link_is_followed(tmp_path):
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / "kv.pages").symlink_to(tmp_path / "target")
    with pytest.raises(BackendUnavailable):
        open_page_file(str(tmp_path), "kv", NBYTES, 8 * NBYTES)
    assert (tmp_path / "target").read_bytes() == b"mine"


def test_no_room_is_said_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(descriptor, offset, nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(BackendUnavailable) as caught:
        open_page_file(str(tmp_path), "kv", NBYTES, 8 * NBYTES)
    assert "lower file_size" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_preallocation_or_links_works(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    monkeypatch.setattr(os, "link", unsupported)
    made = open_page_file(str(tmp_path), "kv", NBYTES, 8 * NBYTES)
    assert os.stat(made.path).st_size == 8 * NBYTES + LABEL_NBYTES
    made.close()
    assert os.listdir(tmp_path) == ["kv.pages"]


_MAKE = """
import sys
from hicache_hf3fs.pagefile import open_page_file
sys.stdin.read(1)
print(open_page_file(sys.argv[1], "kv", 4096, 32768).label.file_id)
"""


def test_processes_that_make_a_file_at_once_end_with_the_same_one(tmp_path):
    command = [sys.executable, "-c", _MAKE, str(tmp_path)]
    makers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for maker in makers:
        maker.stdin.write("x")
        maker.stdin.flush()
    said = {maker.communicate(timeout=60)[0].strip() for maker in makers}
    assert len(said) == 1
    assert len(said.pop()) == 32
    assert os.listdir(tmp_path) == ["kv.pages"]


def test_what_a_killed_maker_left_is_removed_when_it_is_old(tmp_path):
    old, young = tmp_path / "kv.pages.0123abcd.new", tmp_path / "kv.pages.4567cdef.new"
    for path in (old, young):
        path.write_bytes(b"half a file")
    os.utime(old, (1.0, 1.0))
    open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv.pages", young.name]


@pytest.mark.parametrize(
    ("version", "front", "remedy"),
    [(1, True, "Name another root"), (3, False, "Run: pip install -U hicache-hf3fs")],
    ids=["the label before the pages", "a later one"],
)
def test_a_file_of_another_format_is_named_as_that(tmp_path, monkeypatch, version, front, remedy):
    label = PageFileLabel("a" * 32, NBYTES, 4)
    monkeypatch.setattr(pagefile, "FORMAT_VERSION", version)
    packed = pagefile._packed(label).ljust(pagefile.LABEL_NBYTES, b"\0")
    monkeypatch.undo()
    pages = bytes(4 * NBYTES)
    (tmp_path / "kv.pages").write_bytes(packed + pages if front else pages + packed)
    with pytest.raises(BackendIncompatible) as caught:
        open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES)
    assert f"version {version}, this program reads 2" in str(caught.value)
    assert caught.value.remedy.startswith(remedy)


def test_a_label_without_its_pages_is_refused(tmp_path):
    packed = pagefile._packed(PageFileLabel("a" * 32, NBYTES, 4))
    (tmp_path / "kv.pages").write_bytes(packed.ljust(pagefile.LABEL_NBYTES, b"\0"))
    with pytest.raises(BackendIncompatible):
        open_page_file(str(tmp_path), "kv", NBYTES, 4 * NBYTES)
