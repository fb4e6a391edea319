"""Files that somebody else has damaged: misses and CORRUPT, never wrong bytes, never an exception."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hicache_core import Status
from hicache_core.errors import BackendIncompatible

OK, MISS, CORRUPT = Status.OK, Status.MISS, Status.CORRUPT
COUNT = 8


@pytest.fixture
def filled(make: Callable[..., Any], child: ModuleType, root: str) -> tuple[list[str], Path]:
    """A closed root of eight pages in one segment."""
    store = make(lanes=1)
    keys = child.keys_of("k", 0, COUNT)
    assert store.set(keys) == [OK] * COUNT
    store.close()
    return keys, Path(root) / store.namespace.id


def only(folder: Path, ending: str) -> Path:
    (path,) = folder.glob(f"*.{ending}")
    return path


def flip(path: Path, offset: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


@pytest.mark.clause("C5")
def test_c5_one_flipped_bit_is_corrupt_and_leaves_the_others(
    filled: tuple[list[str], Path], make: Callable[..., Any]
) -> None:
    keys, folder = filled
    flip(only(folder, "seg"), 3 * 16384 + 77)
    store = make()
    assert store.contains(keys) == [OK] * COUNT
    assert store.get(keys) == [OK, OK, OK, CORRUPT, OK, OK, OK, OK]
    assert store.contains(keys) == [OK, OK, OK, CORRUPT, OK, OK, OK, OK]
    assert make().contains(keys)[3] is CORRUPT


@pytest.mark.clause("C5")
def test_c5_without_checksums_a_flip_is_not_promised_to_be_seen(make: Callable[..., Any]) -> None:
    assert make(checksum=False).storage.capabilities.checksum is False
    assert make(root=make(checksum=False).storage.options.root).storage.capabilities.checksum is True


@pytest.mark.clause("C4")
def test_c4_a_corrupt_page_is_replaced_for_every_instance_and_later_ones(
    filled: tuple[list[str], Path], make: Callable[..., Any]
) -> None:
    keys, folder = filled
    flip(only(folder, "seg"), 5)
    store, other = make(), make()
    assert store.get(keys[:1]) == [CORRUPT]
    assert other.contains(keys[:1]) == [CORRUPT]
    assert store.set(keys[:1]) == [OK]
    assert [s.get(keys) for s in (store, other, make())] == [[OK] * COUNT] * 3


@pytest.mark.parametrize("kept", [0, 1, 16383, 16384, 16384 * 3 + 1])
def test_a_truncated_segment_loses_what_it_lost(
    filled: tuple[list[str], Path], make: Callable[..., Any], kept: int
) -> None:
    keys, folder = filled
    os.truncate(only(folder, "seg"), kept)
    store = make()
    whole = kept // 16384
    seen = store.get(keys)
    assert seen[:whole] == [OK] * whole
    assert set(seen[whole:]) <= {MISS, CORRUPT}
    assert store.set(keys) == [OK] * COUNT
    assert store.get(keys) == [OK] * COUNT


@pytest.mark.parametrize("kept", [0, 7, 127, 128, 1000, 128 + 2 * 16384 + 64 * 3 + 5])
def test_a_truncated_journal_loses_the_rest(
    filled: tuple[list[str], Path], make: Callable[..., Any], kept: int
) -> None:
    keys, folder = filled
    os.truncate(only(folder, "idx"), kept)
    store = make()
    whole = max(0, (kept - 128 - 2 * 16384) // 64)
    assert store.get(keys) == [OK] * whole + [MISS] * (COUNT - whole)
    assert store.set(keys) == [OK] * COUNT
    assert store.get(keys) == [OK] * COUNT


@pytest.mark.parametrize("ending", ["seg", "idx"])
def test_a_truncated_file_of_an_open_instance_is_no_signal_and_no_wrong_byte(
    filled: tuple[list[str], Path], make: Callable[..., Any], ending: str
) -> None:
    keys, folder = filled
    store = make(capacity="1gib")
    assert store.get(keys) == [OK] * COUNT
    os.truncate(only(folder, ending), 100)
    assert set(store.get(keys)) <= {MISS, CORRUPT}
    store.storage.touch(keys)
    assert store.set(keys) == [OK] * COUNT
    assert store.get(keys) == [OK] * COUNT


@pytest.mark.parametrize("how", ["truncate", "zero", "flip", "remove"])
@pytest.mark.parametrize("name", ["epoch", "hicache.root"])
def test_a_damaged_control_file_of_open_instances_loses_pages_at_most(
    make: Callable[..., Any], child: ModuleType, root: str, name: str, how: str
) -> None:
    store, other = make(), make()
    keys = child.keys_of("k", 0, COUNT)
    store.set(keys)
    path = Path(root) / name if name == "hicache.root" else Path(root) / store.namespace.id / name
    size = path.stat().st_size
    if how == "truncate":
        os.truncate(path, 30)
    elif how == "zero":
        path.write_bytes(bytes(size))
    elif how == "remove":
        path.unlink()
    else:
        for offset in (10, 66, 90):
            flip(path, offset)
    for each in (store, other, make()):
        assert set(each.get(keys)) <= {OK, MISS}
    for each in (store, other, make()):
        assert each.set(keys) == [OK] * COUNT
        assert each.get(keys) == [OK] * COUNT


def test_foreign_files_are_left_alone(
    filled: tuple[list[str], Path], make: Callable[..., Any], root: str
) -> None:
    keys, folder = filled
    foreign = {
        Path(root) / "README": b"mine",
        Path(root) / "lost+found" / "x.seg": b"mine",
        folder / "notes.txt": b"mine",
        folder / "short.idx": b"mine",
        folder / (("z" * 32) + ".idx"): b"mine",
        folder / (("a" * 31) + ".seg"): b"mine",
    }
    for path, content in foreign.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    store = make(capacity="1gib")
    assert store.get(keys) == [OK] * COUNT
    assert store.storage.clear() == COUNT
    assert {path: path.read_bytes() for path in foreign} == foreign


def test_a_segment_under_another_name_is_ignored(
    filled: tuple[list[str], Path], make: Callable[..., Any]
) -> None:
    keys, folder = filled
    for ending in ("seg", "idx"):
        shutil.copy(only(folder, ending), folder / ("00" * 16 + f".{ending}"))
    os.truncate(next(p for p in folder.glob("*.seg") if not p.name.startswith("0000")), 64)
    assert set(make().get(keys)) <= {MISS, CORRUPT}


@pytest.mark.parametrize("checksum", [True, False], ids=["checksums", "no checksums"])
def test_two_swapped_segments_give_no_wrong_byte(
    make: Callable[..., Any], child: ModuleType, root: str, checksum: bool
) -> None:
    for number in range(2):
        store = make(lanes=1, checksum=checksum)
        store.set(child.keys_of("k", number, COUNT))
        store.close()
    one, two = sorted((Path(root) / store.namespace.id).glob("*.seg"))
    one.rename(root + ".held")
    two.rename(one)
    Path(root + ".held").rename(two)
    store = make(checksum=checksum)
    seen = [status for n in range(2) for status in store.get(child.keys_of("k", n, COUNT))]
    assert set(seen) == {CORRUPT if checksum else MISS}


def test_an_unknown_version_is_refused_with_the_remedy_and_nothing_is_written(
    filled: tuple[list[str], Path], make: Callable[..., Any], root: str
) -> None:
    _, folder = filled
    journal = only(folder, "idx")
    with journal.open("r+b") as file:
        file.seek(8)
        file.write((7 | (7 ^ 0xFFFF) << 16).to_bytes(4, "little"))
    before = {path: path.read_bytes() for path in Path(root).rglob("*") if path.is_file()}
    with pytest.raises(BackendIncompatible) as refused:
        make()
    assert "format version 7, this code knows 1" in str(refused.value)
    assert "Update hicache-file, or name another root." in str(refused.value)
    assert {p: p.read_bytes() for p in before if p.name != "hicache.root"} == {
        p: content for p, content in before.items() if p.name != "hicache.root"
    }


@pytest.mark.parametrize("seed", range(12))
def test_random_damage_anywhere_gives_no_wrong_byte_and_no_exception(
    make: Callable[..., Any], child: ModuleType, root: str, seed: int
) -> None:
    rng = random.Random(seed)
    store = make(lanes=1, segment_size="64kib")
    keys = child.keys_of("k", 0, 32)
    store.set(keys)
    running = make()
    assert running.get(keys) == [OK] * 32
    files = [path for path in Path(root).rglob("*") if path.is_file() and path.name != "manifest.json"]
    for _ in range(6):
        path = rng.choice(files)
        size = path.stat().st_size
        how = rng.randrange(4)
        if how == 0:
            os.truncate(path, rng.randrange(size + 1))
        elif how == 1 and size:
            flip(path, rng.randrange(size), 1 << rng.randrange(8))
        elif how == 2 and size:
            with path.open("r+b") as file:
                file.seek(rng.randrange(size))
                file.write(bytes(rng.randrange(1, 5000)))
        elif how == 3 and size:
            with path.open("r+b") as file:
                file.seek(rng.randrange(size))
                file.write(rng.randbytes(rng.randrange(1, 200)))
    allowed = {OK, MISS, CORRUPT}
    for each in (running, store, make(), running):
        assert set(each.get(keys)) <= allowed
        assert set(each.contains(keys)) <= allowed
    for each in (running, make()):
        assert set(each.set(keys)) == {OK}
        assert each.get(keys) == [OK] * 32
