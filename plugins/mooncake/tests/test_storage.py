"""What the suite does not look at: retries, checksums, usage, options that reach the library."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest
from mooncake_builders import NBYTES, a_config, a_pool, a_store, content, fill, keys_of

from hicache_core import BackendUnavailable, Status
from hicache_core.errors import InvalidOptions
from hicache_mooncake import _native
from hicache_mooncake._client import Names
from hicache_mooncake._known import KnownKeys
from hicache_mooncake._reader import Reader
from hicache_mooncake._remover import TOMBSTONES, Remover
from hicache_mooncake._servers import Holder, Master, free_port
from hicache_mooncake._setup import variables_for
from hicache_mooncake._writer import Writer
from hicache_mooncake.options import MooncakeOptions
from hicache_mooncake.storage import MooncakeStore

OK, MISS, CORRUPT = Status.OK, Status.MISS, Status.CORRUPT


class ScriptedClient:
    """Answers native calls from a script, and keeps the names that each asked for."""

    class _Always:
        def holds(self) -> bool:
            return True

    def __init__(self, *answers: list[int], size: int | None = None) -> None:
        self.answers = list(answers)
        self.size = size
        self.asked: list[list[str]] = []
        self.tried: list[tuple[object, int]] = []
        self.lifeline = self._Always()
        self.native = self
        self.replication = None

    def batch_get_into(self, names, *_):
        self.asked.append([name.removeprefix("ns/") for name in names])
        return self.answers.pop(0)

    def batch_put_from(self, names, *_):
        return self.batch_get_into(names)

    def get(self, names, locs, trailers):
        return self.batch_get_into(names)

    put = get

    def exist(self, names):
        return [0] * len(names)

    def remove(self, names):
        self.tried.append(("remove", len(names)))
        return self.answers.pop(0)

    def overwrite(self, names, nbytes):
        self.tried.append((nbytes, len(names)))
        return [0] * len(names)

    def sizes(self, names):
        return [self.size] * len(names)


def a_writer(client):
    return Writer(client, Names("ns/", ""), KnownKeys(), None, 1.0, Remover(client, 1.0))


def a_reader(client):
    return Reader(client, Names("ns/", ""), KnownKeys(), None, 1.0)


@pytest.mark.clause("C15")
def test_c15_a_full_store_is_asked_once_more_after_a_pause():
    """Eviction runs in the master's own time."""
    client = ScriptedClient([0, -200, -200], [0, -200])
    statuses = a_writer(client).write(["a", "b", "c"], a_pool().pages([0, 1, 2]))
    assert statuses == [OK, OK, Status.NO_SPACE]
    assert client.asked == [["a", "b", "c"], ["b", "c"]]


@pytest.mark.parametrize("code", [_native.RPC_FAIL, _native.RPC_TIMEOUT])
def test_a_master_without_an_answer_is_not_asked_again(code):
    client = ScriptedClient([code, code])
    statuses = a_writer(client).write(["a", "b"], a_pool().pages([0, 1]))
    assert (statuses, len(client.asked)) == ([_native.STATUS_OF_CODE[code]] * 2, 1)


def test_a_get_slower_than_its_leases_is_cut_into_parts():
    pool = a_pool(pages=8)
    keys = [f"k{i}" for i in range(8)]
    client = ScriptedClient([-707] * 8, [NBYTES] * 2, [NBYTES] * 2, [NBYTES] * 2, [NBYTES] * 2)
    assert a_reader(client).read(keys, pool.pages(range(8))) == [OK] * 8
    assert client.asked == [keys, keys[:2], keys[2:4], keys[4:6], keys[6:]]


def test_a_connection_that_went_stale_is_tried_again():
    client = ScriptedClient([NBYTES, -800], [-800], [NBYTES])
    assert a_reader(client).read(["a", "b"], a_pool().pages([0, 1])) == [OK, OK]
    assert client.asked == [["a", "b"], ["b"], ["b"]]


@pytest.mark.parametrize(
    ("size", "status"),
    [
        (NBYTES, Status.ERROR),  # there, and its owner does not answer
        (None, Status.ERROR),
        (0, MISS),
        (TOMBSTONES[0], MISS),
        (TOMBSTONES[1], MISS),
        (NBYTES - 1, Status.SIZE_MISMATCH),
    ],
)
def test_a_transfer_that_fails_for_good_is_judged_by_the_size_that_is_there(size, status):
    client = ScriptedClient(*([[-800]] * 5), size=size)
    assert a_reader(client).read(["a"], a_pool().pages([0])) == [status]
    assert client.answers == []


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (NBYTES, OK),
        (NBYTES - 1, Status.SIZE_MISMATCH),
        (0, Status.SIZE_MISMATCH),
        (-704, MISS),
        (-900, Status.UNAVAILABLE),
        (-901, Status.TIMEOUT),
        (-600, Status.ERROR),
        (-1, Status.ERROR),
        (-12345, Status.ERROR),
    ],
)
def test_each_code_of_a_get_has_its_status(code, status):
    assert a_reader(ScriptedClient([code])).read(["a"], a_pool().pages([0])) == [status]


def test_an_answer_of_another_length_is_believed_for_no_page():
    client = ScriptedClient([NBYTES])
    assert a_reader(client).read(["a", "b"], a_pool().pages([0, 1])) == [Status.ERROR] * 2


def test_only_what_is_leased_is_overwritten_and_in_another_size_each_time():
    """In the same size it would be written in place, and keep the lease."""
    client = ScriptedClient([0, -706, -704, -706], [-706, 0], [-703], [0])
    assert Remover(client, 1.0).remove(["a", "b", "c", "d"]) == [0, 0, -704, 0]
    assert client.tried == [
        ("remove", 4),
        (7, 2),
        ("remove", 2),
        (9, 1),
        ("remove", 1),
        (7, 1),
        ("remove", 1),
    ]


def test_what_could_not_be_overwritten_for_want_of_room_is_gone_all_the_same():
    client = ScriptedClient([-706], [-704])
    assert Remover(client, 1.0).remove(["a"]) == [0]


def test_readers_that_never_let_go_cost_no_more_than_the_deadline():
    client = ScriptedClient(*([[-706]] * 1000))
    started = time.monotonic()
    assert Remover(client, 0.2).remove(["a"]) == [-706]
    assert time.monotonic() - started < 2
    assert _native.STATUS_OF_CODE[-706] is Status.TIMEOUT


@pytest.mark.clause("C5")
def test_c5_bytes_of_another_page_under_the_name_are_corrupt(master, holder, opened):
    """As a read gets them whose memory was given to another object meanwhile."""
    pool = a_pool()
    storage = opened(master, pool, checksum=True)
    a, b = keys_of("a", "b")
    assert storage.batch_set([a], pool.pages([0])) == [OK]
    namespace = storage.config.namespace
    whole = holder.get(namespace.qualify(a) + "+xxh3")
    holder.put(namespace.qualify(b) + "+xxh3", whole)
    assert (len(whole), storage.batch_get([a, b], pool.pages([1, 2]))) == (NBYTES + 16, [OK, CORRUPT])


def test_pages_with_and_without_checksum_are_apart(master, holder, opened):
    pool = a_pool()
    plain, summed = opened(master, pool), opened(master, pool, checksum=True)
    keys = keys_of("a")
    fill(pool, 0, b"\x01" * NBYTES)
    fill(pool, 1, b"\x02" * NBYTES)
    assert plain.batch_set(keys, pool.pages([0])) == [OK]
    assert summed.batch_contains(keys) == [MISS]
    assert summed.batch_set(keys, pool.pages([1])) == [OK]
    assert (plain.batch_get(keys, pool.pages([2])), content(pool, 2)[:1]) == ([OK], b"\x01")
    assert (summed.batch_get(keys, pool.pages([2])), content(pool, 2)[:1]) == ([OK], b"\x02")
    assert plain.capabilities.checksum is False
    assert summed.capabilities.checksum is True


def test_usage_names_the_option_where_the_metrics_are_elsewhere(master, opened):
    storage = opened(master, metrics="127.0.0.1:1")
    with pytest.raises(BackendUnavailable) as raised:
        storage.usage()
    assert "127.0.0.1:1 cannot be read" in str(raised.value)
    assert raised.value.remedy == "Correct the option metrics (HOST:PORT, as its --metrics_port says)."


def test_a_tenant_whose_pages_the_master_does_not_list_gets_no_zeros(real, tmp_path):
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text("version: 1\ntenants:\n  - name: t1\n    quota: 64MB\n")
    file = ["--tenant_quota_connector_type=file", f"--tenant_quota_connector_uri={quotas}"]
    master = Master("--enable_multi_tenants=true", *file).start()
    holder = Holder(master, 16 << 20)
    options = MooncakeOptions(master=master.address, metrics=master.metrics, segment_size=0, tenant="t1")
    storage = MooncakeStore(a_config(), options)
    pool = a_pool()
    storage.open([pool])
    try:
        assert storage.batch_set(keys_of("a"), pool.pages([0])) == [OK]
        assert storage.batch_get(keys_of("a"), pool.pages([1])) == [OK]
        for verb in (storage.usage, storage.clear):
            with pytest.raises(BackendUnavailable) as raised:
                verb()
            assert "does not list the objects of tenant 't1'" in str(raised.value)
            assert raised.value.remedy == "Use tenant='default': namespaces keep users apart as well."
    finally:
        storage.close()
        holder.stop()
        master.stop()


def test_replicas_pins_and_segments_reach_the_library(own_master, opened):
    storage = opened(own_master, segment_size="16mib", replicas=2, hard_pin=True, preferred_segment="local")
    how = storage._client.replication
    assert (how.replica_num, how.with_hard_pin) == (2, True)
    assert how.preferred_segment == storage._client.native.get_hostname()
    assert storage.capabilities.eviction == "none"


def test_arguments_in_extra_reach_the_library(master, opened):
    port = free_port()
    opened(master, extra={"enable_client_http_server": True, "client_http_port": port})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
        assert json.load(answer)["status"] == "healthy"


def test_the_masters_own_metadata_server_works(real):
    port = free_port()
    place = ["--http_metadata_server_host=127.0.0.1", f"--http_metadata_server_port={port}"]
    master = Master("--enable_http_metadata_server=true", *place).start()
    pool = a_pool()
    storage = a_store(
        master=master.address, metadata_server=f"http://127.0.0.1:{port}/metadata", segment_size="16mib"
    )
    storage.open([pool])
    try:
        assert storage.batch_set(keys_of("a"), pool.pages([0])) == [OK]
        assert storage.batch_get(keys_of("a"), pool.pages([1])) == [OK]
    finally:
        storage.close()
        master.stop()


def test_what_the_library_is_told_by_default_keeps_it_within_the_deadline():
    options = MooncakeOptions(master="127.0.0.1:1")
    assert variables_for(options, 5.0) == {
        "MC_RPC_TIMEOUT_MS": "2000",
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
        "MC_TCP_ADMISSION_TIMEOUT_MS": "2500",
        "MC_LOG_LEVEL": "ERROR",
    }


def test_an_unknown_argument_of_setup_is_an_error_that_names_extra(master):
    storage = a_store(master=master.address, segment_size=0, extra={"no_such_argument": 1})
    with pytest.raises(InvalidOptions) as raised:
        storage.open()
    assert "extra=['no_such_argument']: setup() of this Mooncake does not take" in str(raised.value)
