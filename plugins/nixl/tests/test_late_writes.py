"""No byte lands in a slot after its get has returned, however the transfer ended.

NIXL 1.5 asks the kernel to cancel what is left of a transfer of which one request failed, and tells of the
failure when the last has ended; 1.4.1 tells of it at once. Closing an agent waits for nothing under io_uring,
and under Linux AIO it waits with the interpreter lock held.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import nixl_slow_disk
import pytest
from nixl_builders import Slots, as_a_stranger, file_of, require

from hicache_core import Status
from hicache_nixl._native import Transfer
from hicache_nixl.filemoves import Mover
from hicache_nixl.lanes import WORTH_NBYTES, Lanes
from hicache_nixl.storage import HiCacheNixl

OK, ERROR = Status.OK, Status.ERROR
NBYTES = 64 << 10
#: Looks at a transfer after which one that tells of a failure early would have told of it.
MANY_LOOKS = 200
WAIT_S = 30.0
CALLER = "caller"

QUEUES = pytest.mark.parametrize(
    ("io", "direct"),
    [("aio", True), ("uring", True), ("uring", False)],
    ids=["aio", "uring", "uring, cached"],
)


@pytest.fixture
def disk(tmp_path):
    require(nixl_slow_disk.missing())
    (tmp_path / "pages").mkdir()
    with nixl_slow_disk.slow_disk(tmp_path / "mount", tmp_path / "pages") as mounted:
        yield mounted


@pytest.fixture
def looks(monkeypatch):
    """Count looks at running transfers; objects that other tests have abandoned are looked at elsewhere."""
    seen: list[Transfer] = []
    honest = Transfer.poll

    def poll(transfer: Transfer) -> bool:
        if threading.current_thread().name == CALLER:
            seen.append(transfer)
        return honest(transfer)

    monkeypatch.setattr(Transfer, "poll", poll)
    return seen


def read_through(
    monkeypatch, disk, tmp_path: Path, storage: HiCacheNixl, keys: list[str], hows: list[str]
) -> None:
    """Have the pages' files lie on the slow disk when they are read."""
    for name, key in enumerate(keys):
        (tmp_path / "pages" / str(name)).symlink_to(file_of(tmp_path / "kv", storage, key))
    honest = Mover.open

    def through(mover, batch, positions):
        pages = honest(mover, batch, positions)
        for position in pages:
            flags = os.O_RDONLY | (os.O_DIRECT if position in batch.direct else 0)
            descriptor = os.open(disk.path(hows[position], str(position)), flags)
            os.dup2(descriptor, batch.descriptors[position], inheritable=False)
            os.close(descriptor)
        return pages

    monkeypatch.setattr(Mover, "open", through)
    as_a_stranger(storage)


def read_by_name_through(
    monkeypatch, disk, tmp_path: Path, storage: HiCacheNixl, keys: list[str], hows: list[str]
) -> None:
    """Have what NIXL opens by name lie on the slow disk, until the files are looked at."""
    files = [file_of(tmp_path / "kv", storage, key) for key in keys]
    for name, (file, how) in enumerate(zip(files, hows, strict=True)):
        file.rename(tmp_path / "pages" / str(name))
        file.symlink_to(disk.path(how, str(name)))
    honest = Mover.open

    def restored(mover, batch, positions):
        for name, file in enumerate(files):
            if file.is_symlink():
                (tmp_path / "pages" / str(name)).rename(file)
        return honest(mover, batch, positions)

    monkeypatch.setattr(Mover, "open", restored)


def in_a_thread(verb: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []

    def work() -> None:
        try:
            results.append(verb())
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            results.append(type(error))

    caller = threading.Thread(target=work, name=CALLER)
    caller.start()
    return caller, results


def until(condition: Callable[[], bool], caller: threading.Thread) -> None:
    """Wait while the caller runs."""
    until_then = threading.Event()
    for _ in range(int(WAIT_S / 0.002)):
        if condition() or not caller.is_alive():
            return
        until_then.wait(0.002)
    raise AssertionError("the condition was never met")


def outlasted(disk, looks, get: Callable[[], object]) -> object:
    """Run a get of which three reads are held and one fails; see that it waits for the three."""
    looks.clear()
    caller, results = in_a_thread(get)
    until(lambda: disk.held() == 3, caller)
    until(lambda: len(looks) > MANY_LOOKS, caller)
    assert (disk.held(), caller.is_alive()) == (3, True), "the get went on while reads into its slots ran"
    assert len({id(transfer) for transfer in looks}) == 1
    assert disk.let_go() == 3
    caller.join(WAIT_S)
    (result,) = results
    return result


def interrupts_twice(monkeypatch, disk, looks, get: Callable[[], object]) -> None:
    """Interrupt a get whose two reads are held; see that it ends after they do."""
    looks.clear()
    interrupt = threading.Event()
    honest = Transfer.poll

    def interrupted(transfer):
        if interrupt.is_set() and threading.current_thread().name == CALLER:
            interrupt.clear()
            looks.clear()
            raise KeyboardInterrupt
        return honest(transfer)

    monkeypatch.setattr(Transfer, "poll", interrupted)
    caller, results = in_a_thread(get)
    until(lambda: disk.held() == 2, caller)
    for _ in range(2):  # who is impatient presses it twice
        interrupt.set()
        until(lambda: not interrupt.is_set() and len(looks) > MANY_LOOKS, caller)
    assert (disk.held(), caller.is_alive()) == (2, True), "the get returned while reads into its slots ran"
    assert disk.let_go() == 2
    caller.join(WAIT_S)
    assert results == [KeyboardInterrupt]


@QUEUES
def test_c11_a_get_of_which_one_page_fails_outlasts_the_reads_of_the_others(
    opened, tmp_path, monkeypatch, disk, looks, io, direct
):
    slots = Slots(8, NBYTES)
    storage = opened(slots.pool, io=io, direct_io=direct, lanes=1)
    keys = slots.stored(storage, "a", "b", "c", "d")
    read_through(monkeypatch, disk, tmp_path, storage, keys, ["held", "held", "broken", "held"])
    results = outlasted(disk, looks, lambda: storage.batch_get(keys, slots.pool.pages([4, 5, 6, 7])))
    assert results == [OK, OK, ERROR, OK]
    assert [slots[i + 4] == slots[i] for i in (0, 1, 3)] == [True] * 3


@QUEUES
def test_c11_an_interrupted_get_outlasts_its_reads(opened, tmp_path, monkeypatch, disk, looks, io, direct):
    """Ctrl-C comes while NIXL is looked at; slots are given back when nothing writes to them."""
    slots = Slots(4, NBYTES)
    storage = opened(slots.pool, io=io, direct_io=direct, lanes=1)
    keys = slots.stored(storage, "a", "b")
    read_through(monkeypatch, disk, tmp_path, storage, keys, ["held", "held"])
    interrupts_twice(monkeypatch, disk, looks, lambda: storage.batch_get(keys, slots.pool.pages([2, 3])))
    assert storage.batch_get(keys, slots.pool.pages([2, 3])) == [OK, OK]
    assert [slots[2] == slots[0], slots[3] == slots[1]] == [True, True]


def test_c11_a_get_by_name_outlasts_its_reads_and_reads_again_what_failed(
    opened, tmp_path, monkeypatch, disk, looks
):
    slots = Slots(8, NBYTES)
    storage = opened(slots.pool, io="uring", lanes=1)
    keys = slots.stored(storage, "a", "b", "c", "d")
    read_by_name_through(monkeypatch, disk, tmp_path, storage, keys, ["held", "held", "broken", "held"])
    results = outlasted(disk, looks, lambda: storage.batch_get(keys, slots.pool.pages([4, 5, 6, 7])))
    assert results == [OK, OK, OK, OK]
    assert [slots[i + 4] == slots[i] for i in range(4)] == [True] * 4


def test_c11_an_interrupted_get_by_name_outlasts_its_reads(opened, tmp_path, monkeypatch, disk, looks):
    slots = Slots(4, NBYTES)
    storage = opened(slots.pool, io="uring", lanes=1)
    keys = slots.stored(storage, "a", "b")
    read_by_name_through(monkeypatch, disk, tmp_path, storage, keys, ["held", "held"])
    interrupts_twice(monkeypatch, disk, looks, lambda: storage.batch_get(keys, slots.pool.pages([2, 3])))
    assert as_a_stranger(storage).batch_get(keys, slots.pool.pages([2, 3])) == [OK, OK]
    assert [slots[2] == slots[0], slots[3] == slots[1]] == [True, True]


def test_c11_an_interrupted_caller_outlasts_the_helper(monkeypatch):
    lanes = Lanes(2)
    helping, release, interrupts = threading.Event(), threading.Event(), []
    honest = lanes._done

    class Interrupted:
        def put(self, what):
            honest.put(what)

        def get(self):
            if len(interrupts) < 2:
                interrupts.append(1)
                raise KeyboardInterrupt
            return honest.get()

    def drain(chunks):
        if threading.current_thread().name == "hicache-nixl-lane":
            helping.set()
            release.wait(WAIT_S)
        drawn.extend(chunks)

    drawn: list[int] = []
    monkeypatch.setattr(lanes, "_done", Interrupted())
    caller, results = in_a_thread(lambda: lanes.share([1, 2], drain, WORTH_NBYTES))
    try:
        until(lambda: helping.is_set() and len(interrupts) == 2, caller)
        assert caller.is_alive(), "the call returned while the helper moved pages of it"
        release.set()
        caller.join(WAIT_S)
        assert results == [KeyboardInterrupt]
        drawn.clear()
        lanes.share([3, 4, 5], drain, WORTH_NBYTES)
        assert sorted(drawn) == [3, 4, 5]
    finally:
        release.set()
        lanes.close()
