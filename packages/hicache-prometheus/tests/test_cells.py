from __future__ import annotations

import fcntl
import os
import subprocess
import sys

import pytest

from hicache_prometheus.cells import CELLS, MAX_LABELS_NBYTES, ROWS, Table, read_file


def counted(**cells: int) -> tuple[int, ...]:
    return tuple(cells.get(f"c{at}", 0) for at in range(CELLS))


def test_what_is_added_is_read_back():
    table = Table()
    cells = table.label(3, ("verb", "é"))
    cells[0] += 5
    cells[47] += 2**63
    assert list(table.rows()) == [(("verb", "é"), counted(c0=5, c47=2**63))]


def test_a_row_with_new_labels_begins_at_zero():
    table = Table()
    table.label(0, ("a longer label than the next",))[1] += 7
    table.label(0, ("b",))
    assert list(table.rows()) == [(("b",), counted())]


def test_a_row_whose_labels_are_just_changing_is_left_out():
    table = Table()
    table.label(0, ("a",))
    table.label(1, ("b",))
    table._words[1024 // 8] |= 1
    assert [labels for labels, _ in table.rows()] == [("b",)]


def test_labels_that_do_not_fit_are_cut():
    table = Table()
    table.label(ROWS - 1, ("verb", "x" * 5000, "y" * 5000))
    ((kind, first, second), _), *_ = table.rows()
    assert kind == "verb"
    assert 200 < len(first) == len(second) < MAX_LABELS_NBYTES


def test_another_process_reads_a_living_table_and_a_dead_one_s(tmp_path):
    program = (
        "import sys; from pathlib import Path; from hicache_prometheus.cells import Table\n"
        "table = Table(Path(sys.argv[1])); table.label(0, ('verb', 'b'))[4] += 9\n"
        "sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout.readline() == b"ready\n"
        (path,) = tmp_path.iterdir()
        assert path.name.startswith(f"{child.pid}-")
        assert read_file(path) == ([(("verb", "b"), counted(c4=9))], True)
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    assert read_file(path) == ([(("verb", "b"), counted(c4=9))], False)


def test_a_file_has_its_name_only_when_it_is_locked(tmp_path, monkeypatch):
    seen = []

    def flock(fd, how):
        seen.append([path.suffix for path in tmp_path.iterdir()])
        original(fd, how)

    original = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    table = Table(tmp_path)
    assert seen == [[".new"]]
    assert list(tmp_path.iterdir()) == [table.path]


@pytest.mark.parametrize("content", [b"", b"x" * 1024 * (ROWS + 1), b"HICACHE-CELLS-1\n"])
def test_a_file_that_is_no_table_is_refused(tmp_path, content):
    path = tmp_path / "1-1.cells"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no table of counters of this version"):
        read_file(path)


def test_a_disk_without_room_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(fd, offset, length):
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space"):
        Table(tmp_path)
    assert list(tmp_path.iterdir()) == []
