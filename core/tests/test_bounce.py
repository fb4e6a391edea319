"""Bounce: private memory in front of a backend that hangs, and writes or reads when nobody waits any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from core_builders import CANARY, Geometry, a_component, a_pool, noise, page_bytes
from core_builders import fill as fill_page
from core_caches import TIMEOUT_S, WAIT_S, Hang, a_cache, a_config, filled, hanging, in_thread, wait_until
from core_toys import Script, ScriptedStorage, ScriptOptions

from hicache_core import bounce as bounce_module
from hicache_core.bounce import MAX_ABANDONED, Bouncer, pages_a_call, run_apart
from hicache_core.cache import HiCache
from hicache_core.capabilities import Capabilities
from hicache_core.errors import BackendTimeout, BackendUnavailable
from hicache_core.identity import Identity
from hicache_core.memory import HostPool, Pages
from hicache_core.status import Status
from hicache_core.storage import HiCacheStorageConfig

OK, MISS, UNAVAILABLE, TIMEOUT = Status.OK, Status.MISS, Status.UNAVAILABLE, Status.TIMEOUT


class LateWriter(Hang):
    """A get that hangs and, once let go, writes every slot that it was given."""

    def __call__(self, proceed: Any, *arguments: Any) -> Any:
        keys, locs = arguments
        self.views = [view for at in range(len(locs)) for view in locs.views(at)]
        return super().__call__(proceed, keys, locs)

    def write(self, proceed: Any, keys: Sequence[str], locs: Pages) -> list[Status]:
        for view in self.views:
            view[:] = b"\xee" * view.nbytes
        return [OK] * len(keys)


class LateReader(LateWriter):
    """A set that hangs and, once let go, reads every slot that it was given."""

    def read(self, proceed: Any, keys: Sequence[str], locs: Pages) -> list[Status]:
        self.seen = b"".join(map(bytes, self.views))
        return [OK] * len(keys)


# No late write, no late read.


@pytest.mark.clause("C11")
@pytest.mark.parametrize("how", ["asked for", "no means declared"])
def test_c11_a_get_that_is_left_behind_writes_no_slot_ever(how: str) -> None:
    """The slot is used again meanwhile: a late write would destroy somebody else's page."""
    pool, hang = a_pool(), LateWriter()
    hang.then = hang.write
    means = Capabilities(deadline="hold" if how == "asked for" else "none")
    with a_cache(
        Script(get=hang), pool, capabilities=means, bounce=how == "asked for", timeout_s=TIMEOUT_S
    ) as cache:
        assert cache.get(["a", "b"], pool.pages([0, 1])) == [TIMEOUT] * 2
        fill_page(pool.pages([0]), 0, noise(1, 64))
        hang.go.set()
        wait_until(lambda: cache.stats().abandoned == 0, "the late write was done")
    assert len(hang.views) == 2
    assert bytes(hang.views[0]) == b"\xee" * 64
    assert page_bytes(pool.pages([0]), 0) == noise(1, 64)
    assert page_bytes(pool.pages([1]), 0) == bytes([CANARY]) * 64


@pytest.mark.clause("C11")
def test_c11_a_set_that_is_left_behind_reads_what_was_set_and_no_slot_afterwards() -> None:
    """The slot is used again meanwhile: a late read would store another page under this key."""
    pool, hang = a_pool(), LateReader()
    hang.then = hang.read
    with a_cache(Script(set=hang), pool, bounce=True, timeout_s=TIMEOUT_S) as cache:
        assert cache.set(["a", "b"], filled(pool, 0, 1)) == [TIMEOUT] * 2
        fill_page(pool.pages([0]), 0, noise(9, 64))
        hang.go.set()
        wait_until(lambda: cache.stats().abandoned == 0, "the late read was done")
    assert hang.seen == noise(0, 64) + noise(1, 64)


@pytest.mark.clause("C11")
def test_c11_the_memory_of_a_call_left_behind_is_not_given_to_another() -> None:
    pool, script, hang = a_pool(), Script(), LateWriter()
    hang.then = hang.write
    with a_cache(script, pool, bounce=True, timeout_s=TIMEOUT_S) as cache:
        cache.set(["a"], filled(pool, 0))
        script.verbs["get"] = hang
        assert cache.get(["a"], pool.pages([4])) == [TIMEOUT]
        del script.verbs["get"]
        assert cache.get(["a"], pool.pages([5])) == [OK]
        hang.go.set()
        wait_until(lambda: cache.stats().abandoned == 0, "the late write was done")
        assert cache.get(["a"], pool.pages([6])) == [OK]
    assert [page_bytes(pool.pages([4, 5, 6]), at) for at in range(3)] == [
        bytes([CANARY]) * 64,
        noise(0, 64),
        noise(0, 64),
    ]


@pytest.mark.clause("C11")
def test_c11_private_memory_stays_alive_and_registered_while_a_call_left_behind_runs() -> None:
    """After the cache is closed and gone, too: native code still holds the address."""
    pool, script, hang = a_pool(), Script(), LateWriter()
    hang.then = hang.write
    script.verbs["get"] = hang
    with a_cache(script, pool, bounce=True, timeout_s=TIMEOUT_S) as cache:
        cache.get(["a"], pool.pages([0]))
        storage = script.storages[0]
        private = [known for known in storage._pools.values() if known is not pool]
        assert len(private) == 1
        del private
    del cache
    hang.go.set()
    wait_until(lambda: hang.left == 1, "the late write was done")
    assert bytes(hang.views[0]) == b"\xee" * 64


@pytest.mark.clause("C2")
def test_c2_only_ok_pages_are_copied_into_their_slots() -> None:
    pool = a_pool()

    def get(proceed: Any, keys: Sequence[str], locs: Pages) -> list[Status]:
        for at in range(len(locs)):
            fill_page(locs, at, noise(at, 64))
        return [OK, MISS, Status.CORRUPT, OK]

    with a_cache(Script(get=get), pool, bounce=True) as cache:
        assert cache.get(list("abcd"), pool.pages([7, 2, 3, 0])) == [OK, MISS, Status.CORRUPT, OK]
    canary = bytes([CANARY]) * 64
    wanted = [noise(3, 64), *[canary] * 6, noise(0, 64)]
    assert [page_bytes(pool.pages([at]), 0) for at in range(8)] == wanted


@pytest.mark.clause("C11")
def test_c11_what_is_left_behind_is_bounded_and_refused_at_once_beyond() -> None:
    pool = a_pool()
    with hanging() as hang, a_cache(Script(contains=hang), pool, bounce=True, timeout_s=0.05) as cache:
        for count in range(1, MAX_ABANDONED + 1):
            cache._guard.breaker.succeed()
            assert cache.contains(["a"]) == [TIMEOUT]
            assert cache.stats().abandoned == count
        for _ in range(3):
            cache._guard.breaker.succeed()
            started = time.monotonic()
            assert cache.contains(["a"]) == [UNAVAILABLE]
            assert time.monotonic() - started < 0.05
        assert hang.entered == MAX_ABANDONED
        hang.go.set()
        wait_until(lambda: cache.stats().abandoned == 0, "the native calls ended")
        cache._guard.breaker.succeed()
        assert cache.contains(["a"]) == [MISS]


@pytest.mark.clause("C11")
def test_c11_calls_that_hang_at_the_same_time_are_bounded_too() -> None:
    """Sixteen threads meet a store that hangs before the first of them has timed out."""
    pool = a_pool(pages=16)
    with hanging() as hang, a_cache(Script(get=hang), pool, bounce=True) as cache:
        started = time.monotonic()
        waits = [in_thread(lambda at=at: cache.get(["a"], pool.pages([at]))) for at in range(16)]  # type: ignore[misc]
        statuses = {wait()[0] for wait in waits}
        took = time.monotonic() - started
        assert statuses <= {TIMEOUT, UNAVAILABLE}
        assert hang.entered == cache.stats().abandoned == MAX_ABANDONED
        assert took < TIMEOUT_S + 2.0


def test_more_callers_than_workers_wait_for_their_turn() -> None:
    pool, script = a_pool(pages=32), Script()
    with a_cache(script, pool, bounce=True, timeout_s=WAIT_S) as cache:
        cache.set([f"h{at}" for at in range(16)], filled(pool, *range(16)))
        waits = [
            in_thread(lambda at=at: cache.get([f"h{at}"], pool.pages([16 + at])))  # type: ignore[misc]
            for at in range(16)
        ]
        assert [wait() for wait in waits] == [[OK]] * 16
        assert len(script.storages[0]._pools) <= 1 + MAX_ABANDONED
    assert [page_bytes(pool.pages([16 + at]), 0) for at in range(16)] == [noise(at, 64) for at in range(16)]


def test_a_storage_that_lives_through_a_rebind_forgets_the_private_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would keep memory registered that is given back to the system."""

    def keep_all(storage: ScriptedStorage, config: HiCacheStorageConfig, pools: Sequence[HostPool]) -> Any:
        kept.append(list(storage._pools.values()))
        storage.config = config
        return storage

    pool, script = a_pool(), Script()
    kept: list[list[HostPool]] = []
    monkeypatch.setattr(ScriptedStorage, "rebind", keep_all)
    with a_cache(script, pool, bounce=True) as cache:
        cache.set(["a"], filled(pool, 0))
        cache.rebind(Identity.for_tests(tenant="b"))
        assert cache.set(["a"], filled(pool, 0)) == [OK]
    assert kept == [[pool]]
    assert len(script.storages) == 1


# When it is used.


@pytest.mark.parametrize("dims", [(2, 2), (3, 2)], ids=["mha", "asymmetric"])
def test_pages_of_too_many_segments_are_bounced_byte_for_byte(dims: tuple[int, ...]) -> None:
    geometry = Geometry("layer_first", layers=32, pages=4, page_tokens=2, heads=1, dims=dims)
    pool = HostPool.from_tensor(geometry.halves(), a_component(geometry.page_nbytes), "layer_first")
    script, seen = Script(), []
    limited = Capabilities(max_segments=16, deadline="hold")

    def watch(proceed: Any, keys: Sequence[str], locs: Pages) -> Any:
        seen.append(locs.segments_per_page)
        return proceed()

    script.verbs.update(get=watch, set=watch)
    content = noise(5, geometry.page_nbytes)
    with a_cache(script, pool, capabilities=limited) as cache:
        fill_page(pool.pages([0]), 0, content)
        before = page_bytes(pool.pages([2]), 0)
        assert cache.set(["a"], pool.pages([0])) == [OK]
        assert cache.get(["a"], pool.pages([3])) == [OK]
        assert script.storages[0].batch_contains([f"a.{pool.component.key}"]) == [OK]
        assert script.stores[cache.namespace.id] == {f"a.{pool.component.key}": content}
    assert page_bytes(pool.pages([3]), 0) == content
    assert page_bytes(pool.pages([2]), 0) == before
    assert seen == [1, 1]


def test_loose_buffers_are_bounced_where_registration_is_needed() -> None:
    pool, script = a_pool(), Script()
    strict = Capabilities(needs_registered=True, deadline="hold")
    slot = bytearray(64)
    with a_cache(script, pool, capabilities=strict) as cache:
        assert cache.set(["a"], Pages.of_buffers([noise(1, 64)], pool.component)) == [OK]
        assert cache.get(["a"], Pages.of_buffers([slot], pool.component)) == [OK]
        assert cache.set(["b"], filled(pool, 0)) == [OK]
    assert slot == noise(1, 64)
    assert script.count("add_pool") == 1


@pytest.mark.parametrize("means", ["cancel", "bounce", "hold"])
def test_a_backend_with_a_means_of_its_own_sees_the_slots_themselves(means: Any) -> None:
    pool, seen = a_pool(), []

    def watch(proceed: Any, keys: Sequence[str], locs: Pages) -> Any:
        seen.append(locs.pool is pool)
        return proceed()

    with a_cache(Script(get=watch), pool, capabilities=Capabilities(deadline=means)) as cache:
        cache.get(["a"], pool.pages([0]))
    assert seen == [True]


def test_bounced_batches_are_split_to_the_private_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounce_module, "BOUNCE_NBYTES", 3 * 64)
    pool, script, hashes = a_pool(pages=16), Script(), [f"h{at}" for at in range(8)]
    with a_cache(script, pool, bounce=True) as cache:
        assert cache.set(hashes, filled(pool, *range(8))) == [OK] * 8
        assert cache.get(hashes, pool.pages(range(8, 16))) == [OK] * 8
    assert [size for verb, size in script.calls if verb in ("get", "set")] == [3, 3, 2, 3, 3, 2]
    assert [page_bytes(pool.pages([8 + at]), 0) for at in range(8)] == [noise(at, 64) for at in range(8)]


@pytest.mark.parametrize(
    ("nbytes", "pages"), [(1, 128), (1 << 18, 128), (1 << 20, 32), (1 << 25, 1), (1 << 30, 1)]
)
def test_private_memory_is_bounded(nbytes: int, pages: int) -> None:
    assert pages_a_call(a_component(nbytes)) == pages


# The bouncer itself.


def a_bouncer(script: Script, *pools: HostPool) -> Bouncer:
    storage = ScriptedStorage(a_config(), ScriptOptions(script=script))
    storage.open(pools)
    return Bouncer(storage)


def test_a_slot_that_cannot_be_read_gives_its_worker_back() -> None:
    device = HostPool(a_component(64), a_pool(nbytes=64).segments, 1, device="cuda:0")
    bouncer = a_bouncer(Script())
    for _ in range(3 * MAX_ABANDONED):
        with pytest.raises(ValueError, match="cannot be viewed"):
            bouncer.set_pages(["a"], device.pages([0]), 1.0)
    assert bouncer.call(lambda: 7, WAIT_S) == 7
    bouncer.close()


def test_registering_private_memory_happens_once_and_may_hang() -> None:
    pool, script = a_pool(), Script()
    with hanging() as hang:
        script.verbs["add_pool"] = hang
        bouncer = a_bouncer(script, pool)
        with pytest.raises(BackendTimeout):
            bouncer.get_pages(["a"], pool.pages([0]), 0.02)
        hang.go.set()
        wait_until(lambda: bouncer.abandoned == 0)
        for _ in range(3):
            assert bouncer.get_pages(["a"], pool.pages([0]), WAIT_S) == [MISS]
        assert script.count("add_pool") == 1
        bouncer.close()


def test_a_worker_that_met_an_error_is_used_again() -> None:
    bouncer = a_bouncer(Script())

    def fail() -> None:
        raise KeyError("k")

    threads = set()
    for _ in range(10):
        with pytest.raises(KeyError):
            bouncer.call(fail, WAIT_S)
        bouncer.call(lambda: threads.add(threading.get_ident()), WAIT_S)
    assert len(threads) == 1
    bouncer.close()


def test_after_close_calls_are_refused_and_threads_end() -> None:
    before = threading.active_count()
    bouncer = a_bouncer(Script())
    bouncer.call(lambda: None, WAIT_S)
    bouncer.close()
    bouncer.close()
    with pytest.raises(BackendUnavailable):
        bouncer.call(lambda: None, 1.0)
    wait_until(lambda: threading.active_count() == before, "the worker ended")


def test_a_waiting_caller_is_told_of_close() -> None:
    with hanging() as hang:
        bouncer = a_bouncer(Script())
        busy = [
            in_thread(lambda: bouncer.call(lambda: hang(lambda: None), WAIT_S)) for _ in range(MAX_ABANDONED)
        ]
        wait_until(lambda: hang.entered == MAX_ABANDONED)
        waiting = in_thread(lambda: bouncer.call(lambda: None, WAIT_S))
        bouncer.close()
        with pytest.raises(BackendUnavailable):
            waiting()
        hang.go.set()
        assert [wait() for wait in busy] == [None] * MAX_ABANDONED


# Slow and rare things apart.


def test_apart_gives_the_result_or_the_error() -> None:
    assert run_apart(lambda: 7, WAIT_S, what="x") == 7
    with pytest.raises(ZeroDivisionError):
        run_apart(lambda: 1 // 0, WAIT_S, what="x")


def test_apart_leaves_behind_and_tells_of_the_late_result() -> None:
    late: list[int] = []
    with hanging() as hang:
        with pytest.raises(BackendTimeout) as caught:
            run_apart(lambda: hang(lambda: 7), 0.02, what="opening 'x'", late=late.append)
        assert str(caught.value) == (
            "opening 'x': no answer within 0.02 s. Look at the store, or raise timeout_s."
        )
        assert late == []
        hang.go.set()
        wait_until(lambda: late == [7])


def test_apart_bounds_what_it_leaves_behind() -> None:
    left: list[threading.Thread] = []
    with hanging() as hang:
        for _ in range(MAX_ABANDONED):
            with pytest.raises(BackendTimeout):
                run_apart(lambda: hang(lambda: None), 0.01, what="opening 'x'", left_behind=left)
        with pytest.raises(BackendUnavailable) as caught:
            run_apart(lambda: None, 0.01, what="opening 'x'", left_behind=left)
        assert str(caught.value) == (
            "opening 'x': 4 earlier attempts still run. Look at the store; it is tried again once they end."
        )
        hang.go.set()
        wait_until(lambda: not any(thread.is_alive() for thread in left))
        assert run_apart(lambda: 7, WAIT_S, what="opening 'x'", left_behind=left) == 7


def test_the_cache_itself_is_not_kept_alive_by_its_workers() -> None:
    pool = a_pool()
    with a_cache(None, pool, bounce=True) as cache:
        assert isinstance(cache, HiCache)
        cache.get(["a"], pool.pages([0]))
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "hicache-bounce"])


@pytest.mark.clause("C11")
def test_callers_are_served_in_the_order_in_which_they_came() -> None:
    """Who gave a worker back took it again, and of six busy threads two met their deadlines each time."""
    with a_cache(Script(), a_pool(), bounce=True) as cache:
        bouncer, order = Bouncer(cache.storage), []
        held = [bouncer._take(time.monotonic() + WAIT_S) for _ in range(MAX_ABANDONED)]

        def wait() -> None:
            worker = bouncer._take(time.monotonic() + WAIT_S)
            order.append("who waited")
            bouncer._give_back(worker)

        waited = in_thread(wait)
        wait_until(lambda: len(bouncer._waiting) == 1, "it waits")
        bouncer._give_back(held.pop())
        held.append(bouncer._take(time.monotonic() + WAIT_S))
        order.append("who came later")
        waited()
        for worker in held:
            bouncer._give_back(worker)
        bouncer.close()
    assert order == ["who waited", "who came later"]
