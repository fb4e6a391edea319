"""A process that dies between any two system calls of a verb, for every verb that changes files."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hicache_core import Status
from hicache_file._evict import Evictor

pytestmark = pytest.mark.timeout(600)

OK, MISS, CORRUPT = Status.OK, Status.MISS, Status.CORRUPT
#: System calls that change something on disk, as the modules call them.
CALLS = ("pwrite", "pwritev", "rename", "unlink", "ftruncate", "posix_fallocate", "open", "mkdir")
CAPACITY = 1 << 20


def root_nbytes(root: str) -> int:
    """Sum up the store's own files."""
    return sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())


def dies_at(number: int, prepare: Callable[[], Any], act: Callable[[Any], None], *, within: str = "") -> bool:
    """Act in a child that kills itself before its n-th changing system call; False when it came through.

    ``within`` names a method of Evictor: only calls inside it count.
    """
    pid = os.fork()
    if pid == 0:
        try:
            prepared = prepare()
            left, armed = [number], [not within]
            if within:
                watch(within, armed)

            def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
                def call(*given: Any, **named: Any) -> Any:
                    if armed[0] and not left[0]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left[0] -= armed[0]
                    return real(*given, **named)

                return call

            for name in CALLS:
                setattr(os, name, deadly(getattr(os, name)))
            act(prepared)
        except BaseException:  # noqa: BLE001 - the parent asks for the exit status
            os._exit(7)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def watch(method: str, armed: list[bool]) -> None:
    """Arm the countdown while a method of the evictor runs."""
    real = getattr(Evictor, method)

    def watched(*given: Any, **named: Any) -> Any:
        armed[0] = True
        try:
            return real(*given, **named)
        finally:
            armed[0] = False

    setattr(Evictor, method, watched)


class Case:
    """A root with eight pages that were used and eight that were not, before the verb."""

    def __init__(self, make: Callable[..., Any], child: ModuleType, root: str, **options: Any) -> None:
        self.make, self.child, self.root, self.options = make, child, root, options
        self.used = child.keys_of("used", 0, 8)
        self.idle = child.keys_of("idle", 0, 8)
        store = make(**options)
        assert store.set(self.used) == [OK] * 8
        assert store.set(self.idle) == [OK] * 8
        assert store.get(self.used) == [OK] * 8
        store.close()

    def opened(self) -> Any:
        return self.child.Store(self.root, **self.options)

    def check(
        self, *, kept: list[str], gone: list[str] = (), allowed: frozenset[Status] = frozenset((OK, MISS))
    ) -> None:  # type: ignore[assignment]
        store = self.make(**self.options)
        everything = [*self.used, *self.idle]
        if kept:
            assert store.get(kept) == [OK] * len(kept)
        if gone:
            assert store.get(gone) == [MISS] * len(gone)
        assert set(store.get(everything)) <= allowed
        fresh = self.child.keys_of("fresh", 0, 8)
        assert store.set(fresh) == [OK] * 8
        assert store.get(fresh) == [OK] * 8
        assert store.storage.usage().store_bytes == root_nbytes(self.root)
        store.close()
        names = [path.name for path in Path(self.root).rglob("*.*") if path.suffix in (".seg", ".idx")]
        assert {n[:-4] for n in names if n.endswith("seg")} == {n[:-4] for n in names if n.endswith("idx")}
        assert not list(Path(self.root).rglob("*.new"))


@pytest.fixture
def case(make: Callable[..., Any], child: ModuleType, root: str) -> Callable[..., Case]:
    made = [0]

    def make_case(**options: Any) -> Case:
        made[0] += 1
        where = f"{root}-{made[0]}"
        return Case(lambda **given: make(root=where, **given), child, where, **options)

    return make_case


def step_through(
    case: Callable[..., Case],
    act: Callable[[Case, Any], None],
    check: Callable[[Case, bool], None],
    **options: Any,
) -> int:
    """Let the verb die before its first changing call, its second, and so on, on a fresh root each time."""
    number = 0
    while True:
        one = case(**options)
        died = dies_at(number, one.opened, lambda store, one=one: act(one, store))  # type: ignore[misc]
        check(one, died)
        if not died:
            return number
        number += 1


@pytest.mark.slow
@pytest.mark.clause("C14")
def test_c14_a_set_that_dies_anywhere_loses_nothing_promised(case: Callable[..., Case]) -> None:
    new = ["new"]

    def act(one: Case, store: Any) -> None:
        store.set(one.child.keys_of(new[0], 0, 8))

    calls = step_through(case, act, lambda one, died: one.check(kept=[*one.used, *one.idle]), lanes=1)
    assert calls > 8


@pytest.mark.slow
@pytest.mark.clause("C15")
def test_c15_an_evictor_that_dies_anywhere_leaves_a_working_root(case: Callable[..., Case]) -> None:
    def act(one: Case, store: Any) -> None:
        for batch in range(7):
            assert store.set(one.child.keys_of("flood", batch, 8)) == [OK] * 8

    number, died = 0, True
    while died:
        one = case(lanes=1, capacity=CAPACITY)
        died = dies_at(number, one.opened, lambda store, one=one: act(one, store), within="_evict")  # type: ignore[misc]
        if not died:
            store = one.make(**one.options)
            assert store.contains(one.used).count(OK) >= 4
            assert store.contains(one.idle).count(OK) < 4
            store.close()
        one.check(kept=[])
        number += 1
    assert number > 20


@pytest.mark.slow
@pytest.mark.clause("C9")
def test_c9_a_clearer_that_dies_anywhere_has_cleared_all_or_nothing(case: Callable[..., Case]) -> None:
    def act(one: Case, store: Any) -> None:
        store.storage.clear()

    def check(one: Case, died: bool) -> None:
        store = one.make(**one.options)
        seen = store.get([*one.used, *one.idle])
        assert seen in ([OK] * 16, [MISS] * 16)
        store.close()
        one.check(kept=[], gone=[] if died else [*one.used, *one.idle])

    assert step_through(case, act, check, lanes=1) > 4


@pytest.mark.slow
def test_a_remove_that_dies_anywhere_has_removed_each_page_or_not(case: Callable[..., Case]) -> None:
    def act(one: Case, store: Any) -> None:
        store.storage.batch_remove(one.idle[:3])

    def check(one: Case, died: bool) -> None:
        one.check(kept=[*one.used, *one.idle[3:]], gone=[] if died else one.idle[:3])

    assert step_through(case, act, check, lanes=1) >= 4


@pytest.mark.slow
@pytest.mark.clause("C12")
def test_c12_a_close_that_dies_anywhere_loses_nothing(case: Callable[..., Case]) -> None:
    def act(one: Case, store: Any) -> None:
        store.close()

    def check(one: Case, died: bool) -> None:
        one.check(kept=[*one.used, *one.idle, *one.child.keys_of("more", 0, 8)])

    number = 0
    while True:
        one = case(lanes=1)

        def prepare(one: Case = one) -> Any:
            store = one.opened()
            assert store.set(one.child.keys_of("more", 0, 8)) == [OK] * 8
            return store

        died = dies_at(number, prepare, lambda store, one=one: act(one, store))  # type: ignore[misc]
        check(one, died)
        if not died:
            break
        number += 1
    assert number >= 4


@pytest.mark.slow
@pytest.mark.clause("C14")
def test_c14_an_open_that_dies_anywhere_leaves_a_root_that_opens(case: Callable[..., Case]) -> None:
    def prepare() -> None:
        return None

    for half in (False, True):
        number = 0
        while True:
            one = case(lanes=1)
            if half:  # a namespace that does not exist yet
                one.options["tenant"] = "another"
                one.used, one.idle = [], []
            died = dies_at(number, prepare, lambda _, one=one: one.opened().close())  # type: ignore[misc]
            one.check(kept=[*one.used, *one.idle])
            if not died:
                break
            number += 1
        assert number >= 3
