"""Which file systems count as a network: the same answer for every backend that keeps files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_core import mounts
from hicache_core.mounts import file_system_of, is_network


def a_table(folder: Path) -> str:
    table = folder / "mountinfo"
    escaped = str(folder / "a mount \u00e9").replace(" ", "\\040")
    table.write_text(
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        f"30 22 0:40 / {escaped} rw,nosuid - fuse.hf3fs hf3fs rw\n"
        f"31 22 0:41 / {escaped}x rw - nfs4 server:/ rw\n"
        f"32 22 0:42 / {folder}/twice rw - nfs4 server:/ rw\n"
        f"33 22 0:43 / {folder}/twice rw - xfs /dev/vdb rw\n",
        encoding="utf-8",
    )
    return str(table)


@pytest.mark.parametrize(
    ("inside", "kind"),
    [
        ("a mount \u00e9/folder", "fuse.hf3fs"),
        ("a mount \u00e9", "fuse.hf3fs"),
        ("a mount \u00e9x", "nfs4"),
        ("elsewhere", "ext4"),
        ("twice", "xfs"),
    ],
    ids=[
        "below a mount with odd letters",
        "the mount itself",
        "a neighbour that begins alike",
        "none",
        "the later one",
    ],
)
def test_the_kind_is_that_of_the_longest_and_latest_mount(tmp_path: Path, inside: str, kind: str) -> None:
    assert file_system_of(str(tmp_path / inside), a_table(tmp_path)) == kind


def test_the_kind_is_empty_where_it_cannot_be_told(tmp_path: Path) -> None:
    assert file_system_of(str(tmp_path), str(tmp_path / "absent")) == ""
    (tmp_path / "odd").write_text("nonsense\n")
    assert file_system_of(str(tmp_path), str(tmp_path / "odd")) == ""


@pytest.mark.parametrize(
    ("kind", "network"),
    [
        ("ext4", False),
        ("tmpfs", False),
        ("overlay", False),
        ("nfs4", True),
        ("fuse.x", True),
        ("newfs", True),
        ("", True),
    ],
)
def test_c11_what_is_not_known_to_be_local_is_a_network(
    kind: str, network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "file_system_of", lambda path: kind)
    assert is_network("/anywhere") is network


def test_this_machine_s_temporary_folder_is_local(tmp_path: Path) -> None:
    assert is_network(str(tmp_path)) is False
