"""Classes written for SGLang's interface, driven as backends: nothing is softened, nothing invented."""

# ruff: noqa: E402 - without torch there is nothing to import
from __future__ import annotations

import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hicache_conformance")

from hicache_core import Component, HiCacheError, HostPool, Identity, Namespace, Placement, Status
from hicache_core.storage import HiCacheStorageConfig

OK, MISS, ERROR = Status.OK, Status.MISS, Status.ERROR
KV = Component("kv", shard="whole", byte_order="page_first", format="u8", page_nbytes=64)
KEYS = [f"{n}.kv_0" for n in range(3)]


@pytest.fixture
def theirs(sglang, monkeypatch):
    """A class as a third party writes it, with the three generations of calls."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    class Theirs(HiCacheStorage):
        store: dict = {}  # noqa: RUF012 - like a server, it outlives its clients
        lies = ""

        def __init__(self, storage_config, kwargs=None):
            self.model = storage_config.model_name
            assert kwargs == {}

        def get(self, key, target_location=None, target_sizes=None):
            page = self.store.get((self.model, key))
            return None if page is None else target_location.copy_(page)

        def batch_get(self, keys, target_locations=None, target_sizes=None):
            pages = [self.get(key, tensor) for key, tensor in zip(keys, target_locations, strict=True)]
            return pages[:-1] if self.lies == "short" else pages

        def set(self, key, value=None, target_location=None, target_sizes=None):
            self.store[self.model, key] = value.clone()
            return True

        def batch_set(self, keys, values=None, target_locations=None, target_sizes=None):
            return self.lies != "full" and all(map(self.set, keys, values))

        def exists(self, key):
            return (self.model, key) in self.store

        def batch_get_v1(self, keys, host_indices, extra_info=None):
            found = [self.get(key, self.mem_pool_host.get_dummy_flat_data_page()) for key in keys]
            if self.lies == "short":
                return [page is not None for page in found[:-1]]
            for index, page in zip(host_indices.tolist(), found, strict=True):
                if page is not None:
                    self.mem_pool_host.set_from_flat_data_page(index, page)
            return [page is not None for page in found]

        def batch_set_v1(self, keys, host_indices, extra_info=None):
            pages = [self.mem_pool_host.get_data_page(index) for index in host_indices.tolist()]
            return list(map(self.set, keys, pages))

        def batch_get_v2(self, transfers, extra_info=None):
            return {each.name: self.batch_get_v1(each.keys, each.host_indices) for each in transfers}

        def batch_set_v2(self, transfers, extra_info=None):
            return {each.name: self.batch_set_v1(each.keys, each.host_indices) for each in transfers}

        def clear(self):
            self.store.clear()

    module = ModuleType("their_store")
    module.Theirs = Theirs
    monkeypatch.setitem(sys.modules, "their_store", module)
    return Theirs


@pytest.fixture
def opened(theirs):
    from hicache_sglang.reverse import subject

    made = []

    def open_one(calls, pool=None, model="m", **options):
        identity = Identity.for_tests(model=model)
        config = HiCacheStorageConfig(
            namespace=Namespace.of(identity), identity=identity, placement=Placement(), timeout_s=5.0
        )
        made.append(subject("their_store:Theirs").create(config, {"calls": calls, **options}))
        made[-1].open([pool] if pool is not None else [])
        return made[-1]

    yield open_one
    for storage in made:
        storage.close()


@pytest.fixture
def pool():
    return HostPool.from_buffer(bytearray(range(256)) * 2, KV)


@pytest.mark.parametrize("calls", ["generic", "v1", "v2"])
def test_pages_go_round_through_each_generation_of_calls(opened, pool, calls):
    storage = opened(calls, pool)
    wanted = bytes(pool.pages([1]).views(0)[0])
    assert storage.batch_set(KEYS[:2], pool.pages([1, 2])) == [OK, OK]
    assert storage.batch_contains(KEYS) == [OK, OK, MISS]
    assert storage.batch_exists(KEYS) == 2
    pool.pages([5]).views(0)[0][:] = bytes(64)
    assert storage.batch_get([KEYS[0], KEYS[2]], pool.pages([5, 6])) == [OK, MISS]
    assert bytes(pool.pages([5]).views(0)[0]) == wanted
    assert (storage.usage().pages, storage.usage().bytes) == (2, 128)
    assert storage.batch_get([], pool.pages([])) == []


def test_a_short_answer_and_a_false_batch_stay_what_they_are(opened, pool, theirs):
    storage = opened("generic", pool)
    storage.batch_set(KEYS[:2], pool.pages([1, 2]))
    theirs.lies = "short"
    assert storage.batch_get(KEYS[:2], pool.pages([1, 2])) == [OK, ERROR]
    theirs.lies = "full"
    assert storage.batch_set(KEYS, pool.pages([1, 2, 3])) == [ERROR] * 3


@pytest.mark.parametrize("calls", ["v1", "v2"])
def test_a_short_answer_in_place_is_no_page(opened, pool, theirs, calls):
    storage = opened(calls, pool)
    storage.batch_set(KEYS[:2], pool.pages([1, 2]))
    theirs.lies = "short"
    assert storage.batch_get(KEYS[:2], pool.pages([1, 2])) == [OK, ERROR]


def test_a_clear_that_reaches_too_far_is_seen(opened, pool):
    one, other = opened("generic", pool), opened("generic", pool, model="other")
    for storage in (one, other):
        storage.batch_set(KEYS[:1], pool.pages([1]))
    assert one.clear() == 1
    assert other.batch_contains(KEYS[:1]) == [MISS]


def test_promises_can_be_taken_back(opened):
    storage = opened("generic", clear=False, durable=False)
    assert (storage.capabilities.clear, storage.capabilities.durable, storage.capabilities.shared) == (
        False,
        False,
        True,
    )


def test_a_class_that_is_not_there_is_said(sglang):
    from hicache_sglang.reverse import subject

    identity = Identity.for_tests()
    config = HiCacheStorageConfig(namespace=Namespace.of(identity), identity=identity, placement=Placement())
    with pytest.raises(HiCacheError, match="'no_such_module:Class' cannot be loaded"):
        subject("no_such_module:Class").create(config, {}).open()


def test_processes_count_each_others_keys(tmp_path):
    from hicache_sglang.reverse import Ledger

    one, other = Ledger(str(tmp_path / "ledger"), "a"), Ledger(str(tmp_path / "ledger"), "a")
    one.note(["k1", "k2"], 64)
    Ledger(str(tmp_path / "ledger"), "b").note(["k3"], 64)
    assert other.read() == {"k1": 64, "k2": 64}
