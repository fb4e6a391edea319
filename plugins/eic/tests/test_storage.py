"""Splits, damage, deadlines, expiry, and the catalogue behind clear and usage."""

from __future__ import annotations

import pytest
from eic_builders import NBYTES, Opener, an_arena, component, keys_of, soon

from hicache_conformance.builders import Arena
from hicache_conformance.calls import Call, until
from hicache_core import Namespace, Pages, Status
from hicache_core.errors import BackendTimeout, BackendUnavailable
from hicache_eic import catalog
from hicache_eic.record import FRAME_NBYTES, HEAD_NBYTES, blank_head, judge, write_head
from hicache_eic.simulator import eic

OK, MISS, CORRUPT, SIZE_MISMATCH = Status.OK, Status.MISS, Status.CORRUPT, Status.SIZE_MISMATCH


@pytest.fixture
def calls(monkeypatch):
    """Record how many keys and bytes each call to EIC carries."""
    seen: list[tuple[str, int, int]] = []
    for verb in ("mset", "mget"):
        original = getattr(eic.Client, verb)

        def recorded(self, keys, one, two, verb=verb, original=original):
            values = one if verb == "mset" else two
            seen.append((verb, len(keys), sum(nbytes for _, nbytes, _ in values.items)))
            return original(self, keys, one, two)

        monkeypatch.setattr(eic.Client, verb, recorded)
    return seen


@pytest.mark.clause("C1")
def test_batches_are_split_by_count(opener: Opener, calls):
    arena = an_arena(20)
    storage = opener(arena, max_keys=8)
    assert storage.batch_set(keys_of(20), arena.pages(range(20))) == [OK] * 20
    calls.clear()
    assert storage.batch_get(keys_of(20), arena.pages(range(20))) == [OK] * 20
    assert [(verb, count) for verb, count, _ in calls] == [("mget", 8), ("mget", 8), ("mget", 4)]


@pytest.mark.clause("C1")
def test_batches_are_split_by_bytes(opener: Opener, calls):
    arena = an_arena(20)
    storage = opener(arena, staging=1 << 16)
    assert storage.batch_set(keys_of(20), arena.pages(range(20))) == [OK] * 20
    calls.clear()
    assert storage.batch_get(keys_of(20), arena.pages(range(20))) == [OK] * 20
    assert [(count, nbytes <= 1 << 16) for _, count, nbytes in calls] == [(15, True), (5, True)]


@pytest.mark.clause("C1", "C10")
def test_a_service_that_dies_between_two_parts_of_a_batch(opener: Opener, calls):
    arena = an_arena(8)
    storage = opener(arena, max_keys=4, retries=0)
    storage.batch_set(keys_of(8), arena.pages(range(8)))
    opener.simulator.quirks(fail={"mget": 0}, fail_keys={})
    done = []
    original = eic.Client.mget

    def dying(self, keys, option, values):
        done.append(len(keys))
        if len(done) > 1:
            raise RuntimeError("connection lost")
        return original(self, keys, option, values)

    pytest.MonkeyPatch().setattr(eic.Client, "mget", dying)
    try:
        assert storage.batch_get(keys_of(8), arena.pages(range(8))) == [OK] * 4 + [Status.UNAVAILABLE] * 4
    finally:
        eic.Client.mget = original


def value_of(page: bytes) -> memoryview:
    value = memoryview(bytearray(FRAME_NBYTES + len(page)))
    value[HEAD_NBYTES : HEAD_NBYTES + len(page)] = page
    write_head(value, "name")
    return value


@pytest.mark.clause("C5")
@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda v: v, OK),
        (lambda v: memoryview(bytearray(v[:-1])), SIZE_MISMATCH),
        (lambda v: memoryview(bytearray(v) + b"\0"), SIZE_MISMATCH),
        (lambda v: memoryview(bytearray(len(v))), CORRUPT),
        (lambda v: memoryview(bytearray(v[:-1]) + bytes([v[-1] ^ 1])), CORRUPT),
        (lambda v: memoryview(bytearray(v[:40]) + bytes([v[40] ^ 1]) + bytearray(v[41:])), CORRUPT),
        (lambda v: memoryview(bytearray(v[:8]) + b"\1" + bytearray(v[9:])), CORRUPT),
    ],
    ids=[
        "whole",
        "a byte short",
        "a byte more",
        "never written",
        "a damaged mark",
        "a flipped bit",
        "a damaged head",
    ],
)
def test_a_value_says_whether_it_is_whole(change, verdict):
    assert judge(change(value_of(bytes(range(256)))), "name") is verdict


@pytest.mark.clause("C5")
def test_c5_a_value_that_lost_its_end_is_not_made_whole_by_what_the_buffer_held():
    stored = bytes(value_of(bytes(range(256))))
    buffer = memoryview(bytearray(stored))
    blank_head(buffer)
    buffer[: len(stored) - 1] = stored[:-1]
    assert judge(buffer, "name") is CORRUPT


@pytest.mark.clause("C11", "C2")
def test_a_call_that_is_left_behind_writes_to_no_slot(opener: Opener):
    arena = an_arena(2)
    storage = opener(arena, timeout_s=0.3)
    storage.batch_set(keys_of(1), arena.pages([0]))
    opener.simulator.pause()
    try:
        assert Call(lambda: storage.batch_get(keys_of(1), arena.pages([1]))).result(2.0) == [Status.TIMEOUT]
    finally:
        opener.simulator.resume()
    assert until(lambda: storage._workers._abandoned == 0)
    arena.check()


@pytest.mark.clause("C11")
def test_beyond_the_bound_nobody_waits(opener: Opener):
    arenas = [an_arena(1) for _ in range(6)]
    storage = opener(*arenas, timeout_s=0.5)
    storage.batch_set(keys_of(1), arenas[0].pages([0]))
    opener.simulator.pause()
    try:
        first = [Call(lambda a=a: storage.batch_get(keys_of(1), a.pages([0]))) for a in arenas[:4]]
        assert [call.result(3.0) for call in first] == [[Status.TIMEOUT]] * 4
        late = Call(lambda: storage.batch_get(keys_of(1), arenas[5].pages([0])))
        assert late.result(0.4) == [Status.UNAVAILABLE]
        with pytest.raises(BackendUnavailable):
            storage.usage()
    finally:
        opener.simulator.resume()
    assert until(lambda: storage.batch_contains(keys_of(1)) == [OK])


@pytest.mark.clause("C10")
def test_counting_verbs_raise_when_there_is_no_answer(opener: Opener):
    storage = opener(timeout_s=0.3)
    opener.simulator.pause()
    try:
        with pytest.raises(BackendTimeout):
            storage.usage()
    finally:
        opener.simulator.resume()


def test_pages_expire_where_a_time_is_set(opener: Opener):
    arena = an_arena(1)
    storage = opener(arena, ttl_s=1)
    assert storage.batch_set(keys_of(1), arena.pages([0])) == [OK]
    assert storage.batch_contains(keys_of(1)) == [OK]
    assert until(lambda: storage.batch_contains(keys_of(1)) == [MISS], 5.0)
    assert storage.batch_get(keys_of(1), arena.pages([0])) == [MISS]


def test_loose_buffers_are_served(opener: Opener):
    storage, slot = opener(), bytearray(NBYTES)
    page = bytes(range(256)) * 16
    assert storage.batch_set(keys_of(1), Pages.of_buffers([page], component())) == [OK]
    assert storage.batch_get(keys_of(1), Pages.of_buffers([slot], component())) == [OK]
    assert bytes(slot) == page


# The catalogue.


def test_usage_counts_what_is_there_and_not_what_was_set(opener: Opener):
    arena = an_arena(8)
    storage, large = opener(arena), Arena(component(2 * NBYTES, "large"), 2)
    storage.add_pool(large.pool)
    storage.batch_set(keys_of(8), arena.pages(range(8)))
    storage.batch_set(large.component.keys(["a", "b"]), large.pages([0, 1]))
    storage.batch_remove(keys_of(3))
    opener.simulator.damage(storage.config.namespace, keys_of(8)[7], "lose")
    usage = storage.usage()
    assert (usage.pages, usage.bytes, usage.capacity) == (6, 4 * NBYTES + 4 * NBYTES, None)
    assert storage.clear() == 6


def test_a_page_that_the_catalogue_could_not_list_is_not_stored(opener: Opener):
    """Else it would survive a clear."""
    arena = an_arena(2)
    storage = opener(arena, retries=0)
    opener.simulator.quirks(fail_keys={"mset": {"/0": 3}})
    statuses = storage.batch_set(keys_of(2), arena.pages([0, 1]))
    opener.simulator.quirks()
    assert statuses == [Status.ERROR] * 2
    assert storage.batch_contains(keys_of(2)) == [MISS, MISS]
    assert storage.batch_set(keys_of(2), arena.pages([0, 1])) == [OK, OK]
    assert storage.clear() == 2


def test_pages_of_a_process_that_is_gone_are_cleared(opener: Opener):
    arena = an_arena(8)
    gone = opener(arena)
    for round_ in range(20):
        gone.batch_set(keys_of(8, f"round-{round_}"), arena.pages(range(8)))
    gone.close()
    fresh = opener(arena)
    assert fresh.usage().pages == 160
    assert fresh.clear() == 160
    left = [key for _, _, key in opener.simulator.names() if fresh.config.namespace.id in key]
    assert [key for key in left if "~" not in key] == []


class Shelf:
    """A store of records in a dictionary, as a catalogue's writer sees it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls = 0

    def exist(self, names):
        return [OK if name in self.values else MISS for name in names]

    def fetch(self, names, nbytes):
        self.calls += 1
        found = [self.values.get(name) for name in names]
        assert all(value is None or len(value) == nbytes for value in found), "a record of another size"
        return found

    def delete(self, names):
        return [OK if self.values.pop(name, None) is not None else MISS for name in names]

    def set(self, writer: catalog.Writer, namespace: Namespace, keys: list[str]) -> None:
        there = set(writer.path) <= set(self.values)
        records = writer.add(keys, NBYTES, slot_is_there=there, exist=self.exist, fetch=self.fetch)
        self.values |= {record.name: record.value for record in records}
        self.values |= {namespace.qualify(key): b"page" for key in keys}
        writer.stored(self.delete)

    def listed(self, namespace: Namespace) -> set[str]:
        return set(catalog.everything(namespace, self.exist, self.fetch)[0])


NAMESPACE = Namespace("0" * 32)
OTHER = Namespace("1" * 32)


@pytest.mark.parametrize("batch", [1, 63, 64, 65, 200])
def test_the_catalogue_lists_every_key_of_every_writer(batch):
    shelf, writers = Shelf(), [catalog.Writer(NAMESPACE) for _ in range(3)]
    stranger = catalog.Writer(OTHER)
    wanted = set()
    for number, writer in enumerate(writers):
        for start in range(0, 300, batch):
            keys = keys_of(300, f"writer-{number}")[start : start + batch]
            shelf.set(writer, NAMESPACE, keys)
            wanted |= set(keys)
    shelf.set(stranger, OTHER, keys_of(5, "stranger"))
    assert shelf.listed(NAMESPACE) == wanted
    assert shelf.listed(OTHER) == set(keys_of(5, "stranger"))


def test_a_slot_that_was_lost_is_written_again_with_the_next_set():
    shelf, writer = Shelf(), catalog.Writer(NAMESPACE)
    shelf.set(writer, NAMESPACE, keys_of(3))
    shelf.values = {name: value for name, value in shelf.values.items() if "~w" not in name}
    assert shelf.listed(NAMESPACE) == set()
    shelf.set(writer, NAMESPACE, keys_of(1, "next"))
    assert shelf.listed(NAMESPACE) == {*keys_of(3), *keys_of(1, "next")}


@pytest.mark.clause("C9")
def test_c9_writers_that_begin_at_once_overwrite_nothing_of_one_another():
    shelf, writers = Shelf(), [catalog.Writer(NAMESPACE) for _ in range(100)]
    begun = [
        writer.add(keys_of(1, f"of-{i}"), NBYTES, slot_is_there=False, exist=shelf.exist, fetch=shelf.fetch)
        for i, writer in enumerate(writers)
    ]
    for records in begun:
        shelf.values |= {record.name: record.value for record in records}
    assert shelf.listed(NAMESPACE) == {key for i in range(100) for key in keys_of(1, f"of-{i}")}


@pytest.mark.parametrize("lost", range(catalog.PATH_LENGTH))
def test_a_mark_that_was_lost_is_written_again_with_the_next_set(lost):
    shelf, writer = Shelf(), catalog.Writer(NAMESPACE)
    shelf.set(writer, NAMESPACE, keys_of(3))
    del shelf.values[writer.path[lost]]
    assert shelf.listed(NAMESPACE) == set()
    shelf.set(writer, NAMESPACE, keys_of(1, "next"))
    assert shelf.listed(NAMESPACE) == {*keys_of(3), *keys_of(1, "next")}


@pytest.mark.parametrize("byte", [0, 20, 29, 39])
def test_a_damaged_slot_sends_nobody_to_chunks_that_never_were(byte):
    shelf, one, two = Shelf(), catalog.Writer(NAMESPACE), catalog.Writer(NAMESPACE)
    shelf.set(one, NAMESPACE, keys_of(3, "one"))
    shelf.set(two, NAMESPACE, keys_of(3, "two"))
    slot = bytearray(shelf.values[one.path[-1]])
    slot[byte] ^= 1
    shelf.values[one.path[-1]] = bytes(slot)
    assert shelf.listed(NAMESPACE) == set(keys_of(3, "two"))
    assert shelf.calls == 2


def a_shelf_to_clean():
    """Give a shelf and its writer, whose next chunk takes in the 20 keys that are left of an old one."""
    shelf, writer = Shelf(), catalog.Writer(NAMESPACE)
    for start in range(9):
        shelf.set(writer, NAMESPACE, keys_of(64, f"chunk-{start}"))
    for key in keys_of(64, "chunk-1")[20:]:
        del shelf.values[NAMESPACE.qualify(key)]
    return shelf, writer, keys_of(64, "chunk-1")[:20]


@pytest.mark.clause("C9")
def test_c9_keys_that_move_while_the_catalogue_is_read_are_found():
    shelf, writer, kept = a_shelf_to_clean()
    moved = []

    def fetch(names, nbytes):
        """Have the writer begin a new chunk once the slot is read, and move the keys of an old one."""
        found = shelf.fetch(names, nbytes)
        if nbytes == catalog.SLOT_NBYTES and not moved:
            moved.append(True)
            before = set(shelf.values)
            shelf.set(writer, NAMESPACE, keys_of(1, "new"))
            assert before - set(shelf.values), "an old chunk must go"
        return found

    listed = catalog.everything(NAMESPACE, shelf.exist, fetch)[0]
    assert set(kept) <= set(listed)
    assert {key for start in (0, *range(2, 9)) for key in keys_of(64, f"chunk-{start}")} <= set(listed)


@pytest.mark.clause("C9")
def test_c9_keys_that_were_to_move_with_a_set_that_failed_stay_listed():
    shelf, writer, kept = a_shelf_to_clean()
    failed = keys_of(64, "failed")
    records = writer.add(failed, NBYTES, slot_is_there=True, exist=shelf.exist, fetch=shelf.fetch)
    assert len(records) == 4, "the chunk that was full, that with the moved keys, one more, the slot"
    shelf.set(writer, NAMESPACE, keys_of(1, "later"))
    assert {*kept, *keys_of(1, "later")} <= shelf.listed(NAMESPACE)


@pytest.mark.clause("C9")
def test_c9_where_pages_expire_the_slot_is_renewed_with_each_set():
    shelf, writer = Shelf(), catalog.Writer(NAMESPACE, expires=True)
    for label in ("one", "two"):
        there = set(writer.path) <= set(shelf.values)
        records = writer.add(
            keys_of(1, label), NBYTES, slot_is_there=there, exist=shelf.exist, fetch=shelf.fetch
        )
        assert set(writer.path) < {record.name for record in records}
        shelf.values |= {record.name: record.value for record in records}
        writer.stored(shelf.delete)


def test_chunks_whose_keys_are_gone_are_cleaned_up_on_the_way():
    shelf, writer = Shelf(), catalog.Writer(NAMESPACE)
    for round_ in range(200):
        keys = keys_of(32, f"round-{round_}")
        shelf.set(writer, NAMESPACE, keys)
        if round_ % 4:  # evicted at once
            for key in keys:
                del shelf.values[NAMESPACE.qualify(key)]
    alive = {key for round_ in range(0, 200, 4) for key in keys_of(32, f"round-{round_}")}
    chunks = [name for name in shelf.values if "~c" in name]
    assert alive <= shelf.listed(NAMESPACE)
    assert len(chunks) < 75, "100 chunks were written, and a quarter of their keys lives"


def test_a_key_of_the_greatest_length_fits_a_chunk():
    shelf, writer = Shelf(), catalog.Writer(NAMESPACE)
    longest = f"{'h' * 128}.{'c' * 64}"
    shelf.set(writer, NAMESPACE, [longest] * 64)
    assert shelf.listed(NAMESPACE) == {longest}


# The simulator is as strict as the binding.


def test_the_simulator_refuses_a_flag_on_memory_that_is_not_registered(opener: Opener):
    client, about = eic.Client(), eic.InitOption()
    assert client.init("i", opener.simulator.options()["url"].removeprefix("eic://"), about) == 0
    keys, values = eic.StringVector(), eic.IOBuffers()
    keys.append("k")
    buffer = bytearray(8)
    import ctypes

    values.append(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), 8, True)
    status, outcome = client.mset(keys, values, eic.SetOption())
    assert (status, outcome.status_codes) == (
        eic.StatusCode.INVALID_ARGUMENT,
        [eic.StatusCode.INVALID_ARGUMENT],
    )
    wrong = eic.MemoryInfo()
    wrong.type = eic.MemoryType.MEMORY_CUDA
    assert client.register_memory(values, wrong) is False
    with pytest.raises(TypeError):
        about.log_dir = None
    assert client.allocate_managed_buffer(0) == 0
    address = client.allocate_managed_buffer(64)
    assert client.free_managed_buffer(address, 64) == 0


def test_deadlines_are_kept_by_slow_services_too(opener: Opener):
    storage = opener(timeout_s=0.5)
    opener.simulator.quirks(delay_s=2.0)
    call = Call(lambda: storage.batch_contains(keys_of(1)))
    assert call.result(1.2) == [Status.TIMEOUT]
    assert call.seconds < 1.0
    opener.simulator.quirks()
    assert soon() > 0
    assert until(lambda: storage.batch_contains(keys_of(1)) == [MISS])
