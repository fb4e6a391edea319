"""Classes written for SGLang's interface, driven as backends: nothing is softened, nothing invented."""

# ruff: noqa: E402 - without torch there is nothing to import
from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hicache_conformance")

from hicache_core import (
    Component,
    HiCacheError,
    HostPool,
    Identity,
    Namespace,
    Placement,
    Segment,
    Status,
)
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
        alive: list = []  # noqa: RUF012
        most = 0

        def __init__(self, storage_config, kwargs=None, *, folder=""):
            self.model = storage_config.model_name
            self.folder = folder
            assert kwargs == {}
            self.alive.append(self)

        def close(self):
            self.alive.remove(self)

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
            Theirs.most = max(Theirs.most, len(keys))
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


def test_a_call_moves_no_more_pages_than_one_of_sglangs(opened, theirs):
    pool = HostPool.from_buffer(bytearray(300 * 64), KV)
    storage = opened("v1", pool)
    keys = [f"{n}.kv_0" for n in range(300)]
    assert storage.batch_set(keys, pool.pages(range(300))) == [OK] * 300
    assert storage.batch_get(keys, pool.pages(range(300))) == [OK] * 300
    assert theirs.most == 128


def test_an_instance_is_closed_once_neither_its_pool_nor_a_question_needs_it(opened, pool, theirs):
    storage = opened("v1")
    (own,) = theirs.alive
    storage.add_pool(pool)
    assert own not in theirs.alive
    storage.batch_set(KEYS[:1], pool.pages([1]))
    storage.drop_pool(pool)
    assert [type(each) for each in theirs.alive] == [theirs]
    assert storage.batch_contains(KEYS[:2]) == [OK, MISS]
    storage.close()
    assert theirs.alive == []


def test_constructor_arguments_reach_the_class_with_the_folder_of_the_run(opened, theirs):
    from hicache_sglang.reverse import ReverseHarness

    harness = ReverseHarness({"arguments": '{"folder": "{tmp}"}'})
    harness.start()
    try:
        opened("generic", **harness.options())
        (made,) = theirs.alive
        assert made.folder.startswith("/")
        assert made.folder.endswith("/store")
    finally:
        harness.stop()


def _pool(*segments, num_pages=3, nbytes=64):
    owner = bytearray(4096)
    base = ctypes.addressof(ctypes.c_char.from_buffer(owner))
    parts = tuple(Segment(base + at, stride, size) for at, stride, size in segments)
    return HostPool(replace(KV, page_nbytes=nbytes), parts, num_pages, owner=owner), base


def test_a_page_of_one_run_is_k_and_v_in_place(sglang):
    from hicache_sglang.reverse_pool import PoolOfOurs

    ours, base = _pool((0, 64, 64))
    seen = PoolOfOurs(ours)
    assert seen.layout == "page_first"
    at, sizes = seen.get_page_buffer_meta(torch.tensor([2, 0]))
    assert [address - base for address in at] == [128, 160, 0, 32]
    assert sizes == [32] * 4
    seen.get_data_page(1, flat=False)[1].fill_(7)
    assert bytes(ours.pages([1]).views(0)[0]) == bytes(32) + bytes([7]) * 32


@pytest.mark.parametrize(("k", "v"), [(0, 1000), (1000, 0)])
def test_two_runs_of_one_size_are_k_and_v(sglang, k, v):
    from hicache_sglang.reverse_pool import PoolOfOurs

    ours, base = _pool((k, 32, 32), (v, 32, 32))
    for i, view in enumerate(ours.pages([1]).views(0)):
        view[:] = bytes([i + 1]) * 32
    seen = PoolOfOurs(ours)
    assert [at - base for at in seen.get_page_buffer_meta(torch.tensor([1]))[0]] == [k + 32, v + 32]
    assert seen.get_data_page(1, flat=False).tolist() == [[1] * 32, [2] * 32]
    assert seen.get_data_page(1).tolist() == [1] * 32 + [2] * 32


@pytest.mark.parametrize(
    "segments", [((0, 63, 63),), ((0, 40, 40), (500, 23, 23)), ((0, 21, 21), (500, 21, 21), (900, 21, 21))]
)
def test_pages_without_halves_are_layer_first_and_copied(sglang, segments):
    from hicache_sglang.reverse_pool import PoolOfOurs

    ours, _ = _pool(*segments, nbytes=63)
    seen = PoolOfOurs(ours)
    assert seen.layout == "layer_first"
    assert seen.is_stride_page_aligned(1) is False
    page = torch.arange(63, dtype=torch.uint8)
    seen.set_from_flat_data_page(1, page)
    assert seen.get_data_page(1).tolist() == page.tolist()
    assert b"".join(ours.pages([1]).views(0)) == bytes(range(63))


def test_alignment_is_that_of_every_pages_k_and_v(sglang):
    from hicache_sglang.reverse_pool import PoolOfOurs

    ours, base = _pool((64, 64, 64))
    seen = PoolOfOurs(ours)
    assert seen.is_stride_page_aligned(32) is (base % 32 == 0)
    assert seen.is_stride_page_aligned(64) is False
    assert PoolOfOurs(ours, "layer_first").layout == "layer_first"


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
