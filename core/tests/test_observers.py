"""Observers: told what happens, unable to change it, and paid for only where there are any."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from core_builders import a_pool
from core_caches import WAIT_S, a_cache, filled, in_child, in_thread
from core_plugins import Plugins
from core_toys import Script

from hicache_core import observers
from hicache_core.hooks import hookimpl
from hicache_core.identity import Identity
from hicache_core.observers import OperationEvent
from hicache_core.status import Status

pytestmark = pytest.mark.usefixtures("plugins")

OBSERVER = """
from hicache_core.hooks import hookimpl
class Observer:
    seen = []
    @hookimpl
    def hicache_operation(self, event):
        self.seen.append(event.verb)
observer = Observer()
"""


class Watching:
    def __init__(self) -> None:
        self.events: list[OperationEvent] = []
        self.life: list[tuple[str, Any]] = []

    @hookimpl
    def hicache_opened(self, storage: Any) -> None:
        self.life.append(("opened", storage))

    @hookimpl
    def hicache_operation(self, event: OperationEvent) -> None:
        self.events.append(event)

    @hookimpl
    def hicache_closed(self, storage: Any) -> None:
        self.life.append(("closed", storage))


def test_an_observer_is_told_of_every_operation() -> None:
    watching, pool = Watching(), a_pool()
    observers.register(watching)
    with a_cache(None, pool) as cache:
        cache.set(["a"], filled(pool, 0))
        cache.get(["a", "b"], pool.pages([4, 5]))
        cache.exists(["a", "b"])
        cache.contains(["b"])
    assert [(e.verb, e.pages, e.nbytes, dict(e.statuses)) for e in watching.events] == [
        ("set", 1, 64, {Status.OK: 1}),
        ("get", 2, 64, {Status.OK: 1, Status.MISS: 1}),
        ("exists", 2, 0, {Status.OK: 1, Status.MISS: 1}),
        ("contains", 1, 0, {Status.MISS: 1}),
    ]
    event = watching.events[0]
    assert (event.backend, event.namespace, event.component) == ("scripted", cache.namespace.id, "kv")
    assert 0 < event.seconds < WAIT_S


def test_an_observer_is_told_of_every_storage_that_opens_and_closes() -> None:
    watching, script = Watching(), Script()
    observers.register(watching)
    with a_cache(script, a_pool()) as cache:
        cache.rebind(Identity.for_tests(tenant="b"))
    first, second = script.storages
    assert watching.life == [("opened", first), ("closed", first), ("opened", second), ("closed", second)]


def test_an_observer_is_told_of_every_cache_once_it_is_there_and_once_it_is_closed() -> None:
    class Counting:
        def __init__(self) -> None:
            self.life: list[tuple[str, Any, str]] = []

        @hookimpl
        def hicache_started(self, cache: Any) -> None:
            self.life.append(("started", cache, cache.stats().breaker))

        @hookimpl
        def hicache_ended(self, cache: Any) -> None:
            self.life.append(("ended", cache, ""))

    counting = Counting()
    observers.register(counting)
    with a_cache(None, a_pool()) as cache:
        assert counting.life == [("started", cache, "closed")]
    assert counting.life == [("started", cache, "closed"), ("ended", cache, "")]


def test_an_observer_that_raises_is_left_out_and_the_others_are_told() -> None:
    class Raising:
        @hookimpl
        def hicache_operation(self, event: OperationEvent) -> None:
            raise RuntimeError("boom")

    watching, pool = Watching(), a_pool()
    for observer in (Raising(), watching, Raising()):
        observers.register(observer)
    with a_cache(None, pool) as cache:
        assert cache.set(["a"], filled(pool, 0)) == [Status.OK]
        assert cache.get(["a"], pool.pages([4])) == [Status.OK]
    assert [event.verb for event in watching.events] == ["set", "get"]
    hub = observers.active()
    assert hub is not None
    assert hub._manager.get_plugins() == {watching}


def test_an_observer_may_take_fewer_arguments_than_there_are() -> None:
    class Counting:
        calls = 0

        @hookimpl
        def hicache_operation(self) -> None:
            self.calls += 1

    counting, pool = Counting(), a_pool()
    observers.register(counting)
    with a_cache(None, pool) as cache:
        cache.exists(["a"])
    assert counting.calls == 1


def test_the_same_observer_twice_is_one_and_an_unknown_one_is_ignored() -> None:
    watching, pool = Watching(), a_pool()
    observers.register(watching)
    observers.register(watching)
    observers.unregister(object())
    with a_cache(None, pool) as cache:
        cache.exists(["a"])
        observers.unregister(watching)
        cache.exists(["a"])
    assert len(watching.events) == 1


def test_without_observers_there_is_no_hub() -> None:
    assert observers.active() is None
    with a_cache(None, a_pool()) as cache:
        assert cache._guard.observers is None


def test_observers_are_found_by_their_entry_points_once(plugins: Plugins) -> None:
    plugins.module("observing", OBSERVER)
    plugins.distribution("hicache-observing", {"observing": "observing:observer"}, group="hicache.observers")
    pool = a_pool()
    for _ in range(2):
        with a_cache(None, pool) as cache:
            cache.exists(["a"])
    assert sys.modules["observing"].Observer.seen == ["exists", "exists"]
    assert plugins.scans == 1


@pytest.mark.parametrize(
    "source",
    [
        "raise RuntimeError('boom')",
        "raise SystemExit(3)",
        "import no_such_module",
        "x = 1",
        OBSERVER.replace("self, event", "self, evnt"),
    ],
    ids=["raises", "exits", "lacks a module", "lacks the name", "asks for what is not given"],
)
def test_a_broken_observer_keeps_no_cache_from_opening(plugins: Plugins, source: str) -> None:
    plugins.module("broken_observer", source)
    plugins.module("observing", OBSERVER)
    plugins.distribution("a", {"broken": "broken_observer:observer"}, group="hicache.observers")
    plugins.distribution("b", {"observing": "observing:observer"}, group="hicache.observers")
    with a_cache(None, a_pool()) as cache:
        cache.exists(["a"])
    assert sys.modules["observing"].Observer.seen == ["exists"]


def test_two_observers_of_one_name_are_both_told(plugins: Plugins) -> None:
    plugins.module("observing_one", OBSERVER)
    plugins.module("observing_two", OBSERVER)
    plugins.distribution("a", {"metrics": "observing_one:observer"}, group="hicache.observers")
    plugins.distribution("b", {"metrics": "observing_two:observer"}, group="hicache.observers")
    with a_cache(None, a_pool()) as cache:
        cache.exists(["a"])
    assert [sys.modules[f"observing_{n}"].Observer.seen for n in ("one", "two")] == [["exists"]] * 2


def test_broken_metadata_hides_no_observer(plugins: Plugins) -> None:
    plugins.module("observing", OBSERVER)
    broken = plugins.distribution("a", {}, group="hicache.observers")
    (broken / "entry_points.txt").write_bytes(b"[hicache.observers]\nno equals sign\n")
    plugins.distribution("b", {"observing": "observing:observer"}, group="hicache.observers")
    with a_cache(None, a_pool()) as cache:
        cache.exists(["a"])
    assert sys.modules["observing"].Observer.seen == ["exists"]


def test_an_observer_whose_module_registers_another_does_not_hang(plugins: Plugins) -> None:
    plugins.module(
        "observing",
        OBSERVER + "from hicache_core import observers\nobservers.register(Observer())\nobservers.active()\n",
    )
    plugins.distribution("a", {"observing": "observing:observer"}, group="hicache.observers")
    hub = in_thread(observers.active)()
    assert len(hub._manager.get_plugins()) == 2


@pytest.mark.clause("C12")
def test_c12_a_forks_child_does_not_wait_for_a_scan_of_the_parent() -> None:
    with observers._lock:
        assert in_child(lambda: observers.active() is None) == "ok"


def test_pluggy_is_not_imported_without_observers() -> None:
    script = (
        "import sys\nfrom hicache_core import observers\nobservers._scanned_path = tuple(sys.path)\n"
        "assert observers.active() is None\nprint('pluggy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
