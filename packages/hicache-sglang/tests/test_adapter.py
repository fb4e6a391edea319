"""HiCacheSGLang over the real interface of the newest SGLang: what attach refuses, what calls answer."""

# ruff: noqa: E402 - without torch there is nothing to import
from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import sgl_release
import sgl_toy

from hicache_core.errors import BackendNotFound, InvalidOptions

PAGE = 4
KEYS = [f"{n:064x}" for n in range(4)]


@pytest.fixture
def adapter(sglang):
    from hicache_sglang.adapter import HiCacheSGLang

    sgl_toy.STORE.clear()
    sgl_toy.CALLS.clear()
    made = []

    def make(extra=None, **values):
        chosen = {"backend_name": "dynamic", "interface_v1": 1, "options": sgl_toy.OPTIONS} | (extra or {})
        made.append(HiCacheSGLang(sgl_release.storage_config(chosen, **values), {}))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def pool(sglang):
    made = sgl_release.host_pool(sglang, "mha", "page_first")
    sgl_release.fill(made)
    return made


def at(*pages, page_size=PAGE):
    return sgl_release.indices_of(list(pages), page_size)


def raw(pool, page):
    return (
        pool.get_data_page(page * pool.page_size, flat=True).contiguous().view(torch.uint8).numpy().tobytes()
    )


# Attach.


def test_constructor_touches_nothing(adapter):
    adapter()
    assert sgl_toy.CALLS == []


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        (
            {"options": sgl_toy.OPTIONS | {"mode_fil": "x"}},
            InvalidOptions,
            "mode_fil is unknown (mode_file?)",
        ),
        ({"tenent": "a"}, InvalidOptions, "tenent is unknown (tenant?)"),
        ({"backend_name": ""}, InvalidOptions, "backend_name is required"),
        ({"backend_name": "moncake", "options": {}}, BackendNotFound, "moncake"),
    ],
    ids=["backend option", "adapter option", "no backend", "unknown backend"],
)
def test_what_is_not_valid_stops_at_the_constructor(adapter, extra, error, words):
    with pytest.raises(error) as refused:
        adapter(extra)
    assert words in str(refused.value)


def test_a_dead_store_at_attach_is_one_log_line_and_misses(adapter, pool, tmp_path, caplog):
    (tmp_path / "mode").write_text("dead")
    backend = adapter({"options": sgl_toy.OPTIONS | {"mode_file": str(tmp_path / "mode")}})
    backend.register_mem_pool_host(pool)
    assert backend.batch_exists(KEYS) == 0
    assert backend.batch_get_v1(KEYS, at(0, 1, 2, 3)) == [False] * 4
    assert len([line for line in caplog.messages if "it will be tried again" in line]) == 1


def test_the_same_pool_twice_is_one_and_another_of_its_name_takes_its_place(adapter, pool, sglang):
    backend = adapter()
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, "kv")
    assert [verb for verb, _ in sgl_toy.CALLS] == ["open"]
    assert backend.batch_set_v1(KEYS, at(0, 1, 2, 3)) == [True] * 4
    other = sgl_release.host_pool(sglang, "mha", "page_first")
    backend.register_mem_host_pool_v2(other, "kv")
    assert backend.batch_get_v1(KEYS, at(4, 5, 6, 7)) == [True] * 4
    assert [raw(other, page) for page in (4, 5, 6, 7)] == [raw(pool, page) for page in range(4)]


def test_a_sidecar_added_late_is_served(adapter, pool, sglang):
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    backend = adapter(is_mla_model=True)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    late = sgl_release.host_pool(sglang, "mla", "page_first")
    sgl_release.fill(late)
    transfer = PoolTransfer(name=PoolName.INDEXER, host_indices=at(1, 2), keys=KEYS[:2])
    assert backend.batch_set_v2([transfer]) == {"indexer": [False, False]}
    backend.register_mem_host_pool_v2(late, PoolName.INDEXER)
    assert backend.batch_set_v2([transfer]) == {"indexer": [True, True]}


def test_missing_interface_v1_is_said_once(adapter, pool, caplog):
    backend = adapter({"interface_v1": 0})
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, "kv")
    assert len([line for line in caplog.messages if '"interface_v1" is not set' in line]) == 1


def test_split_heads_need_the_zero_copy_calls(adapter, sglang):
    from hicache_sglang.geometry import PoolRefused

    pool = sgl_release.host_pool(sglang, "mha", "page_head")
    backend = adapter({"interface_v1": 0}, tp_lcm_size=2, should_split_heads=True)
    with pytest.raises(PoolRefused, match="interface_v1 is not set"):
        backend.register_mem_pool_host(pool)


# Calls.


def test_pages_come_back_into_their_own_slots_and_no_other(adapter, pool, sglang):
    backend = adapter()
    backend.register_mem_pool_host(pool)
    wanted = [raw(pool, page) for page in (4, 1, 6)]
    assert backend.batch_set_v1(KEYS[:3], at(4, 1, 6)) == [True] * 3
    sgl_release.fill(pool, seed=9)
    before = [raw(pool, page) for page in range(8)]
    assert backend.batch_get_v1([KEYS[0], KEYS[3], KEYS[2]], at(0, 3, 7)) == [True, False, True]
    assert [raw(pool, page) for page in range(8)] == [wanted[0], *before[1:7], wanted[2]]


@pytest.mark.parametrize(
    "indices",
    [at(0, 1)[:-1], at(0, 1) + 1, torch.tensor([0, 1, 2, 4, 4, 5, 6, 7]), at(7, 8), None],
    ids=["too few", "not aligned", "with a gap", "outside", "none"],
)
def test_a_page_that_is_not_whole_in_its_place_is_not_stored(adapter, pool, indices):
    backend = adapter()
    backend.register_mem_pool_host(pool)
    stored = backend.batch_set_v1(KEYS[:2], indices)
    assert len(stored) == 2
    assert len(sgl_toy.STORE) == sum(stored) < 2


def test_generic_and_zero_copy_calls_store_the_same_pages(adapter, pool):
    one, other = adapter(), adapter({"interface_v1": 0})
    one.register_mem_pool_host(pool)
    other.register_mem_pool_host(pool)
    assert one.batch_set_v1(KEYS[:2], at(3, 5)) == [True] * 2
    tensors = [torch.zeros(pool.get_dummy_flat_data_page().shape, dtype=pool.dtype) for _ in range(3)]
    got = other.batch_get(KEYS[:3], tensors)
    assert got[2] is None
    assert [page.view(torch.uint8).numpy().tobytes() for page in got[:2]] == [
        raw(pool, page) for page in (3, 5)
    ]
    assert all(page is tensor for page, tensor in zip(got, tensors[:2], strict=False))
    assert other.set(KEYS[3], tensors[2])
    assert (other.exists(KEYS[3]), one.batch_exists(KEYS)) == (True, 2)
    assert other.get(KEYS[0], tensors[2]) is tensors[2]


@pytest.mark.parametrize(
    "target",
    [None, torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 384, dtype=torch.bfloat16).t()],
    ids=["none", "another size", "not contiguous"],
)
def test_a_tensor_that_cannot_hold_a_page_is_a_miss(adapter, pool, target):
    backend = adapter()
    backend.register_mem_pool_host(pool)
    backend.batch_set_v1(KEYS[:1], at(0))
    assert backend.get(KEYS[0], target) is None
    assert backend.set(KEYS[1], target) is False


def test_one_tensor_that_does_not_fit_costs_no_other_its_page(adapter, pool):
    backend = adapter()
    backend.register_mem_pool_host(pool)
    backend.batch_set_v1(KEYS[:3], at(0, 1, 2))
    good, bad = pool.get_dummy_flat_data_page(), torch.zeros(3, dtype=torch.bfloat16)
    got = backend.batch_get(KEYS[:3], [good, bad, good.clone()])
    assert [page is None for page in got] == [False, True, False]
    assert got[0].view(torch.uint8).numpy().tobytes() == raw(pool, 0)
    assert backend.batch_set(["e" * 64, "f" * 64], [bad, good]) is False
    assert (backend.exists("e" * 64), backend.exists("f" * 64)) == (False, True)


def test_head_groups_of_one_rank_are_the_whole_pages_of_two(adapter, sglang):
    """Rank 0 of 1 writes with two head groups; ranks 0 and 1 of 2 read half the heads each."""
    writer, whole = (
        adapter(tp_lcm_size=2, should_split_heads=True),
        sgl_release.host_pool(sglang, "mha", "page_head"),
    )
    sgl_release.fill(whole)
    writer.register_mem_pool_host(whole)
    assert writer.batch_set_v1(KEYS[:2], at(2, 3)) == [True] * 2
    assert (writer.batch_exists(KEYS), len(sgl_toy.STORE)) == (2, 4)
    for rank in (0, 1):
        reader = adapter(tp_rank=rank, tp_size=2, tp_lcm_size=2)
        half = sgl_release.host_pool(sglang, "mha", "page_head", heads=1)
        reader.register_mem_pool_host(half)
        assert reader.batch_get_v1(KEYS[:2], at(0, 1)) == [True] * 2
        assert torch.equal(
            half.kv_buffer[:, :2].view(torch.uint8),
            whole.kv_buffer[:, 2:4, rank : rank + 1].contiguous().view(torch.uint8),
        )


def test_a_page_with_a_missing_head_group_is_missing(adapter, sglang):
    backend, pool = (
        adapter(tp_lcm_size=2, should_split_heads=True),
        sgl_release.host_pool(sglang, "mha", "page_head"),
    )
    backend.register_mem_pool_host(pool)
    backend.batch_set_v1(KEYS[:2], at(2, 3))
    del sgl_toy.STORE[next(name for name in sgl_toy.STORE if KEYS[1] in name)]
    assert backend.batch_exists(KEYS[:2]) == 1
    assert backend.batch_get_v1(KEYS[:2], at(0, 1)) == [True, False]


def test_flat_pools_move_through_copies(adapter, pool):
    def no_addresses(indices):
        raise NotImplementedError("no addresses")

    pool.get_page_buffer_meta = no_addresses
    backend = adapter()
    backend.register_mem_pool_host(pool)
    wanted = raw(pool, 5)
    assert backend.batch_set_v1(KEYS[:1], at(5)) == [True]
    sgl_release.fill(pool, seed=9)
    before = [raw(pool, page) for page in range(8)]
    assert backend.batch_get_v1(KEYS[:2], at(2, 3)) == [True, False]
    assert [raw(pool, page) for page in range(8)] == [*before[:2], wanted, *before[3:]]
    assert backend.batch_exists(KEYS) == 1


@pytest.mark.parametrize("key", ["d:{}", "{}.draft"], ids=["0.5.12", "0.5.15"])
def test_draft_pages_under_the_keys_of_older_releases_are_a_component_of_their_own(adapter, pool, key):
    backend = adapter({"interface_v1": 0})
    backend.register_mem_pool_host(pool)
    page, keys = torch.arange(24, dtype=torch.uint8), [key.format(one) for one in KEYS[:2]]
    assert backend.batch_set(keys, [page, page + 1])
    assert backend.batch_exists(KEYS) == 0
    got = backend.batch_get(
        [*keys, key.format(KEYS[2])], [torch.zeros(24, dtype=torch.uint8) for _ in range(3)]
    )
    assert [None if one is None else one.tolist() for one in got] == [
        page.tolist(),
        (page + 1).tolist(),
        None,
    ]


def test_whatever_the_store_raises_every_call_answers_and_one_line_says_so(adapter, pool, tmp_path, caplog):
    mode = tmp_path / "mode"
    backend = adapter({"options": sgl_toy.OPTIONS | {"mode_file": str(mode)}})
    backend.register_mem_pool_host(pool)
    mode.write_text("raise")
    for _ in range(3):
        assert backend.batch_exists(KEYS) == 0
        assert backend.batch_get_v1(KEYS, at(0, 1, 2, 3)) == [False] * 4
        assert backend.batch_set_v1(KEYS, at(0, 1, 2, 3)) == [False] * 4
        assert backend.batch_exists_v2(KEYS, []).kv_hit_pages == 0
    assert len([line for line in caplog.messages if "exists: ERROR" in line]) == 1


def test_malformed_keys_are_misses_for_the_whole_call(adapter, pool):
    backend = adapter()
    backend.register_mem_pool_host(pool)
    assert backend.batch_exists(["../escape"]) == 0
    assert backend.batch_get_v1(["a b", KEYS[0]], at(0, 1)) == [False, False]
    assert sgl_toy.STORE == {}


def test_calls_before_the_first_pool_and_after_close_are_misses(adapter, pool):
    backend = adapter()
    assert (backend.batch_exists(KEYS), backend.batch_get_v1(KEYS, at(0, 1, 2, 3))) == (0, [False] * 4)
    assert backend.clear() is False
    backend.register_mem_pool_host(pool)
    backend.close()
    backend.close()
    assert (backend.batch_exists(KEYS), backend.batch_set(KEYS, [None] * 4)) == (0, False)


def test_clear_removes_this_models_pages_and_no_others(adapter, pool):
    one, other = adapter(), adapter(model_name="org/other")
    for backend in (one, other):
        backend.register_mem_pool_host(pool)
        backend.batch_set_v1(KEYS[:2], at(0, 1))
    assert one.clear() is True
    assert (one.batch_exists(KEYS), other.batch_exists(KEYS)) == (0, 2)


def test_stats_are_reported_once_and_only_when_metered(adapter, pool, monkeypatch):
    from hicache_sglang import metrics

    def storage_metrics():
        return SimpleNamespace(prefetch_pgs=[], backup_pgs=[], prefetch_bandwidth=[], backup_bandwidth=[])

    monkeypatch.setattr(metrics, "_find_metrics_class", lambda: storage_metrics)
    backend, quiet = adapter(enable_storage_metrics=True), adapter()
    for each in (backend, quiet):
        each.register_mem_pool_host(pool)
        each.batch_set_v1(KEYS[:2], at(0, 1))
        each.batch_get_v1(KEYS[:3], at(2, 3, 4))
    first, second = backend.get_stats(), backend.get_stats()
    assert (first.backup_pgs, first.prefetch_pgs, second.backup_pgs) == ([2], [2], [])
    assert first.backup_bandwidth[0] > 0
    assert quiet.get_stats() is None


def test_stored_pages_are_off_while_the_weights_change(adapter, pool):
    backend = adapter()
    backend.register_mem_pool_host(pool)
    backend.batch_set_v1(KEYS[:1], at(0))
    backend._weights.weights_changing()
    assert (backend.batch_exists(KEYS), backend.batch_set_v1(KEYS, at(0, 1, 2, 3))) == (0, [False] * 4)
    assert len(sgl_toy.STORE) == 1


def test_three_threads_at_once_get_their_own_pages(adapter, pool):
    backend = adapter()
    backend.register_mem_pool_host(pool)
    pages = {n: raw(pool, n) for n in range(6)}
    failures = []

    def work(first):
        for round_number in range(20):
            keys = [f"{first:032x}{round_number:032x}", f"{first + 1:032x}{round_number:032x}"]
            good = (
                backend.batch_set_v1(keys, at(first, first + 1)) == [True] * 2
                and backend.batch_exists(keys) == 2
            )
            good &= backend.batch_get_v1(keys, at(first, first + 1)) == [True] * 2
            if not good or [raw(pool, first), raw(pool, first + 1)] != [pages[first], pages[first + 1]]:
                failures.append((first, round_number))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


# Several pools.


def transfers(name, *, keys=(), policy="all_pages", **geometry):
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    return PoolTransfer(name=PoolName(name), keys=list(keys), hit_policy=PoolHitPolicy(policy), **geometry)


@pytest.fixture
def hybrid(adapter, sglang):
    backend = adapter(is_mla_model=True)
    for seed, (name, page_size) in enumerate(
        {"kv": PAGE, "indexer": PAGE, "mamba": 1, "deepseek_v4_c4": PAGE}.items()
    ):
        pool = sgl_release.host_pool(sglang, "mla", "page_first", page_size=page_size)
        sgl_release.fill(pool, seed)
        if name == "kv":
            backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, name)
    backend.batch_set_v1(KEYS, at(0, 1, 2, 3))
    return backend


def store(backend, name, keys, page_size=PAGE):
    transfer = transfers(name, keys=keys, host_indices=at(*range(len(keys)), page_size=page_size))
    assert backend.batch_set_v2([transfer]) == {name: [True] * len(keys)}


def test_every_restorable_length_is_given_since_ranks_intersect_them(hybrid):
    store(hybrid, "mamba", [KEYS[0], KEYS[2]], page_size=1)
    hit = hybrid.batch_exists_v2(KEYS, [transfers("mamba", keys=[KEYS[3]], policy="trailing_pages")])
    assert (hit.kv_hit_pages, hit.restorable_prefix_pages) == (3, [1, 3])
    assert hit.extra_pool_hit_pages == {"kv": 4, "mamba": 3}


def test_an_all_pages_pool_cuts_at_its_first_hole(hybrid):
    store(hybrid, "indexer", [KEYS[0], KEYS[1], KEYS[3]])
    hit = hybrid.batch_exists_v2(KEYS, [transfers("indexer", keys=KEYS)])
    assert (hit.kv_hit_pages, hit.restorable_prefix_pages) == (2, [1, 2])
    assert hit.extra_pool_hit_pages == {"kv": 4, "indexer": 2}


def test_block_groups_are_reported_and_never_gate(hybrid):
    store(hybrid, "deepseek_v4_c4", [KEYS[1]])
    groups = transfers("deepseek_v4_c4", keys=KEYS, policy="block_groups", block_pages=2, group_pages=1)
    hit = hybrid.batch_exists_v2(KEYS, [groups])
    assert (hit.kv_hit_pages, hit.restorable_prefix_pages) == (4, [1, 2, 3, 4])
    assert hit.extra_pool_hit_pages == {"kv": 4, "deepseek_v4_c4": 2}


def test_a_pool_that_was_never_registered_leaves_nothing_to_restore(hybrid):
    hit = hybrid.batch_exists_v2(KEYS, [transfers("swa", keys=KEYS[:1], policy="trailing_pages")])
    assert (hit.kv_hit_pages, hit.extra_pool_hit_pages, hit.restorable_prefix_pages) == (0, {}, [])


def test_without_sidecars_every_length_of_the_kv_run_is_restorable(hybrid):
    hit = hybrid.batch_exists_v2(KEYS, None)
    assert (hit.kv_hit_pages, hit.restorable_prefix_pages) == (4, [1, 2, 3, 4])


def test_a_transfer_without_indices_or_keys_is_answered(hybrid):
    assert hybrid.batch_get_v2([transfers("indexer", keys=KEYS)]) == {"indexer": [False] * 4}
    assert hybrid.batch_get_v2([transfers("indexer")]) == {"indexer": []}
    assert hybrid.batch_set_v2(None) == {}
