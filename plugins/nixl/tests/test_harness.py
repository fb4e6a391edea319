"""What `hicache check nixl` is told, and whether it does that."""

from __future__ import annotations

import pytest

from hicache_nixl.harness import FileHarness, NixlHarness


@pytest.mark.parametrize("kind", [str, lambda folder: [str(folder)]], ids=["text", "list"])
def test_the_named_folder_is_the_one_that_is_proved(tmp_path, kind):
    harness = NixlHarness({"folders": kind(tmp_path), "io": "uring"})
    assert isinstance(harness, FileHarness)
    harness.start()
    (made,) = tmp_path.iterdir()
    assert harness.options() == {"folders": [str(made)], "io": "uring"}
    harness.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_no_proof(nixl, tmp_path):
    assert NixlHarness({"folders": str(tmp_path)}).available() is None
    reason = NixlHarness({"folders": str(tmp_path / "none")}).available()
    assert reason is not None
    assert reason.startswith(f"making a folder in '{tmp_path}/none': No such file or directory.")
    several = NixlHarness({"folders": f"{tmp_path}:{tmp_path}/b"}).available()
    assert several == "several folders are given. Check one at a time."
    assert list(tmp_path.iterdir()) == []
