"""What the machine may refuse: descriptors, disk, permissions; and what a root must not lead to."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hicache_core import BackendUnavailable, Status, StorageClosed
from hicache_core.errors import InvalidOptions

OK, MISS, NO_SPACE, DENIED = Status.OK, Status.MISS, Status.NO_SPACE, Status.DENIED


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int], None]]:
    """Lower the limit to so many above what is open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def lower(above: int) -> None:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + above, before[1]))

    yield lower
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_more_segments_than_descriptors(
    make: Callable[..., Any], child: ModuleType, few_descriptors: Callable[[int], None]
) -> None:
    store = make(segment_size="64kib")
    batches = [child.keys_of("k", n, 16) for n in range(40)]
    for keys in batches:
        assert store.set(keys) == [OK] * 16
    store.close()
    store = make(segment_size="64kib")
    few_descriptors(24)
    for keys in batches:
        assert store.get(keys) == [OK] * 16


def test_kept_descriptors_are_bounded(make: Callable[..., Any], child: ModuleType, no_leaks: None) -> None:
    store = make(segment_size="64kib", max_open_segments=8)
    before = descriptors()
    for n in range(40):
        keys = child.keys_of("k", n, 16)
        assert store.set(keys) == [OK] * 16
        assert store.get(keys) == [OK] * 16
    assert descriptors() - before <= 2 * (8 + 2)
    store.close()


@pytest.mark.clause("C12")
def test_c12_close_gives_back_every_descriptor_and_thread(
    make: Callable[..., Any], child: ModuleType
) -> None:
    import threading

    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        store = make(nbytes=1 << 18, slots=8)
        keys = child.keys_of("k", 0, 8, 1 << 18)
        assert store.set(keys) == [OK] * 8
        assert store.get(keys) == [OK] * 8
        store.close()
        store.close()
    assert (descriptors(), threading.active_count()) == (before, threads)


def test_a_failed_open_gives_back_every_descriptor(tmp_path: Path, make: Callable[..., Any]) -> None:
    before = descriptors()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidOptions):
        make(root=str(tmp_path / "file"))
    with pytest.raises(InvalidOptions):
        make(capacity="100kib")
    assert descriptors() == before


@pytest.mark.clause("C12")
def test_c12_the_child_of_a_fork_is_closed_and_holds_no_lock(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    store = make(lanes=1)
    keys = child.keys_of("k", 0, 4)
    assert store.set(keys) == [OK] * 4
    go, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            try:
                store.storage.batch_contains(keys)
            except StorageClosed:
                listed = subprocess.run(
                    ["ls", "-l", f"/proc/{os.getpid()}/fd"], capture_output=True, text=True
                )
                code = 2 if root in listed.stdout else 0
        finally:
            os.write(done[1], b".")
            os.read(go[0], 1)
            os._exit(code)
    os.read(done[0], 1)
    try:
        assert store.get(keys) == [OK] * 4
        store.close()
        # The child still runs: were the flock still held by it, this open would leave the tail.
        again = make()
        assert sum(p.stat().st_size for p in Path(root).rglob("*.seg")) < 1 << 20
        assert again.get(keys) == [OK] * 4
    finally:
        os.write(go[1], b".")
        _, status = os.waitpid(pid, 0)
        for fd in (*go, *done):
            os.close(fd)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_full_disk_is_no_space_keeps_what_it_had_and_works_again(
    small_disk: Callable[[int], str], make: Callable[..., Any], child: ModuleType
) -> None:
    disk = small_disk(6 << 20)
    ballast = Path(disk) / "ballast"
    ballast.write_bytes(bytes(3 << 20))
    store = make(root=f"{disk}/root", slots=16)
    kept: list[str] = []
    refused: list[str] = []
    for n in range(40):
        keys = child.keys_of("k", n, 16)
        for key, status in zip(keys, store.set(keys), strict=True):
            (kept if status is OK else refused).append(key)
            assert status in (OK, NO_SPACE)
    assert len(kept) > 64
    assert len(refused) > 64
    for start in range(0, len(kept), 16):
        assert store.get(kept[start : start + 16]) == [OK] * len(kept[start : start + 16])
    assert set(store.contains(refused)) == {MISS}
    ballast.unlink()
    assert store.set(refused[:16]) == [OK] * 16
    assert store.get(refused[:16]) == [OK] * 16
    again = make(root=f"{disk}/root", slots=16)
    assert again.get(kept[:16]) == [OK] * 16


def test_a_disk_too_full_to_open_is_a_typed_error(
    small_disk: Callable[[int], str], make: Callable[..., Any]
) -> None:
    disk = small_disk(1 << 20)
    (Path(disk) / "ballast").write_bytes(bytes((1 << 20) - 4096))
    with pytest.raises(BackendUnavailable, match="No space left"):
        make(root=f"{disk}/root")


def test_an_unwritable_root_is_an_error_that_names_path_and_user(
    make: Callable[..., Any],
    child: ModuleType,
    tmp_path: Path,
    as_nobody: Callable[[Callable[[], None]], None],
) -> None:
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents:
        if os.stat(parent).st_uid == os.geteuid() and str(parent).startswith("/tmp/"):
            os.chmod(parent, 0o755)
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o755)

    def work() -> None:
        with pytest.raises(BackendUnavailable) as refused:
            make(root=str(folder / "root"))
        text = str(refused.value)
        assert f"'{folder}/root' cannot be written by user" in text
        assert "65534" in text or os.geteuid() == os.stat(folder).st_uid
        assert "read_only" in text

    if os.geteuid() != 0:
        folder.chmod(0o555)
    as_nobody(work)


def test_a_read_only_root_is_read_with_read_only(
    make: Callable[..., Any],
    child: ModuleType,
    tmp_path: Path,
    as_nobody: Callable[[Callable[[], None]], None],
) -> None:
    for parent in [tmp_path, *tmp_path.parents]:
        if os.stat(parent).st_uid == os.geteuid() and str(parent).startswith("/tmp/"):
            os.chmod(parent, 0o755)
    root = tmp_path / "root"
    store = make(root=str(root))
    keys = child.keys_of("k", 0, 4)
    assert store.set(keys) == [OK] * 4
    store.close()
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)

    def work() -> None:
        reader = make(root=str(root), read_only=True)
        assert reader.get(keys) == [OK] * 4
        assert reader.set(child.keys_of("new", 0, 2)) == [DENIED] * 2
        reader.close()
        with pytest.raises(BackendUnavailable, match="cannot be written by user"):
            make(root=str(root))

    as_nobody(work)


def test_permissions_lost_while_open_are_a_status(
    make: Callable[..., Any],
    child: ModuleType,
    tmp_path: Path,
    as_nobody: Callable[[Callable[[], None]], None],
) -> None:
    for parent in [tmp_path, *tmp_path.parents]:
        if os.stat(parent).st_uid == os.geteuid() and str(parent).startswith("/tmp/"):
            os.chmod(parent, 0o755)
    home = tmp_path / "home"
    home.mkdir()
    if os.geteuid() == 0:
        os.chown(home, 65534, 65534)

    def work() -> None:
        store = make(root=str(home / "root"), lanes=1, segment_size="64kib")
        keys = child.keys_of("k", 0, 3)
        assert store.set(keys) == [OK] * 3
        folder = home / "root" / store.namespace.id
        folder.chmod(0o555)
        try:
            more = child.keys_of("more", 0, 8)
            seen = store.set(more)
            assert set(seen) <= {OK, DENIED}
            assert DENIED in seen
            assert store.get(keys) == [OK] * 3
        finally:
            folder.chmod(0o755)
        assert store.set(more) == [OK] * 8
        store.close()

    as_nobody(work)


def test_files_are_private(make: Callable[..., Any], child: ModuleType, root: str) -> None:
    store = make()
    store.set(child.keys_of("k", 0, 4))
    modes = {oct(path.stat().st_mode & 0o777) for path in Path(root).rglob("*") if path.is_file()}
    folders = {
        oct(path.stat().st_mode & 0o777) for path in [Path(root), *Path(root).iterdir()] if path.is_dir()
    }
    assert (modes, folders) == ({"0o600"}, {"0o700"})


@pytest.mark.parametrize("what", ["namespace", "epoch", "hicache.root", "segment", "fifo"])
def test_links_are_not_followed(
    make: Callable[..., Any], child: ModuleType, root: str, tmp_path: Path, what: str
) -> None:
    store = make(lanes=1)
    keys = child.keys_of("k", 0, 4)
    store.set(keys)
    store.close()
    folder = Path(root) / store.namespace.id
    outside = tmp_path / "outside"
    if what == "namespace":
        folder.rename(outside)
        folder.symlink_to(outside, target_is_directory=True)
    elif what == "fifo":
        (path,) = folder.glob("*.seg")
        path.unlink()
        os.mkfifo(path)
    else:
        path = {
            "epoch": folder / "epoch",
            "hicache.root": Path(root) / "hicache.root",
            "segment": next(folder.glob("*.seg")),
        }[what]
        path.rename(outside)
        path.symlink_to(outside)
    before = {p: p.read_bytes() for p in tmp_path.glob("outside*") if p.is_file()}
    try:
        again = make()
    except BackendUnavailable:
        pass
    else:
        assert again.get(keys) == [MISS] * 4
        assert again.set(keys) == [OK] * 4
    assert {p: p.read_bytes() for p in before} == before


def test_a_root_in_dots_is_resolved_once(make: Callable[..., Any], child: ModuleType, root: str) -> None:
    store = make(root=f"{root}/a/../b")
    assert store.storage.options.root == f"{root}/b"
    store.set(child.keys_of("k", 0, 1))
    assert sorted(p.name for p in Path(root).iterdir()) == ["b"]


def test_a_root_removed_while_open_is_a_status_and_not_an_exception(
    make: Callable[..., Any], child: ModuleType, root: str
) -> None:
    store = make(lanes=1, segment_size="64kib")
    keys = child.keys_of("k", 0, 3)
    store.set(keys)
    subprocess.run(["rm", "-rf", root], check=True)
    for n in range(4):
        assert set(store.set(child.keys_of("more", n, 8))) <= {OK, Status.UNAVAILABLE}
    assert Status.UNAVAILABLE in store.set(child.keys_of("more", 9, 8))
    assert set(store.get(keys)) <= {OK, MISS, Status.UNAVAILABLE}
    store.close()
