"""Ctrl-C in the middle of a verb (C2, C11), and threads that cannot be had."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from hicache_core import Status
from hicache_file import _reader, _sealing, _writer
from hicache_file._catalog import Catalog

OK, MISS = Status.OK, Status.MISS
NBYTES = 65536
#: Two lanes share a batch of this many pages.
MANY = 16


class Held:
    """Stands in for a call of two threads: the helper's stays inside while the main thread is interrupted."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real = real
        self.inside = threading.Event()
        self.waiting = threading.Event()
        self.left = threading.Event()
        self.outlasted: list[bool] = []

    def __call__(self, *arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            assert self.inside.wait(10)
            done = self.real(*arguments)
            self.waiting.set()
            return done
        if not self.inside.is_set():
            self.inside.set()
            assert self.waiting.wait(10)
            for _ in range(2):
                self.left.wait(0.1)  # until the main thread waits for this one
                if not self.left.is_set():
                    main = threading.main_thread().ident
                    assert main is not None
                    signal.pthread_kill(main, signal.SIGINT)
            self.outlasted.append(not self.left.wait(0.1))
        return self.real(*arguments)


@pytest.mark.clause("C2", "C11")
@pytest.mark.parametrize("verb", ["set", "get"])
def test_c11_an_interrupted_verb_returns_after_its_helper(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch, no_leaks: None, verb: str
) -> None:
    store = make(nbytes=NBYTES, lanes=2)
    before, keys = child.keys_of("before", 0, MANY, NBYTES), child.keys_of("k", 0, MANY, NBYTES)
    assert store.set(before) == [OK] * MANY
    module, name = (_writer, "write_pages") if verb == "set" else (_reader, "read_chunk")
    held = Held(getattr(module, name))
    monkeypatch.setattr(module, name, held)
    interrupted = False
    try:
        store.set(keys) if verb == "set" else store.get(before)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        held.left.set()
    assert interrupted
    assert held.outlasted == [True]
    monkeypatch.undo()
    assert store.storage._opened.writer.helper.claim(), "the helper was not given back"
    store.storage._opened.writer.helper._claim.release()
    assert store.set(keys) == [OK] * MANY
    assert store.get(keys) == store.get(before) == [OK] * MANY
    store.close()


@pytest.mark.clause("C10", "C11", "C12")
def test_c10_without_a_helper_thread_the_caller_does_it_all(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = make(nbytes=NBYTES, lanes=2)
    keys = [child.keys_of("k", n, MANY, NBYTES) for n in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert store.set(keys[0]) == [OK] * MANY
        assert store.get(keys[0]) == [OK] * MANY
    assert store.set(keys[1]) == [OK] * MANY
    assert store.get(keys[0] + keys[1]) == [OK] * 2 * MANY
    store.close()


@pytest.mark.clause("C10", "C12")
def test_c10_without_a_janitor_thread_sets_seal_for_themselves_and_close_gives_all_back(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = make(capacity="64mib", segment_size="256kib", nbytes=NBYTES, lanes=1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for number in range(12):
        keys = child.keys_of("k", number, 8, NBYTES)
        assert store.set(keys) == [OK] * 8
        assert store.get(keys) == [OK] * 8
    assert len(store.storage._opened.writer._sealer._waiting) <= 1
    assert store.storage.usage().pages == 96
    store.close()


def test_the_janitor_outlives_work_that_raises(make: Callable[..., Any]) -> None:
    store = make()
    janitor = store.storage._opened.space.janitor
    done = threading.Event()

    def fail() -> None:
        raise ValueError("work that was not to raise")

    assert janitor.post(fail)
    assert janitor.post(done.set)
    assert done.wait(10)


@pytest.mark.clause("C2", "C3", "C4")
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("place", ["write", "count"])
def test_c3_what_others_have_read_of_an_interrupted_set_stays(
    make: Callable[..., Any],
    child: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    before: int,
    checksum: bool,
) -> None:
    store, other = (make(lanes=1, checksum=checksum, capacity="64mib") for _ in range(2))
    first, one, two = (child.keys_of(label, 0, 2) for label in ("first", "one", "two"))
    assert store.set(first[:before]) == [OK] * before
    with monkeypatch.context() as patched:
        if place == "write":
            real = _writer.write_exactly

            def write(*arguments: Any) -> None:
                real(*arguments)
                raise KeyboardInterrupt

            patched.setattr(_writer, "write_exactly", write)
        else:

            def append(*arguments: Any) -> None:
                raise KeyboardInterrupt

            patched.setattr(Catalog, "append", append)
        with pytest.raises(KeyboardInterrupt):
            store.set(one)
    assert other.contains(one) == [OK] * 2
    assert other.set(one) == [OK] * 2  # which is another's promise now
    assert store.set(two) == [OK] * 2
    known = [*first[:before], *one, *two]
    assert [s.get(known) for s in (store, other, make())] == [[OK] * len(known)] * 3
    assert store.storage.usage().pages == len(known)
    assert store.storage.batch_remove(one) == [OK] * 2
    assert [s.contains(one) for s in (store, other)] == [[MISS] * 2] * 2
    store.close()
    assert other.get(two) == [OK] * 2


@pytest.mark.clause("C3")
def test_c3_an_instance_that_closes_after_an_interrupt_keeps_what_others_rely_on(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = make(lanes=1), make(lanes=1)
    one = child.keys_of("one", 0, 2)

    def append(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Catalog, "append", append)
        with pytest.raises(KeyboardInterrupt):
            store.set(one)
    assert other.set(one) == [OK] * 2
    store.close()
    assert [s.get(one) for s in (other, make())] == [[OK] * 2] * 2


@pytest.mark.clause("C2", "C12", "C14")
def test_c14_a_segment_whose_sealing_is_interrupted_is_sealed_later(
    make: Callable[..., Any], child: ModuleType, monkeypatch: pytest.MonkeyPatch, no_leaks: None
) -> None:
    store = make(capacity="1mib", lanes=1)
    opened = store.storage._opened
    assert store.set(child.keys_of("k", 0, 1)) == [OK]
    segment = opened.writer._lanes[0].segment

    def unlock(fd: int) -> None:
        raise KeyboardInterrupt

    def fill() -> None:
        for number in range(1, 8):
            assert store.set(child.keys_of("k", number, 4)) == [OK] * 4

    with monkeypatch.context() as patched:
        patched.setattr(_sealing, "unlock", unlock)
        with pytest.raises(KeyboardInterrupt):
            fill()
    assert segment.header.id in opened.space.own
    assert store.storage.usage().store_bytes <= 1 << 20
    assert segment.header.id not in opened.space.own
    lane = opened.writer._lanes[0]
    assert {handle.ordinal for handle in opened.space.handles._lent} <= (
        {lane.segment.ordinal} if lane.segment is not None else set()
    )
    for number in range(20):
        assert store.set(child.keys_of("more", number, 4)) == [OK] * 4
    store.close()
