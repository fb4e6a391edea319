"""Ctrl-C, and close(), at moments at which something could be lost: a descriptor, an agent, a thread."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from nixl_builders import NBYTES, an_arena, as_a_stranger, keys_of, open_descriptors, page_bytes, stored

from hicache_core import Status
from hicache_core.errors import BackendUnavailable
from hicache_nixl._native import Agent
from hicache_nixl.agents import Agents
from hicache_nixl.filemoves import Mover
from hicache_nixl.lanes import WORTH_NBYTES, Lanes
from hicache_nixl.objectmoves import ObjectMover

OK = Status.OK


class InterruptedOnce:
    """Calls through, and raises after (or before) the call that is the ``last`` of those that count."""

    def __init__(self, honest: Any, last: int, *, after: bool, counts: Any = lambda *_: True) -> None:
        self.honest, self.left, self.after, self.counts = honest, last, after, counts

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.left -= bool(self.counts(*arguments))
        now = self.left == 0 and self.counts(*arguments)
        if now and not self.after:
            raise KeyboardInterrupt
        result = self.honest(*arguments, **options)
        if now:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("io", ["aio", "uring"])
def test_a_get_by_name_that_is_interrupted_once_it_is_registered(opened, monkeypatch, io):
    """Its agent would refuse the numbers ever after, and hold the files open."""
    arena = an_arena(4)
    storage = opened(arena.pool, io=io)
    keys = keys_of(arena, "a", "b")
    stored(storage, arena, keys)
    assert storage.batch_get(keys, arena.pages([2, 3])) == [OK, OK]
    before = open_descriptors()
    with monkeypatch.context() as patch:
        interrupted = InterruptedOnce(Agent.register, 1, after=True)
        patch.setattr(Agent, "register", lambda *a: interrupted(*a))
        with pytest.raises(KeyboardInterrupt):
            storage.batch_get(keys, arena.pages([2, 3]))
    looked_at = []
    honest = Mover.open
    monkeypatch.setattr(Mover, "open", lambda *a: (looked_at.extend(a[2]), honest(*a))[1])
    assert storage.batch_get(keys, arena.pages([2, 3])) == [OK, OK]
    assert looked_at == []
    assert open_descriptors() == before
    arena.check({2: page_bytes(keys[0], NBYTES), 3: page_bytes(keys[1], NBYTES)})


@pytest.mark.parametrize("step", ["opening", "closing"])
def test_a_get_that_is_interrupted_closes_what_it_has_opened(opened, tmp_path, monkeypatch, step):
    arena = an_arena(8)
    storage = opened(arena.pool)
    keys = keys_of(arena, "a", "b", "c", "d")
    stored(storage, arena, keys)
    assert as_a_stranger(storage).batch_get(keys, arena.pages([4, 5, 6, 7])) == [OK] * 4
    before = open_descriptors()
    with monkeypatch.context() as patch:
        interrupt(patch, step)
        with pytest.raises(KeyboardInterrupt):
            as_a_stranger(storage).batch_get(keys, arena.pages([4, 5, 6, 7]))
    assert open_descriptors() == before
    assert storage.batch_get(keys, arena.pages([4, 5, 6, 7])) == [OK] * 4


@pytest.mark.parametrize("step", ["opening", "closing"])
def test_a_set_that_is_interrupted_leaves_no_file_and_no_reservation(opened, tmp_path, monkeypatch, step):
    arena = an_arena(4)
    storage = opened(arena.pool, capacity=1 << 20)
    keys = keys_of(arena, "a", "b", "c", "d")
    stored(storage, arena, keys[:1])
    before = open_descriptors()
    with monkeypatch.context() as patch:
        interrupt(patch, step)
        with pytest.raises(KeyboardInterrupt):
            storage.batch_set(keys[1:], arena.pages([1, 2, 3]))
    assert open_descriptors() == before
    assert list((tmp_path / "kv").glob("*/??/.*.tmp")) == []
    pages = [path for path in (tmp_path / "kv").glob("*/??/*") if path.is_file()]
    assert len(pages) == (1 if step == "opening" else 4)
    assert storage.usage().store_bytes == sum(path.stat().st_size for path in pages)
    assert storage.batch_set(keys, arena.pages([0, 1, 2, 3])) == [OK] * 4


def interrupt(patch: pytest.MonkeyPatch, step: str) -> None:
    """Raise at the second file that a get or a set opens, or closes."""
    if step == "opening":
        of_pages = lambda path, *_: len(os.path.basename(os.path.dirname(path))) == 2  # noqa: E731
        patch.setattr(os, "open", InterruptedOnce(os.open, 2, after=False, counts=of_pages))
    else:
        of_pages = lambda number: os.readlink(f"/proc/self/fd/{number}").count("/kv/")  # noqa: E731
        patch.setattr(os, "close", InterruptedOnce(os.close, 2, after=True, counts=of_pages))


class AnAgent:
    """Registers until it is told not to."""

    def __init__(self, *trouble: Any) -> None:
        self.spent = self.closed = False
        self.regions: object = None
        self.trouble = list(trouble)

    def register_pools(self, kind: str, wanted: Any) -> None:
        if self.trouble:
            self.trouble.pop(0)()

    def close(self) -> None:
        self.closed = True


def _interrupted() -> None:
    raise KeyboardInterrupt


def _refused() -> None:
    raise BackendUnavailable("registering", remedy="")


@pytest.mark.parametrize("trouble", [_interrupted, _refused])
def test_an_agent_that_is_not_lent_after_all_is_closed(trouble):
    """Pools came while it was registered, and registering those fails."""
    agent = AnAgent(lambda: agents.know(()), trouble)
    agents = Agents(lambda: agent)
    agents.know(())
    with pytest.raises((KeyboardInterrupt, BackendUnavailable)):
        agents.take(time.monotonic() + 1)
    assert (agent.closed, agents._busy, agents._idle) == (True, set(), [])


def test_an_agent_that_is_interrupted_when_it_comes_back_is_closed():
    agent = AnAgent()
    agents = Agents(lambda: agent)
    agents.give(agents.take(time.monotonic() + 1))
    assert agents._idle == [agent]
    agent.trouble.append(_interrupted)
    with pytest.raises(KeyboardInterrupt):
        agents.know(())
    assert (agent.closed, agents._busy, agents._idle) == (True, set(), [])


class ATransfer:
    """Runs until it is told that it has ended."""

    failed = ""

    def __init__(self) -> None:
        self.over = False

    def poll(self) -> bool:
        return self.over


class AnObjectAgent(AnAgent):
    """Begins transfers, and is interrupted in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[ATransfer] = []

    def next_objects(self, count: int) -> int:
        return 0

    def register(self, kind: str, rows: Any) -> object:
        return object()

    def start(self, *_: Any) -> ATransfer:
        self.begun.append(ATransfer())
        if len(self.begun) == 2:
            raise KeyboardInterrupt
        return self.begun[-1]

    @property
    def latest(self) -> ATransfer | None:
        return self.begun[-1] if self.begun else None


def test_c12_an_agent_whose_objects_were_interrupted_is_closed_when_they_have_ended():
    """It was busy for ever, and after 32 of these no call over objects went on."""
    agent = AnObjectAgent()
    agents = Agents(lambda: agent)
    mover = ObjectMover(agents, None, "")
    lent = agents.take(time.monotonic() + 1)
    with pytest.raises(KeyboardInterrupt):
        mover.move(lent, "READ", ["a", "b", "c"], SimpleNamespace(address=0), 64, time.monotonic() + 5)
    agents.abandon(agent, ())  # as who lent it does, whatever has become of it
    assert (agent.closed, agents._busy, len(agents._abandoned)) == (False, set(), 1)
    agent.begun[0].over = True
    threading.Event().wait(0.1)
    assert not agent.closed, "what was begun last still runs"
    agent.begun[1].over = True
    deadline = time.monotonic() + 10
    while agents._abandoned:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    assert agent.closed


def lanes_alive() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "hicache-nixl-lane"}


def test_a_batch_that_meets_close_starts_no_helper(monkeypatch):
    lanes, before, drained = Lanes(2), lanes_alive(), []

    class Claim:
        def acquire(self, blocking: bool) -> bool:
            lanes.close()
            return True

        def release(self) -> None: ...

    monkeypatch.setattr(lanes, "_claim", Claim())
    lanes.share([1, 2], drained.extend, WORTH_NBYTES)
    assert drained == [1, 2]
    assert lanes_alive() <= before


def test_a_batch_that_close_overtakes_does_not_wait_for_ever(monkeypatch):
    """close() came between the claim and the work: the helper ended, and its work waited for nobody."""
    lanes, drained = Lanes(2), []
    lanes.share([0], drained.extend, WORTH_NBYTES)
    closing, honest = threading.Thread(target=lanes.close), lanes._work

    class Work:
        def put(self, job: object) -> None:
            if job is not None:
                closing.start()
                closing.join(0.2)
            honest.put(job)

        def get(self) -> object:
            return honest.get()

    monkeypatch.setattr(lanes, "_work", Work())
    sharing = threading.Thread(target=lanes.share, args=([1, 2], drained.extend, WORTH_NBYTES), daemon=True)
    sharing.start()
    sharing.join(10.0)
    closing.join(10.0)
    assert not sharing.is_alive()
    assert sorted(drained) == [0, 1, 2]
