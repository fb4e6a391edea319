"""What HiCacheStorage gives every backend: states, pools, refusals, defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from core_builders import a_component, a_pool
from core_toys import SPEC, ToyOptions, ToyStorage

from hicache_core.capabilities import Capabilities
from hicache_core.errors import (
    BackendTimeout,
    BackendUnavailable,
    HiCacheError,
    InvalidArgument,
    InvalidPages,
    StorageClosed,
    StorageNotOpened,
    UnsupportedOperation,
)
from hicache_core.identity import Identity, Namespace, Placement
from hicache_core.memory import HostPool, Pages
from hicache_core.status import Status
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig, Usage


def a_config(timeout_s: float = 1.0, **identity: Any) -> HiCacheStorageConfig:
    made = Identity.for_tests(**identity)
    return HiCacheStorageConfig(
        namespace=Namespace.of(made), identity=made, placement=Placement(), timeout_s=timeout_s
    )


def an_open_toy(*pools: HostPool) -> ToyStorage:
    toy = ToyStorage(a_config(), ToyOptions())
    toy.open(pools)
    return toy


class Bare(HiCacheStorage):
    """The least that a backend must have."""

    spec = dataclasses.replace(SPEC, name="bare", capabilities=Capabilities())
    answer: Sequence[Status] = ()

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        return list(self.answer)

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return []

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        return []

    def usage(self) -> Usage:
        return Usage(0, 0, 0, None)


def an_open_bare(*answer: Status) -> Bare:
    bare = Bare(a_config(), ToyOptions())
    bare.answer = answer
    bare.open()
    return bare


# States.


VERBS: dict[str, Any] = {
    "batch_contains": lambda storage, pool: storage.batch_contains(["k"]),
    "batch_exists": lambda storage, pool: storage.batch_exists(["k"]),
    "batch_get": lambda storage, pool: storage.batch_get(["k"], pool.pages([0])),
    "batch_set": lambda storage, pool: storage.batch_set(["k"], pool.pages([0])),
    "batch_remove": lambda storage, pool: storage.batch_remove(["k"]),
    "touch": lambda storage, pool: storage.touch(["k"]),
    "clear": lambda storage, pool: storage.clear(),
    "usage": lambda storage, pool: storage.usage(),
    "add_pool": lambda storage, pool: storage.add_pool(pool),
    "drop_pool": lambda storage, pool: storage.drop_pool(pool),
}


@pytest.mark.clause("C10")
@pytest.mark.parametrize("verb", VERBS)
def test_c10_a_verb_before_open_is_refused(verb: str) -> None:
    with pytest.raises(StorageNotOpened):
        VERBS[verb](ToyStorage(a_config(), ToyOptions()), a_pool())


@pytest.mark.clause("C12")
@pytest.mark.parametrize("verb", VERBS)
def test_c12_a_verb_after_close_is_refused(verb: str) -> None:
    pool = a_pool()
    toy = an_open_toy(pool)
    toy.close()
    toy.close()
    with pytest.raises(StorageClosed):
        VERBS[verb](toy, pool)


@pytest.mark.clause("C12")
def test_c12_a_closed_instance_is_not_opened_again() -> None:
    toy = an_open_toy()
    toy.close()
    with pytest.raises(StorageClosed):
        toy.open()
    assert not toy.is_open


def test_the_constructor_does_nothing_but_keep() -> None:
    config, options = a_config(), ToyOptions()
    toy = ToyStorage(config, options)
    assert (toy.config, toy.options, toy.capabilities, toy.is_open) == (
        *(config, options, SPEC.capabilities),
        False,
    )


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), "5", None, True])
def test_a_deadline_that_is_none_is_refused(timeout_s: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        a_config(timeout_s)
    assert str(caught.value) == (
        f"timeout_s is not a time: {timeout_s!r}. Give seconds above 0, for example 5.0."
    )


# Pools and misuse.


def test_the_same_pool_twice_is_one_and_an_unknown_one_is_dropped_in_silence() -> None:
    pool = a_pool()
    toy = an_open_toy()
    toy.add_pool(pool)
    toy.add_pool(pool)
    assert list(toy._pools.values()) == [pool]
    toy.drop_pool(pool)
    toy.drop_pool(pool)
    assert toy._pools == {}


@pytest.mark.clause("C10")
@pytest.mark.parametrize("verb", ["batch_get", "batch_set"])
def test_c10_unequal_lengths_are_misuse(verb: str) -> None:
    pool = a_pool()
    with pytest.raises(InvalidPages) as caught:
        getattr(an_open_toy(pool), verb)(["a", "b"], pool.pages([0]))
    assert str(caught.value) == (
        "a batch of 'toy' has unequal lengths: 2 keys, 1 pages. Pass one page for each key."
    )


@pytest.mark.clause("C10")
@pytest.mark.parametrize("verb", ["batch_get", "batch_set"])
def test_c10_an_unknown_pool_is_misuse(verb: str) -> None:
    with pytest.raises(InvalidPages) as caught:
        getattr(an_open_toy(a_pool()), verb)(["a"], a_pool().pages([0]))
    assert str(caught.value) == (
        "pages of a pool that 'toy' does not know: component 'kv'. "
        "Pass the pool to open() or add_pool() first."
    )


@pytest.mark.clause("C10")
def test_c10_a_dropped_pool_is_unknown() -> None:
    pool = a_pool()
    toy = an_open_toy(pool)
    toy.drop_pool(pool)
    with pytest.raises(InvalidPages):
        toy.batch_get(["a"], pool.pages([0]))


@pytest.mark.clause("C10")
def test_c10_a_get_into_read_only_slots_is_misuse_and_a_set_from_them_is_not() -> None:
    toy = an_open_toy()
    pages = Pages.of_buffers([b"x" * 16], a_component(16))
    assert toy.batch_set(["a"], pages) == [Status.OK]
    with pytest.raises(InvalidPages) as caught:
        toy.batch_get(["a"], pages)
    assert str(caught.value) == "a get needs writable slots: read-only buffers. Pass writable memory."


@pytest.mark.clause("C10")
def test_c10_loose_buffers_are_misuse_where_registration_is_needed() -> None:
    toy = an_open_toy()
    toy.capabilities = dataclasses.replace(toy.capabilities, needs_registered=True)
    with pytest.raises(InvalidPages) as caught:
        toy.batch_set(["a"], Pages.of_buffers([b"x" * 16], a_component(16)))
    assert caught.value.what == "'toy' needs registered memory"


# Defaults.


@pytest.mark.clause("C13")
def test_c13_what_is_not_declared_is_refused() -> None:
    bare = an_open_bare()
    with pytest.raises(UnsupportedOperation) as removing:
        bare.batch_remove(["a"])
    with pytest.raises(UnsupportedOperation) as clearing:
        bare.clear()
    assert (removing.value.capability, clearing.value.capability) == ("remove", "clear")
    assert removing.value.operation == "remove pages"


def test_touching_does_nothing_by_default() -> None:
    bare = an_open_bare()
    bare.touch(["a"])
    assert bare.is_open


@pytest.mark.parametrize(
    ("answer", "run"),
    [
        ([], 0),
        ([Status.OK], 1),
        ([Status.MISS, Status.OK], 0),
        ([Status.OK, Status.OK, Status.CORRUPT, Status.OK], 2),
        ([Status.OK, Status.UNAVAILABLE], 1),
        ([Status.OK, Status.TIMEOUT], 1),
        ([Status.ERROR], 0),
    ],
)
def test_exists_counts_the_leading_ok(answer: list[Status], run: int) -> None:
    assert an_open_bare(*answer).batch_exists(["k"] * len(answer)) == run


@pytest.mark.clause("C10")
@pytest.mark.parametrize(
    ("status", "error"), [(Status.UNAVAILABLE, BackendUnavailable), (Status.TIMEOUT, BackendTimeout)]
)
def test_c10_exists_raises_where_the_first_answer_is_unknown(
    status: Status, error: type[HiCacheError]
) -> None:
    bare = an_open_bare(status, Status.OK)
    with pytest.raises(error) as caught:
        bare.batch_exists(["a", "b"])
    assert type(caught.value) is error
    assert caught.value.what == "'bare' could not tell which pages exist"


def test_rebind_closes_this_instance_and_opens_another_for_the_new_namespace() -> None:
    pool = a_pool()
    toy = an_open_toy(pool)
    fresh = toy.rebind(a_config(tenant="b"), [pool])
    assert type(fresh) is ToyStorage
    assert (toy.is_open, fresh.is_open) == (False, True)
    assert (fresh.config.identity.tenant, list(fresh._pools.values())) == ("b", [pool])
    assert fresh.options is toy.options


def test_a_rebind_that_fails_leaves_this_instance_closed() -> None:
    class Failing(ToyStorage):
        fails = False

        def open(self, pools: Sequence[HostPool] = ()) -> None:
            if self.fails:
                raise BackendUnavailable("opening 'toy'")
            super().open(pools)

    toy = Failing(a_config(), ToyOptions())
    toy.open()
    Failing.fails = True
    with pytest.raises(BackendUnavailable):
        toy.rebind(a_config(tenant="b"), [])
    assert not toy.is_open
