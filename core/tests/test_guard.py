"""HiCache never raises and never hangs, whatever the backend does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from core_builders import CANARY, a_component, a_pool, noise, page_bytes
from core_caches import (
    TIMEOUT_S,
    WAIT_S,
    a_cache,
    a_config,
    filled,
    hanging,
    in_child,
    in_thread,
    scripted,
    wait_until,
)
from core_toys import Script

from hicache_core import breaker as breaker_module
from hicache_core import guard as guard_module
from hicache_core.cache import HiCache
from hicache_core.capabilities import Capabilities
from hicache_core.errors import (
    BackendDependencyMissing,
    BackendTimeout,
    BackendUnavailable,
    HiCacheError,
    InvalidPages,
    StorageClosed,
    StorageNotOpened,
)
from hicache_core.identity import Identity
from hicache_core.status import Status

OK, MISS, ERROR, UNAVAILABLE = Status.OK, Status.MISS, Status.ERROR, Status.UNAVAILABLE
#: The margin of C11, and some for a busy machine.
GRACE_S = 1.0 + 1.0


def raises(error: BaseException) -> Callable[..., Any]:
    def verb(*_: Any) -> Any:
        raise error

    return verb


def gives(answer: Any) -> Callable[..., Any]:
    return lambda *_: answer


class Unprintable(Exception):
    def __str__(self) -> str:
        raise OSError("even this fails")

    __repr__ = __str__


class Unshowable:
    def __repr__(self) -> str:
        raise OSError("even this fails")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let breakers try again at once."""
    monkeypatch.setattr(breaker_module.Breaker.__init__, "__kwdefaults__", {
        **(breaker_module.Breaker.__init__.__kwdefaults__ or {}),
        "first_pause_s": 0.0,
        "longest_pause_s": 0.0,
    })  # fmt: skip


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was logged."""
    with caplog.at_level(logging.DEBUG, logger="hicache"):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == "hicache"]


# A backend that raises.

ERRORS: list[tuple[BaseException, Status]] = [
    (RuntimeError("boom"), ERROR),
    (KeyError("k"), ERROR),
    (MemoryError(), ERROR),
    (RecursionError(), ERROR),
    (SystemExit(3), ERROR),
    (GeneratorExit(), ERROR),
    (StopIteration(), ERROR),
    (AssertionError(), ERROR),
    (Unprintable(), ERROR),
    (HiCacheError("odd"), ERROR),
    (InvalidPages("pages of a pool that is not known"), ERROR),
    (StorageNotOpened("scripted"), ERROR),
    (StorageClosed("scripted"), UNAVAILABLE),
    (BackendUnavailable("no answer"), UNAVAILABLE),
    (BackendTimeout("no answer in time"), Status.TIMEOUT),
    (ConnectionError("refused"), ERROR),
    (TimeoutError("socket"), ERROR),
]


@pytest.mark.clause("C10")
@pytest.mark.parametrize(("error", "status"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS])
@pytest.mark.parametrize("bounce", [False, True], ids=["direct", "bounced"])
def test_c10_whatever_a_backend_raises_becomes_statuses(
    error: BaseException, status: Status, bounce: bool
) -> None:
    pool = a_pool()
    verbs = dict.fromkeys(["get", "set", "contains", "exists", "touch"], raises(error))
    with a_cache(Script(**verbs), pool, bounce=bounce) as cache:
        assert cache.get(["a", "b"], pool.pages([0, 1])) == [status] * 2
        assert cache.set(["a", "b"], pool.pages([0, 1])) == [status] * 2
        cache._guard.breaker.succeed()
        assert cache.contains(["a"]) in ([status], [MISS])  # a get that ended in ERROR made the key dead
        assert cache.exists(["a"]) == 0
        assert cache.touch(["a"]) is None
    assert page_bytes(pool.pages([0]), 0) == bytes([CANARY]) * 64


@pytest.mark.parametrize("bounce", [False, True], ids=["direct", "bounced"])
def test_operators_get_a_named_error_for_whatever_a_backend_raises(bounce: bool) -> None:
    for error in (RuntimeError("boom"), SystemExit(3), Unprintable(), KeyError("k")):
        with a_cache(Script(clear=raises(error), usage=raises(error)), a_pool(), bounce=bounce) as cache:
            for verb, call in (("clear", cache.clear), ("usage", cache.usage)):
                with pytest.raises(HiCacheError) as caught:
                    call()
                assert caught.value.what == f"'scripted' failed in {verb}"
                assert caught.value.__cause__ is error


# A backend that answers nonsense.

NONSENSE: list[tuple[str, Any]] = [
    ("none", None),
    ("short", [OK]),
    ("empty", []),
    ("long", [OK] * 4),
    ("twice as many", [OK, OK, OK, OK]),
    ("bools", [True, True]),
    ("integers", [1, 1]),
    ("one integer", 2),
    ("true", True),
    ("a tuple", (OK, OK)),
    ("a generator", (OK for _ in range(2))),
    ("text", "OK"),
    ("names", ["OK", "OK"]),
    ("a status among others", [OK, None]),
    ("a mapping", {"a": OK, "b": OK}),
    ("a subclass of list", type("Odd", (list,), {})([OK, OK])),
    ("what cannot be shown", Unshowable()),
    ("a list of what cannot be shown", [Unshowable()] * 2),
    ("much", [0] * 1_000_000),
]


@pytest.mark.clause("C1")
@pytest.mark.parametrize("answer", [case[1] for case in NONSENSE], ids=[case[0] for case in NONSENSE])
@pytest.mark.parametrize("bounce", [False, True], ids=["direct", "bounced"])
def test_c1_nonsense_is_error_for_every_page_and_writes_no_slot(answer: Any, bounce: bool) -> None:
    pool = a_pool()
    verbs = dict.fromkeys(["get", "set", "contains"], gives(answer))
    with a_cache(Script(**verbs), pool, bounce=bounce) as cache:
        assert cache.contains(["c", "d"]) == [ERROR] * 2
        assert cache.get(["a", "b"], pool.pages([0, 1])) == [ERROR] * 2
        assert cache.set(["a", "b"], pool.pages([0, 1])) == [ERROR] * 2
    assert page_bytes(pool.pages([0]), 0) == bytes([CANARY]) * 64


@pytest.mark.parametrize("answer", [None, -1, 3, True, "2", 2.0, [OK, OK], OK, Unshowable()])
def test_a_nonsense_count_is_no_hit(answer: Any) -> None:
    with a_cache(Script(exists=gives(answer)), a_pool()) as cache:
        assert cache.exists(["a", "b"]) == 0


@pytest.mark.parametrize("answer", [None, [OK], (OK, OK), [1, 1], "OK"])
def test_nonsense_is_a_named_error_for_operators(answer: Any) -> None:
    with a_cache(Script(remove=gives(answer)), a_pool()) as cache, pytest.raises(HiCacheError) as caught:
        cache.remove(["a", "b"])
    assert caught.value.what == "'scripted' gave an answer to remove that breaks the contract"


@pytest.mark.parametrize("answer", [None, "many", -1, True])
def test_a_nonsense_clear_is_a_named_error(answer: Any) -> None:
    with a_cache(Script(clear=gives(answer)), a_pool()) as cache, pytest.raises(HiCacheError) as caught:
        cache.clear()
    assert caught.value.what == "'scripted' gave an answer to clear that breaks the contract"


def test_a_nonsense_usage_is_a_named_error() -> None:
    with a_cache(Script(usage=gives(None)), a_pool()) as cache, pytest.raises(HiCacheError) as caught:
        cache.usage()
    assert caught.value.what == "'scripted' gave an answer to usage that breaks the contract"


def test_an_answer_that_the_backend_changes_afterwards_stays_as_it_was() -> None:
    pool, kept = a_pool(), [OK, OK]
    with a_cache(Script(get=gives(kept)), pool) as cache:
        answered = cache.get(["a", "b"], pool.pages([0, 1]))
        kept[0] = ERROR
        assert answered == [OK, OK]


# A backend that hangs.


@pytest.mark.clause("C11")
def test_c11_a_hold_that_hangs_keeps_its_caller_and_nobody_else() -> None:
    pool = a_pool()
    with hanging() as hang, a_cache(Script(get=hang), pool) as cache:
        cache.set(["a"], filled(pool, 0))
        stuck = in_thread(lambda: cache.get(["a"], pool.pages([4])))
        assert hang.inside.acquire(timeout=WAIT_S)
        wait_until(lambda: not cache.exists(["a"]), "the breaker opened")
        started = time.monotonic()
        assert cache.get(["a"], pool.pages([5])) == [UNAVAILABLE]
        assert cache.stats().breaker == "open"
        assert time.monotonic() - started < 0.5
        hang.go.set()
        assert stuck() == [OK]
        assert cache.stats().late == 1
    assert page_bytes(pool.pages([4]), 0) == noise(0, 64)


@pytest.mark.clause("C11")
@pytest.mark.usefixtures("impatient")
def test_c11_after_a_first_overrun_a_hold_is_bounced() -> None:
    pool, script = a_pool(), Script()
    with hanging() as hang, a_cache(script, pool) as cache:
        cache.set(["a"], filled(pool, 0))
        script.verbs["get"] = hang
        stuck = in_thread(lambda: cache.get(["a"], pool.pages([4])))
        assert hang.inside.acquire(timeout=WAIT_S)
        wait_until(lambda: cache.stats().late == 1 or not cache.exists(["a"]), "others saw it hang")
        assert cache.get(["a"], pool.pages([5])) == [Status.TIMEOUT]
        assert cache.stats().abandoned == 1
        hang.go.set()
        assert stuck() == [OK]
    assert page_bytes(pool.pages([5]), 0) == bytes([CANARY]) * 64


@pytest.mark.clause("C11")
@pytest.mark.parametrize("verb", ["get", "set", "contains", "exists", "touch"])
@pytest.mark.parametrize("bounce", ["asked for", "no means declared"])
def test_c11_a_bounced_verb_that_hangs_returns_in_time(verb: str, bounce: str) -> None:
    pool = a_pool()
    means = Capabilities(deadline="hold" if bounce == "asked for" else "none")
    with hanging() as hang:
        script = Script(**{verb: hang})
        with a_cache(script, pool, capabilities=means, bounce=bounce == "asked for") as cache:
            started = time.monotonic()
            if verb in ("get", "set"):
                assert getattr(cache, verb)(["a"], pool.pages([0])) == [Status.TIMEOUT]
            else:
                wanted = {"contains": [Status.TIMEOUT], "exists": 0, "touch": None}[verb]
                assert getattr(cache, verb)(["a"]) == wanted
            took = time.monotonic() - started
            assert TIMEOUT_S * 0.9 <= took < TIMEOUT_S + GRACE_S
            assert cache.stats().late == 1
            assert cache.stats().abandoned == 1
            hang.go.set()
            wait_until(lambda: cache.stats().abandoned == 0, "the native call ended")


@pytest.mark.clause("C11")
@pytest.mark.parametrize("verb", ["clear", "usage", "remove"])
def test_c11_an_operators_verb_that_hangs_is_a_timeout(verb: str) -> None:
    with hanging() as hang, a_cache(Script(**{verb: hang}), a_pool(), bounce=True) as cache:
        started = time.monotonic()
        with pytest.raises(BackendTimeout):
            cache.remove(["a"]) if verb == "remove" else getattr(cache, verb)()
        assert time.monotonic() - started < TIMEOUT_S + GRACE_S


@pytest.mark.clause("C12")
@pytest.mark.parametrize("verb", ["close", "get"])
def test_c12_close_returns_in_time_while_the_backend_hangs(verb: str) -> None:
    pool = a_pool()
    with hanging() as hang:
        with a_cache(Script(**{verb: hang}), pool) as cache:
            wait = in_thread(lambda: cache.get(["a"], pool.pages([0]))) if verb == "get" else None
            if wait:
                assert hang.inside.acquire(timeout=WAIT_S)
            started = time.monotonic()
            cache.close()
            took = time.monotonic() - started
        hang.go.set()
        if wait:
            wait()
    assert took < TIMEOUT_S + GRACE_S


@pytest.mark.clause("C11")
def test_c11_private_memory_stays_until_a_close_that_hangs_has_ended() -> None:
    """The native close unregisters that memory; unmapped before, it would be a write into nothing."""
    pool = a_pool()

    def workers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "hicache-bounce"]

    with hanging() as hang:
        with a_cache(Script(close=hang), pool, bounce=True) as cache:
            assert cache.set(["a"], pool.pages([0])) == [OK]
            cache.close()
            assert workers() != []
        hang.go.set()
    wait_until(lambda: workers() == [])


def test_pools_are_added_and_dropped_in_time_while_registering_hangs() -> None:
    pool = a_pool(component=a_component(32, "mamba"))
    with hanging() as hang, a_cache(Script(add_pool=hang, drop_pool=hang), a_pool()) as cache:
        started = time.monotonic()
        cache.add_pool(pool)
        cache.drop_pool(pool)
        assert time.monotonic() - started < 2 * (TIMEOUT_S + GRACE_S)


# Opening.


@pytest.mark.parametrize("error", [BackendUnavailable("master is away"), OSError("refused"), SystemExit(1)])
def test_a_dead_backend_opens_with_misses_and_is_tried_again(
    error: BaseException, impatient: None, lines: Callable[[], list[str]]
) -> None:
    pool, script = a_pool(), Script(open=raises(error))
    with a_cache(script, pool) as cache:
        assert cache.get(["a"], pool.pages([0])) == [UNAVAILABLE]
        assert cache.exists(["a"]) == 0
        assert cache.storage is None
        del script.verbs["open"]
        wait_until(lambda: cache.set(["a"], filled(pool, 0)) == [OK], "it was opened again")
        assert cache.stats().breaker == "closed"
        assert cache.get(["a"], pool.pages([4])) == [OK]
    assert lines()[0].startswith("hicache 'scripted' open: ")


def test_while_it_pauses_a_dead_backend_is_not_asked() -> None:
    pool, script = a_pool(), Script(open=raises(BackendUnavailable("away")))
    with a_cache(script, pool) as cache:
        for _ in range(100):
            assert cache.get(["a"], pool.pages([0])) == [UNAVAILABLE]
        with pytest.raises(BackendUnavailable):
            cache.usage()
    assert script.count("open") == 1


@pytest.mark.parametrize("error", [BackendUnavailable("away"), BackendTimeout("away"), OSError("refused")])
def test_strict_raises_what_opening_met(error: Exception) -> None:
    with (
        pytest.raises(BackendUnavailable) as caught,
        a_cache(Script(open=raises(error)), a_pool(), strict=True),
    ):
        raise AssertionError("opened")
    assert error in (caught.value, caught.value.__cause__)


def test_strict_raises_within_the_deadline_of_an_open_that_hangs() -> None:
    with hanging() as hang:
        started = time.monotonic()
        with (
            pytest.raises(BackendTimeout) as caught,
            a_cache(Script(open=hang), a_pool(), strict=True),
        ):
            raise AssertionError("opened")
        assert time.monotonic() - started < TIMEOUT_S + GRACE_S
        assert str(caught.value).startswith("opening 'scripted': no answer within ")


def test_an_open_that_ends_too_late_is_closed_again() -> None:
    script = Script()
    with hanging(lambda proceed, *_: proceed()) as hang:
        script.verbs["open"] = hang
        with a_cache(script, a_pool()) as cache:
            assert cache.storage is None
            hang.go.set()
            wait_until(lambda: script.count("close") == 1, "the late storage was closed")
    assert not script.storages[0].is_open


@pytest.mark.parametrize(
    "error",
    [InvalidPages("cannot register"), BackendDependencyMissing("scripted", "lib", remedy="Run: x")],
)
def test_what_trying_again_cannot_mend_raises_even_if_not_strict(error: HiCacheError) -> None:
    with pytest.raises(type(error)) as caught, a_cache(Script(open=raises(error)), a_pool()):
        raise AssertionError("opened")
    assert caught.value is error


@pytest.mark.clause("C11")
@pytest.mark.usefixtures("impatient")
def test_c11_opens_that_hang_leave_a_bounded_number_of_threads_behind() -> None:
    pool = a_pool()
    with hanging() as hang, a_cache(Script(open=hang), pool, timeout_s=0.01) as cache:
        for guard in (cache._guard,):
            guard_grace(guard, 0.0)
        for _ in range(20):
            cache.get(["a"], pool.pages([0]))
        assert hang.entered <= 4
        hang.go.set()
        wait_until(lambda: cache.set(["a"], filled(pool, 0)) == [OK], "it works again")


def guard_grace(guard: Any, seconds: float) -> None:
    """Shorten the margin of C11 for a test of many timeouts."""
    import hicache_core.guard as module

    assert module.GRACE_S
    guard.config = a_config(0.01)
    module.GRACE_S = seconds


@pytest.fixture(autouse=True)
def _grace_is_put_back() -> Iterator[None]:
    import hicache_core.guard as module

    before = module.GRACE_S
    yield
    module.GRACE_S = before


# The breaker in place.


@pytest.mark.parametrize("status", [UNAVAILABLE, Status.TIMEOUT])
def test_repeated_trouble_opens_the_breaker_and_a_probe_closes_it(
    status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, now = a_pool(), [0.0]
    script = Script(get=lambda proceed, keys, _: [status] * len(keys))
    with a_cache(script, pool) as cache:
        monkeypatch.setattr(cache._guard.breaker, "_clock", lambda: now[0])
        for _ in range(breaker_module.FAILURES_TO_OPEN):
            assert cache.get(["a"], pool.pages([0])) == [status]
        assert cache.stats().breaker == "open"
        asked = len(script.calls)
        assert cache.get(["a"], pool.pages([0])) == [UNAVAILABLE]
        assert cache.contains(["a"]) == [UNAVAILABLE]
        assert len(script.calls) == asked
        now[0] += breaker_module.FIRST_PAUSE_S
        assert cache.get(["a"], pool.pages([0])) == [status]
        assert cache.get(["a"], pool.pages([0])) == [UNAVAILABLE]
        assert len(script.calls) == asked + 1
        now[0] += 2 * breaker_module.FIRST_PAUSE_S
        del script.verbs["get"]
        assert cache.get(["a"], pool.pages([0])) == [MISS]
        assert cache.stats().breaker == "closed"


def test_an_unreachable_store_opens_the_breaker_by_exists_alone() -> None:
    script = Script(contains=lambda proceed, keys: [UNAVAILABLE] * len(keys))
    with a_cache(script, a_pool()) as cache:
        for _ in range(breaker_module.FAILURES_TO_OPEN):
            assert cache.exists(["a", "b"]) == 0
        assert cache.stats().breaker == "open"


def test_trouble_of_single_pages_does_not_open_the_breaker() -> None:
    pool = a_pool()
    with a_cache(Script(get=gives([UNAVAILABLE, MISS])), pool) as cache:
        for _ in range(10):
            cache.get(["a", "b"], pool.pages([0, 1]))
        assert cache.stats().breaker == "closed"


def test_errors_are_answers_and_do_not_open_the_breaker() -> None:
    pool = a_pool()
    with a_cache(Script(get=raises(RuntimeError("boom"))), pool) as cache:
        for _ in range(10):
            cache.get(["a"], pool.pages([0]))
        assert cache.stats().breaker == "closed"


def test_after_a_part_without_answer_the_rest_is_skipped() -> None:
    pool, script = a_pool(), Script(get=raises(BackendUnavailable("away")))
    limited = Capabilities(max_batch=2, deadline="hold")
    with a_cache(script, pool, capabilities=limited) as cache:
        statuses = cache.get(["a", "b", "c", "d", "e"], pool.pages([0, 1, 2, 3, 4]))
    assert statuses == [UNAVAILABLE] * 2 + [Status.SKIPPED] * 3
    assert script.count("get") == 1


@pytest.mark.clause("C11")
def test_slow_parts_end_with_the_deadline_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(guard_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(answer: Callable[[list[str]], Any]) -> Callable[..., Any]:
        def verb(proceed: Callable[[], Any], keys: list[str], *_: Any) -> Any:
            now[0] += 0.6 * TIMEOUT_S
            return answer(keys)

        return verb

    keys, pool = ["a", "b", "c", "d", "e"], a_pool()
    script = Script(
        get=slow(lambda keys: [MISS] * len(keys)),
        set=slow(lambda keys: [OK] * len(keys)),
        contains=slow(lambda keys: [OK] * len(keys)),
        exists=slow(len),
    )
    limited = Capabilities(max_batch=1, deadline="hold")
    with a_cache(script, pool, capabilities=limited, timeout_s=TIMEOUT_S) as cache:
        locs = pool.pages([0, 1, 2, 3, 4])
        assert cache.get(keys, locs) == [MISS] * 2 + [Status.SKIPPED] * 3
        assert cache.set(keys, locs) == [OK] * 2 + [Status.SKIPPED] * 3
        assert cache.contains(keys) == [OK] * 2 + [Status.SKIPPED] * 3
        assert cache.exists(keys) == 2
        assert cache.stats().breaker == "closed"
        assert [script.count(verb) for verb in ("get", "set", "contains", "exists")] == [2, 2, 2, 2]


# Another identity.


def test_rebind_serves_the_new_namespace_and_keeps_the_old_pages() -> None:
    pool, script = a_pool(), Script()
    with a_cache(script, pool) as cache:
        old = cache.namespace
        cache.set(["a"], filled(pool, 0))
        cache.rebind(Identity.for_tests(weights="v2"))
        assert cache.namespace != old
        assert cache.exists(["a"]) == 0
        cache.set(["a"], filled(pool, 1))
        assert cache.get(["a"], pool.pages([4])) == [OK]
        cache.rebind(Identity.for_tests())
        assert cache.get(["a"], pool.pages([5])) == [OK]
    assert [page_bytes(pool.pages([4, 5]), at) for at in range(2)] == [noise(1, 64), noise(0, 64)]
    assert [storage.is_open for storage in script.storages] == [False, False, False]


def test_calls_that_began_before_a_rebind_use_the_old_namespace_throughout() -> None:
    """One set of two parts: the first part waits while the identity changes."""
    pool, script = a_pool(), Script()
    limited = Capabilities(max_batch=1, deadline="hold")
    with hanging() as hang:
        script.verbs["set"] = hang
        with a_cache(script, pool, capabilities=limited, timeout_s=WAIT_S) as cache:
            old = cache.namespace.id
            setting = in_thread(lambda: cache.set(["a", "b"], filled(pool, 0, 1)))
            assert hang.inside.acquire(timeout=WAIT_S)
            rebinding = in_thread(lambda: cache.rebind(Identity.for_tests(weights="v2")))
            wait_until(lambda: cache._guard.session is None, "the change began")
            assert cache.get(["a"], pool.pages([4])) == [UNAVAILABLE]
            assert cache.exists(["a"]) == 0
            hang.go.set()
            assert setting() == [OK, OK]
            rebinding()
            assert cache.namespace.id != old
            assert {key: len(pages) for key, pages in script.stores.items()} == {
                old: 2,
                cache.namespace.id: 0,
            }


def test_rebind_does_not_wait_for_ever_for_a_call_that_hangs() -> None:
    pool, script = a_pool(), Script()
    with hanging() as hang:
        with a_cache(script, pool) as cache:
            cache.set(["a"], filled(pool, 0))
            script.verbs["get"] = hang
            stuck = in_thread(lambda: cache.get(["a"], pool.pages([4])))
            assert hang.inside.acquire(timeout=WAIT_S)
            started = time.monotonic()
            cache.rebind(Identity.for_tests(weights="v2"))
            assert time.monotonic() - started < 2 * (TIMEOUT_S + GRACE_S)
            del script.verbs["get"]
            assert cache.set(["b"], filled(pool, 1)) == [OK]
            hang.go.set()
            stuck()
        assert script.stores[cache.namespace.id].keys() == {f"b.{pool.component.key}"}


def test_rebind_waits_for_a_call_that_hangs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_core.guard.GRACE_S", 0.05)
    pool, script = a_pool(), Script()
    with hanging() as hang, a_cache(script, pool, timeout_s=0.4) as cache:
        script.verbs["get"] = hang
        stuck = in_thread(lambda: cache.get(["a"], pool.pages([4])))
        assert hang.inside.acquire(timeout=WAIT_S)
        started = time.monotonic()
        cache.rebind(Identity.for_tests(weights="v2"))
        assert time.monotonic() - started < 0.75
        hang.go.set()
        stuck()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("error", [BackendUnavailable("away"), RuntimeError("boom"), SystemExit(1)])
def test_a_rebind_that_fails_is_tried_again_by_later_calls(error: BaseException) -> None:
    pool, script = a_pool(), Script()
    with a_cache(script, pool) as cache:
        script.verbs["open"] = raises(error)
        cache.rebind(Identity.for_tests(weights="v2"))
        assert cache.get(["a"], pool.pages([0])) == [UNAVAILABLE]
        del script.verbs["open"]
        wait_until(lambda: cache.set(["a"], filled(pool, 0)) == [OK], "it was opened again")
        assert script.storages[-1].config.identity.weights == "v2"


def test_a_rebind_that_keeps_the_old_namespace_is_not_believed(impatient: None) -> None:
    pool, script = a_pool(), Script()
    with a_cache(script, pool) as cache:
        storage = cache.storage
        assert storage is not None
        storage.rebind = lambda config, pools: storage  # type: ignore[method-assign]
        cache.set(["a"], filled(pool, 0))
        cache.rebind(Identity.for_tests(weights="v2"))
        assert cache.exists(["a"]) == 0
        assert not storage.is_open


def test_rebind_after_close_opens_nothing() -> None:
    script = Script()
    with a_cache(script, a_pool()) as cache:
        pass
    cache.rebind(Identity.for_tests(weights="v2"))
    assert len(script.storages) == 1


@pytest.mark.parametrize("what", ["reopening", "rebinding"])
def test_a_cache_closed_while_it_opens_leaves_nothing_open(what: str, impatient: None) -> None:
    pool, script = a_pool(), Script()
    with hanging(lambda proceed, *_: proceed()) as hang:
        if what == "reopening":
            script.verbs["open"] = raises(BackendUnavailable("away"))
        with a_cache(script, pool, timeout_s=WAIT_S) as cache:
            script.verbs["open"] = hang
            if what == "reopening":
                opening = in_thread(lambda: cache.get(["a"], pool.pages([0])))
            else:
                opening = in_thread(lambda: cache.rebind(Identity.for_tests(weights="v2")))
            assert hang.inside.acquire(timeout=WAIT_S)
            closing = in_thread(cache.close)
            wait_until(lambda: cache._guard._ended, "it is being closed")
            hang.go.set()
            opening()
            closing()
            assert cache.storage is None
            assert [storage.is_open for storage in script.storages] == [False] * len(script.storages)


# Forks.


@pytest.mark.clause("C12")
def test_c12_a_forks_child_answers_misses_whatever_was_held() -> None:
    pool, script = a_pool(), Script()
    with hanging() as hang, a_cache(script, pool, timeout_s=WAIT_S, bounce=True) as cache:
        cache.set(["a"], filled(pool, 0))
        script.verbs["get"] = hang
        stuck = in_thread(lambda: cache.get(["a"], pool.pages([4])))
        assert hang.inside.acquire(timeout=WAIT_S)
        held, release = threading.Event(), threading.Event()

        def hold_every_lock() -> None:
            guard = cache._guard
            locks = [guard._admin, guard.breaker._lock, guard.notices._lock, cache._counters._lock]
            for lock in locks:
                lock.acquire()
            held.set()
            release.wait(WAIT_S)
            for lock in locks:
                lock.release()

        holder = in_thread(hold_every_lock)
        assert held.wait(WAIT_S)

        def check() -> bool:
            answers = [
                cache.get(["a"], pool.pages([5])) == [MISS],
                not any(cache.set(["a"], pool.pages([5]))),
                cache.contains(["a"]) == [MISS],
                cache.exists(["a"]) == 0,
                cache.touch(["a"]) is None,
                cache.stats().verbs["get"].calls == 1,
                cache.storage is None,
            ]
            cache.add_pool(a_pool(component=a_component(8, "late")))
            cache.rebind(Identity.for_tests(weights="v2"))
            cache.close()
            return all(answers)

        try:
            assert in_child(check) == "ok"
        finally:
            release.set()
            holder()
            hang.go.set()
            assert stuck() == [OK]


# Log lines.


def test_one_line_says_backend_verb_status_and_cause(lines: Callable[[], list[str]]) -> None:
    pool = a_pool()
    with a_cache(Script(get=raises(RuntimeError("disk on fire"))), pool) as cache:
        for _ in range(50):
            cache.get(["a"], pool.pages([0]))
    about_get = [line for line in lines() if " get: " in line]
    assert about_get[0] == "hicache 'scripted' get: ERROR: RuntimeError('disk on fire')"
    assert len(about_get) <= 2


def test_misses_are_not_logged(lines: Callable[[], list[str]]) -> None:
    pool = a_pool()
    with a_cache(None, pool) as cache:
        cache.get(["a"], pool.pages([0]))
        cache.exists(["a"])
    assert lines() == []


def test_a_page_that_is_damaged_is_logged_with_the_count(lines: Callable[[], list[str]]) -> None:
    pool = a_pool()
    with a_cache(Script(get=gives([OK, Status.CORRUPT, Status.CORRUPT])), pool) as cache:
        cache.get(["a", "b", "c"], pool.pages([0, 1, 2]))
    assert lines() == ["hicache 'scripted' get: CORRUPT for 2 of 3 pages"]


def test_a_log_handler_that_raises_does_not_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise OSError("the log is full")

    logger, broken = logging.getLogger("hicache"), Broken()
    logger.addFilter(broken)
    try:
        pool = a_pool()
        with a_cache(Script(get=raises(RuntimeError("boom"))), pool) as cache:
            assert cache.get(["a"], pool.pages([0])) == [ERROR]
    finally:
        logger.removeFilter(broken)


# Nothing is left.


def test_no_thread_is_left_after_close() -> None:
    before = set(threading.enumerate())
    pool = a_pool()
    with a_cache(None, pool, bounce=True) as cache:
        cache.set(["a"], filled(pool, 0))
        cache.rebind(Identity.for_tests(weights="v2"))
        cache.set(["a"], filled(pool, 0))
    wait_until(lambda: set(threading.enumerate()) <= before, "the workers ended")


def test_no_thread_is_left_after_a_rebind_that_failed() -> None:
    before = set(threading.enumerate())
    pool, script = a_pool(), Script()
    with a_cache(script, pool, bounce=True) as cache:
        cache.set(["a"], filled(pool, 0))
        script.verbs["open"] = raises(BackendUnavailable("away"))
        cache.rebind(Identity.for_tests(weights="v2"))
        wait_until(lambda: set(threading.enumerate()) <= before, "the workers ended")


def test_a_constructor_that_raises_is_told_when_opening() -> None:
    loaded = scripted(Script(init=raises(KeyError("k"))))
    cache = HiCache(loaded, a_config(), [])
    with pytest.raises(HiCacheError) as caught:
        cache._guard.open(strict=False)
    assert caught.value.what == "constructing 'scripted' failed"
