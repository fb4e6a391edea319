from __future__ import annotations

import json
import logging

import pytest

from hicache_prometheus.cells import SUFFIX, Table
from hicache_prometheus.folder import ENDED, Folder
from hicache_prometheus.snapshot import ABANDONED, BREAKERS, CACHE, CALLS, IDENTITY_FIELDS, LATE, VERB

LABELS = ("file", "ns", "kv", "get")
IDENTITY = tuple(f"a {name}" for name in IDENTITY_FIELDS)


def process(folder, calls: int) -> Table:
    table = Table(folder)
    table.label(0, (VERB, *LABELS))[CALLS] = calls
    cells = table.label(1, (CACHE, "file", "ns", *IDENTITY))
    cells[LATE], cells[ABANDONED], cells[BREAKERS["open"]] = calls, 1, 1
    return table


def seen(folder):
    snapshot = Folder(folder).snapshot()
    cells = snapshot.caches[("file", "ns")]
    return snapshot.verbs[LABELS][CALLS], cells[LATE], cells[ABANDONED], cells[BREAKERS["open"]]


def test_living_processes_add_up(tmp_path):
    tables = [process(tmp_path, 3), process(tmp_path, 4)]
    assert seen(tmp_path) == (7, 7, 2, 2)
    assert len(tables) == len(list(tmp_path.glob(f"*{SUFFIX}")))


def test_an_ended_process_s_counts_stay_its_file_and_its_state_do_not(tmp_path):
    living, ended = process(tmp_path, 3), process(tmp_path, 4)
    ended.leave_to_parent()
    for _ in range(3):
        assert seen(tmp_path) == (7, 7, 1, 1)
    assert list(tmp_path.glob(f"*{SUFFIX}")) == [living.path]
    assert Folder(tmp_path).snapshot().identities == {"ns": IDENTITY}


def test_who_dies_before_the_folded_file_is_gone_counts_nothing_twice(tmp_path, monkeypatch):
    ended = process(tmp_path, 4)
    content = ended.path.read_bytes()
    ended.leave_to_parent()
    assert seen(tmp_path)[0] == 4
    assert json.loads((tmp_path / ENDED).read_text())["folded"] == [ended.path.name]
    ended.path.write_bytes(content)
    assert seen(tmp_path)[0] == 4
    assert not ended.path.exists()
    assert json.loads((tmp_path / ENDED).read_text())["folded"] == []


def test_a_strange_file_is_named_and_left_alone(tmp_path, caplog):
    table = process(tmp_path, 3)
    strange = tmp_path / f"strange{SUFFIX}"
    strange.write_text("something else")
    with caplog.at_level(logging.WARNING, logger="hicache"):
        assert seen(tmp_path)[0] == 3
    assert str(strange) in caplog.text
    assert strange.exists()
    assert table.path.exists()


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(NotADirectoryError, match="is no folder; make it"):
        Folder(tmp_path / "missing")
