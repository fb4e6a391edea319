"""What the doctor finds: a root, room, the metadata, usrbio, each with its remedy."""

from __future__ import annotations

import pytest
from hf3fs_builders import NBYTES, Opener, an_arena, free_port

from hicache_hf3fs.doctor import checks
from hicache_hf3fs.harness import Hf3fsHarness
from hicache_hf3fs.options import Hf3fsOptions


def rows(**options) -> dict[str, tuple[bool | None, str, str]]:
    given = {"file_size": 64 * NBYTES} | options
    return {name: (ok, found, remedy) for name, ok, found, remedy in checks(Hf3fsOptions(**given))}


def test_a_healthy_root_with_local_metadata(tmp_path):
    found = rows(root=str(tmp_path / "root"))
    assert {name: ok for name, (ok, _, _) in found.items()} == {"root": True, "room": True, "metadata": True}
    assert "to be made" in found["root"][1]
    assert list(tmp_path.iterdir()) == [], "a doctor changes nothing"


def test_a_page_file_that_does_not_fit(tmp_path):
    ok, found, remedy = rows(root=str(tmp_path), file_size=1 << 60)["room"]
    assert (ok, "a page file does not fit" in found, remedy) == (
        False,
        True,
        "Make room, or lower file_size.",
    )


def test_a_server_that_answers_and_one_that_does_not(tmp_path, server: Hf3fsHarness):
    ok, found, _ = rows(root=str(tmp_path), metadata_url=server.options()["metadata_url"])["metadata"]
    assert (ok, "answers in" in found) == (True, True)
    ok, found, remedy = rows(root=str(tmp_path), metadata_url=f"http://127.0.0.1:{free_port()}")["metadata"]
    assert (ok, "cannot be reached" in found) == (False, True)
    assert "Start hicache-hf3fs-metadata" in remedy


@pytest.mark.parametrize("on_3fs", [True, False])
def test_usrbio_on_and_off_a_mount(tmp_path, on_3fs):
    opener = Opener(tmp_path)
    if on_3fs:
        opener.options(client="usrbio")
    found = rows(
        root=str(tmp_path), client="usrbio", usrbio_module="hicache_hf3fs.usrbio_double", memory=1 << 20
    )
    assert (found["usrbio module"][0], found["3FS mount"][0], found["shared memory"][0]) == (
        True,
        on_3fs,
        True,
    )
    assert on_3fs or "set client=posix" in found["3FS mount"][2]


def test_a_usrbio_module_that_is_not_built(tmp_path):
    ok, _, remedy = rows(root=str(tmp_path), client="usrbio", usrbio_module="hf3fs_absent")["usrbio module"]
    assert (ok, "github.com/deepseek-ai/3FS" in remedy) == (False, True)


def test_more_shared_memory_than_there_is(tmp_path):
    ok, found, remedy = rows(root=str(tmp_path), client="usrbio", memory=1 << 50)["shared memory"]
    assert (ok, "no room for the rings" in found, "--shm-size" in remedy) == (False, True, True)


@pytest.mark.parametrize("metadata", ["local", "server"])
def test_page_files_of_another_database_are_remarked_on(tmp_path, server: Hf3fsHarness, metadata):
    opener, arena = Opener(tmp_path), an_arena(1)
    theirs, ours = (
        {"metadata_path": str(tmp_path / "a.sqlite")},
        {"metadata_path": str(tmp_path / "b.sqlite")},
    )
    if metadata == "server":
        ours = {"metadata_url": server.options()["metadata_url"]}
    opener(arena, **theirs).close()
    assert "page files" not in rows(root=str(tmp_path), **theirs)
    before = sorted(path.name for path in tmp_path.iterdir())
    ok, found, _ = rows(root=str(tmp_path), **ours)["page files"]
    assert (ok, f"{arena.component.key}.pages of " in found) == (None, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before, "a doctor changes nothing"
