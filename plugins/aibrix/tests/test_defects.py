"""What AIBrix's library, and SGLang's backend over it, got wrong, and that it is right here.

Sources: aibrix-kvcache 0.8.0, ``cache_manager.py``, ``l2/l2_cache.py``, ``l2/connectors``; SGLang 0.5.23,
``mem_cache/storage/aibrix_kvcache``.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_aibrix import library as library_module
from hicache_core import HiCache, HiCacheStorage, Identity, Placement, Shard, Status

from .conftest import Opener, a_pool, first_bytes, needed

OK, MISS, CORRUPT = Status.OK, Status.MISS, Status.CORRUPT
KINDS = ["rocksdb", "shfs"]


def keys_of(pool: Any, *hashes: str) -> list[str]:
    made: list[str] = pool.component.keys(hashes)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_hole_in_the_middle_is_one_miss_and_shifts_nothing(opened: Opener, kind: str) -> None:
    """SHFS counts what it read behind a hole too: four of five, and the third of the first four is empty."""
    pool = a_pool(10)
    storage = opened(pool, kind)
    keys = keys_of(pool, "k0", "k1", "absent", "k3", "k4")
    there = [keys[0], keys[1], keys[3], keys[4]]
    assert storage.batch_set(there, pool.pages(range(4))) == [OK] * 4
    assert storage.batch_get(keys, pool.pages(range(5, 10))) == [OK, OK, MISS, OK, OK]
    assert first_bytes(pool, range(5, 10)) == [1, 2, 8, 3, 4]
    assert (storage.batch_contains(keys), storage.batch_exists(keys)) == ([OK, OK, MISS, OK, OK], 2)


def test_the_library_still_miscounts_behind_a_hole(opened: Opener) -> None:
    """Fails on the day on which the library counts right, and then library.py may trust it."""
    pool = a_pool(4)
    storage: Any = opened(pool, "shfs")
    keys = keys_of(pool, "k0", "k1", "k2", "k3")
    storage.batch_set([keys[0], keys[1], keys[3]], pool.pages(range(3)))
    library = storage._library
    names = [importlib.import_module("hicache_aibrix.record").digest_of(key).hex() for key in keys]
    records = [library_module.Record(4096 + 40) for _ in names]
    counted = library._manager.get(None, library._hashes(names), library._handle(records)).get()
    assert (counted, [record.value is not None for record in records]) == (3, [True, True, False, True])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "change", [{"kv_dtype": "fp16"}, {"model": "another"}, {"lora": "adapter"}, {"tenant": "other"}], ids=str
)
def test_c9_another_dtype_model_or_adapter_never_hits(
    opened: Opener, kind: str, change: dict[str, str]
) -> None:
    """The library's L2 path holds neither model nor dtype: a bf16 page was read by an fp16 manager."""
    pool = a_pool(2)
    one, other = opened(pool, kind), opened(pool, kind, **change)
    keys = keys_of(pool, "k")
    assert one.batch_set(keys, pool.pages([0])) == [OK]
    assert (other.batch_get(keys, pool.pages([1])), one.batch_get(keys, pool.pages([1]))) == ([MISS], [OK])


@pytest.mark.parametrize("kind", KINDS)
def test_batches_with_the_same_last_key_and_length_are_apart(opened: Opener, kind: str) -> None:
    """aibrix#2329: two batches were taken for equal by their last hash and their count."""
    pool = a_pool(8)
    storage = opened(pool, kind)
    one, two = keys_of(pool, "a", "b", "z"), keys_of(pool, "c", "d", "z")
    assert storage.batch_set(one, pool.pages([0, 1, 2])) == [OK] * 3
    assert storage.batch_contains(two) == [MISS, MISS, OK]
    assert storage.batch_set(two, pool.pages([3, 4, 2])) == [OK] * 3
    assert storage.batch_get(two, pool.pages([5, 6, 7])) == [OK] * 3
    assert first_bytes(pool, range(5, 8)) == [4, 5, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_c12_partial_gets_leak_nothing(opened: Opener, kind: str) -> None:
    """SGLang's backend fails an assertion on a partial hit and never releases: 50 of them lost 3 to 7 MB."""
    pool = a_pool(8, 1 << 18)
    storage = opened(pool, kind)
    keys = keys_of(pool, *(f"k{i}" for i in range(8)))
    storage.batch_set(keys[:3], pool.pages(range(3)))
    wanted = [OK] * 3 + [MISS] * 5

    def rounds(count: int) -> int:
        for _ in range(count):
            assert storage.batch_get(keys, pool.pages(range(8))) == wanted
        gc.collect()
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = rounds(50)
    assert rounds(100) - before < 4 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_c5_a_truncated_value_is_no_hit(opened: Opener, kind: str) -> None:
    """One that lost its end, and one that lost its whole trailer."""
    pool = a_pool(6)
    storage: Any = opened(pool, kind)
    keys = keys_of(pool, "short", "cut", "good")
    assert storage.batch_set(keys, pool.pages(range(3))) == [OK] * 3
    connector = storage._library._connector
    for key, nbytes in ((keys[0], 1000), (keys[1], 4096)):
        name = importlib.import_module("hicache_aibrix.record").digest_of(key).hex().encode()
        if kind == "shfs":
            os.truncate(connector._key_to_filepath(name), nbytes)
        else:
            connector.store.put(name, connector.store.get(name)[:nbytes])
    statuses = storage.batch_get(keys, pool.pages(range(3, 6)))
    assert (statuses[2], {status in (CORRUPT, Status.SIZE_MISMATCH) for status in statuses[:2]}) == (
        OK,
        {True},
    )
    assert [status is OK for status in storage.batch_contains(keys)] == [False, False, True]
    assert first_bytes(pool, range(3, 6)) == [4, 5, 3]


def test_a_batch_that_the_library_trips_over_is_told_page_by_page(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file cannot be written the manager raises AttributeError: it asks a status for its result."""
    pool = a_pool(3)
    storage: Any = opened(pool, "shfs")
    connector = storage._library._connector
    write = connector._put

    def full(key: bytes, record: Any) -> Any:
        if record.tobytes()[0] != 2:
            return write(key, record)
        native = importlib.import_module("aibrix_kvcache")
        return native.Status(native.StatusCodes.ERROR, "Failed to put value: [Errno 28] No space left")

    monkeypatch.setattr(connector, "_put", full)
    keys = keys_of(pool, "a", "b", "c")
    assert storage.batch_set(keys, pool.pages(range(3))) == [OK, Status.NO_SPACE, OK]
    assert storage.batch_contains(keys) == [OK, MISS, OK]


class Vanishing:
    """A file's path that takes the file away as soon as SHFS has found it there, ``times`` times."""

    def __init__(self, path: Path, times: int = 1) -> None:
        self._path, self._times = path, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path, name)

    def __fspath__(self) -> str:
        return str(self._path)

    def exists(self) -> bool:
        there = self._path.exists()
        if there and self._times:
            self._times -= 1
            self._path.unlink()
        return there


def let_files_vanish(storage: Any, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    connector = storage._library._connector
    path_of, paths = connector._key_to_filepath, {}

    def path(name: bytes) -> Vanishing:
        return paths.setdefault(name, Vanishing(path_of(name), times))

    monkeypatch.setattr(connector, "_key_to_filepath", path)


def test_c8_what_is_removed_while_shfs_looks_at_it_is_a_miss(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks whether a file exists and opens or unlinks it afterwards, and takes ENOENT for an error."""
    pool = a_pool(4)
    storage: Any = opened(pool, "shfs")
    keys = keys_of(pool, "got", "removed")
    assert storage.batch_set(keys, pool.pages(range(2))) == [OK] * 2
    let_files_vanish(storage, monkeypatch)
    monkeypatch.setattr(storage._library, "get", lambda names, _: [None] * len(names))
    assert storage.batch_get(keys[:1], pool.pages([3])) == [MISS]
    assert storage.batch_contains(keys[:1]) == [MISS]
    monkeypatch.setattr(storage._library, "contains", lambda _: OK)
    assert storage.batch_remove(keys[1:]) == [MISS]


@pytest.mark.parametrize(("times", "status"), [(1, OK), (4, OK), (100, Status.ERROR)])
def test_c8_a_set_whose_file_is_removed_at_once_is_written_again(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, times: int, status: Status
) -> None:
    """SHFS measures a file after the rename, by name: removed by then, the page counts as not stored."""
    pool = a_pool(2)
    storage: Any = opened(pool, "shfs")
    let_files_vanish(storage, monkeypatch, times)
    monkeypatch.setattr(storage._library, "put", lambda *_: False)
    monkeypatch.setattr(storage._library, "contains", lambda _: MISS)
    keys = keys_of(pool, "a")
    assert storage.batch_set(keys, pool.pages([0])) == [status]
    monkeypatch.undo()
    assert storage.batch_get(keys, pool.pages([1])) == [OK if status is OK else MISS]


def figures(library: Any) -> list[Any]:
    """Give the library's metrics of one verb each, of its manager and of its second level."""
    metrics = library._manager.metrics
    return [
        getattr(level, f"{verb}_metrics")
        for level in (metrics.mgr, metrics.l2)
        for verb in ("get", "put", "exists", "acquire", "allocate")
    ]


def test_c16_the_librarys_metrics_do_not_grow(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps lists with entries for each call, for ever; SGLang's backend emptied them on each get."""
    monkeypatch.setattr(library_module, "_CALLS_MEASURED", 10)
    pool = a_pool(1)
    storage: Any = opened(pool, "shfs")
    keys = keys_of(pool, "a")
    for _ in range(35):
        assert storage.batch_exists(keys) == 0
    held = [
        value
        for metrics in figures(storage._library)
        for value in vars(metrics).values()
        if type(value) is list
    ]
    assert max(map(len, held)) <= 10
    assert sum(metrics.num_ops for metrics in figures(storage._library)) == 2 * 35


@pytest.mark.parametrize("kind", KINDS)
def test_hicache_counts_what_the_librarys_metrics_count(kind: str, tmp_path: Path) -> None:
    """Pages stored, hit and missed: the library's tokens, for a block has one here."""
    needed("aibrix_kvcache")
    pool = a_pool(6)
    options = {"root": str(tmp_path), "backend": kind}
    with HiCache.open(
        "aibrix",
        identity=Identity.for_tests(),
        placement=Placement(),
        pools=[pool],
        options=options,
        strict=True,
    ) as cache:
        assert cache.set(["a", "b"], pool.pages([0, 1])) == [OK, OK]
        assert cache.get(["a", "b", "c"], pool.pages([2, 3, 4])) == [OK, OK, MISS]
        (library,) = library_module._open.values()
        theirs, ours = library._manager.metrics.l2, cache.stats().verbs
        assert (theirs.num_tokens_hit, theirs.num_tokens_miss) == (2, 1)
        assert (ours["get"].statuses[OK], ours["get"].statuses[MISS]) == (2, 1)
        assert (sum(theirs.put_metrics.num_tokens), ours["set"].statuses[OK]) == (2, 2)
        assert (theirs.get_metrics.num_ops, ours["get"].calls) == (1, 1)
        assert (sum(theirs.get_metrics.num_fetched_tokens), ours["get"].nbytes) == (2, 2 * 4096)
        assert (sum(theirs.get_metrics.num_tokens), ours["get"].pages) == (3, 3)
        assert [cache.exists(["a", "b"]), cache.exists(["c"])] == [2, 0]
        theirs, ours = library._manager.metrics.l2, cache.stats().verbs
        assert (theirs.exists_metrics.num_ops, ours["exists"].calls, ours["exists"].pages) == (2, 2, 3)
        assert (theirs.exists_metrics.op_lat_ms, sum(ours["exists"].latency)) == ([], 2)
        assert theirs.acquire_metrics.num_ops == theirs.allocate_metrics.num_ops == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_mla_page_goes_and_comes_back(opened: Opener, kind: str) -> None:
    """SGLang's backend raises NotImplementedError for MLA."""
    shard = Shard(layers=(0, 3, 3), heads="replicated")
    pool = a_pool(2, 3 * 64 * 576 * 2, shard=shard, byte_order="mla_page_first")
    storage = opened(pool, kind)
    keys = keys_of(pool, "k")
    assert storage.batch_set(keys, pool.pages([0])) == [OK]
    assert storage.batch_get(keys, pool.pages([1])) == [OK]
    assert bytes(pool.pages([1]).views(0)[0]) == bytes(pool.pages([0]).views(0)[0])


def test_c11_a_get_of_the_library_that_comes_late_writes_into_nobodys_slot(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a timeout the manager gave its buffers back while a thread of its own still filled them."""
    pool = a_pool(4)
    storage: Any = opened(pool, "shfs", timeout_s=0.2)
    keys = keys_of(pool, "k")
    storage.batch_set(keys, pool.pages([0]))
    connector = storage._library._connector
    go, late = importlib.import_module("threading").Event(), []
    read = connector._get

    def slow(key: bytes, record: Any) -> Any:
        late.append(record)
        go.wait(10)
        return read(key, record)

    monkeypatch.setattr(connector, "_get", slow)
    values = storage._library.get(["00"], 4096)
    before = bytes(pool.owner)
    go.set()
    assert (values, bytes(pool.owner), len(late)) == ([None], before, 1)


def test_c16_opening_changes_no_environment_and_draws_no_bar(
    opened: Opener, capfd: pytest.CaptureFixture[str]
) -> None:
    """The library takes its settings from the environment and draws a progress bar on stderr."""
    pool, before = a_pool(1), dict(os.environ)
    opened(pool, "rocksdb")
    said = capfd.readouterr()
    envs = sys.modules["aibrix_kvcache.envs"]
    left = [name for name in vars(envs) if name.startswith("AIBRIX_KV_CACHE_OL_")]
    assert (dict(os.environ), left, said.out, "Allocating" in said.err) == (before, [], "", False)


@pytest.mark.parametrize("kind", KINDS)
def test_c12_a_store_that_cannot_be_opened_leaves_no_thread(
    opened: Opener, kind: str, tmp_path: Path
) -> None:
    """A manager whose constructor raises leaves its event loop's thread and its workers running."""
    from hicache_core.errors import BackendUnavailable

    (tmp_path / kind).write_text("a file where a folder should be")
    threading = importlib.import_module("threading")
    before = set(threading.enumerate())
    with pytest.raises(BackendUnavailable) as refused:
        opened(a_pool(1), kind)
    assert f"opening 'aibrix' ({kind}) in {tmp_path / kind}" in str(refused.value)
    assert set(threading.enumerate()) == before


def test_rocksdb_of_another_process_is_refused_with_the_remedy(opened: Opener, tmp_path: Path) -> None:
    import subprocess

    pool = a_pool(1)
    opened(pool, "rocksdb")
    program = (
        "import sys\n"
        "from hicache_core import Identity, Namespace\n"
        "from hicache_core.errors import BackendUnavailable\n"
        "from hicache_aibrix.library import open_library\n"
        "from hicache_aibrix.options import AibrixOptions\n"
        "try: open_library(AibrixOptions(root=sys.argv[1]), Namespace.of(Identity.for_tests()).id, 5.0)\n"
        "except BackendUnavailable as error: print(error.remedy)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "rocksdb")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.strip() == "RocksDB admits one process: choose another root, or backend='shfs'."


def test_c14_what_was_ok_is_there_in_a_new_manager(opened: Opener) -> None:
    pool = a_pool(4)
    keys = keys_of(pool, "a", "b")
    for kind in KINDS:
        storage: HiCacheStorage = opened(pool, kind)
        assert storage.batch_set(keys, pool.pages([0, 1])) == [OK, OK]
        storage.close()
        assert opened(pool, kind).batch_get(keys, pool.pages([2, 3])) == [OK, OK]
        assert first_bytes(pool, range(2, 4)) == [1, 2]
