"""What SGLang's EICStorage (0.5.23) was seen to do against a double, and what was reported; this must not.

Upstream: sglang/srt/mem_cache/storage/eic/eic_storage.py; bytedance-iaas/sglang issues 598 and 764.
"""

from __future__ import annotations

import pytest
from eic_builders import NBYTES, Opener, an_arena, component, keys_of

from hicache_conformance.calls import Call, until
from hicache_core import Status
from hicache_core.errors import InvalidOptions
from hicache_core.options import resolve
from hicache_eic.options import EicOptions
from hicache_eic.simulator import eic
from hicache_eic.simulator.server import FAILED

OK, MISS, ERROR = Status.OK, Status.MISS, Status.ERROR
TROUBLE = {Status.UNAVAILABLE, Status.TIMEOUT}


@pytest.mark.clause("C1")
@pytest.mark.parametrize("short_codes", [False, True])
def test_an_mexist_that_fails_has_one_result_a_key(opener: Opener, short_codes):
    """Seen: a failed mexist gives 6 results for 3 keys."""
    storage = opener()
    opener.simulator.quirks(fail={"mexist": 9}, short_codes=short_codes, exist_success=False)
    assert storage.batch_contains(keys_of(3)) == [Status.UNAVAILABLE] * 3


def test_removing_removes_in_the_namespace_that_was_set(opener: Opener):
    """Seen: delete() ignores the namespace."""
    arena = an_arena(2)
    storage = opener(arena, eic_namespace="mine")
    assert storage.batch_set(keys_of(2), arena.pages([0, 1])) == [OK, OK]
    assert storage.batch_remove(keys_of(2)) == [OK, OK]
    left = [key for _, ns, key in opener.simulator.names() if ns == "mine" and "~" not in key]
    assert [key for key in left if key.startswith(storage.config.namespace.id)] == []


@pytest.mark.clause("C9")
def test_every_call_carries_the_namespace(opener: Opener):
    """A wrong namespace succeeds and holds nothing: nobody would notice."""
    arena = an_arena(2)
    storage = opener(arena, eic_namespace="tenant-7")
    assert storage.batch_set(keys_of(2), arena.pages([0, 1])) == [OK, OK]
    assert storage.batch_get(keys_of(2), arena.pages([0, 1])) == [OK, OK]
    assert storage.batch_contains(keys_of(2)) == [OK, OK]
    assert storage.usage().pages == 2
    mine = [name for name in opener.simulator.names() if name[2].startswith(storage.config.namespace.id)]
    assert {ns for _, ns, _ in mine} == {"tenant-7"}
    other = opener(arena, eic_namespace="tenant-8")
    assert other.batch_contains(keys_of(2)) == [MISS, MISS]
    assert other.batch_get(keys_of(2), arena.pages([0, 1])) == [MISS, MISS]


@pytest.mark.clause("C1", "C4")
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_key_that_fails_fails_alone(opener: Opener, bad: int):
    """Seen: the generic set looks at the first code only; the zero-copy set gives all False, 2N of them."""
    arena, keys = an_arena(3), keys_of(3)
    storage = opener(arena, retries=0)
    opener.simulator.quirks(fail_keys={"mset": {keys[bad]: FAILED}})
    wanted = [ERROR if i == bad else OK for i in range(3)]
    assert storage.batch_set(keys, arena.pages([0, 1, 2])) == wanted
    opener.simulator.quirks()
    assert storage.batch_contains(keys) == [MISS if i == bad else OK for i in range(3)]


def test_a_missing_url_is_named_with_its_yaml_field():
    """Seen: missing remote_url is a TypeError."""
    with pytest.raises(InvalidOptions) as caught:
        resolve("eic", EicOptions, {"instance_id": "i"}, environment={})
    assert [(field, complaint) for field, complaint, _ in caught.value.problems] == [
        ("url", "url is required")
    ]


def test_memory_is_registered_as_what_it_is(opener: Opener, monkeypatch):
    """Seen: memory is always registered as CUDA memory."""
    asked = []
    register = eic.Client.register_memory

    def recorded(self, buffers, about):
        asked.append((about.type, [registered for _, _, registered in buffers.items]))
        return register(self, buffers, about)

    monkeypatch.setattr(eic.Client, "register_memory", recorded)
    arena = an_arena(1)
    storage = opener(arena)
    assert storage.batch_set(keys_of(1), arena.pages([0])) == [OK]
    assert len(asked) >= 2
    assert set(map(repr, asked)) == {repr((eic.MemoryType.MEMORY_DEFAULT, [True]))}


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize(("wanted_set", "wanted_get"), [(True, True), (False, True), (True, False)])
def test_the_flag_is_true_for_registered_memory_only(
    opener: Opener, monkeypatch, takes, wanted_set, wanted_get
):
    """The flag on memory that EIC did not take is refused, or worse."""
    flags: dict[str, set[bool]] = {"mset": set(), "mget": set()}
    mset, mget = eic.Client.mset, eic.Client.mget

    def recorded_set(self, keys, values, option):
        flags["mset"] |= {registered for _, _, registered in values.items}
        return mset(self, keys, values, option)

    def recorded_get(self, keys, option, values):
        flags["mget"] |= {registered for _, _, registered in values.items}
        return mget(self, keys, option, values)

    if not takes:
        monkeypatch.setattr(eic.Client, "register_memory", lambda self, buffers, about: False)
    monkeypatch.setattr(eic.Client, "mset", recorded_set)
    monkeypatch.setattr(eic.Client, "mget", recorded_get)
    arena = an_arena(2)
    storage = opener(arena, register_set=wanted_set, register_get=wanted_get)
    assert storage.batch_set(keys_of(1), arena.pages([0])) == [OK]
    assert storage.batch_get(keys_of(1), arena.pages([1])) == [OK]
    assert flags == {"mset": {takes and wanted_set}, "mget": {takes and wanted_get}}
    arena.check({1: b"\1" * NBYTES})


@pytest.mark.clause("C9")
def test_clear_removes_the_namespace_and_nothing_else(opener: Opener):
    """Seen: clear() does nothing."""
    arena = an_arena(4)
    mine, theirs = opener(arena), opener(arena, tenant="neighbour-of-clear")
    mine.batch_set(keys_of(4), arena.pages(range(4)))
    theirs.batch_set(keys_of(2), arena.pages([0, 1]))
    assert (mine.clear(), mine.clear()) == (4, 0)
    assert mine.batch_contains(keys_of(4)) == [MISS] * 4
    assert theirs.batch_contains(keys_of(2)) == [OK] * 2


@pytest.mark.parametrize("verb", ["mget", "mset", "mexist", "mdel"])
def test_what_fails_once_is_tried_again(opener: Opener, verb: str):
    """Seen: no retries."""
    arena, keys = an_arena(2), keys_of(2)
    storage = opener(arena, retries=2)
    if verb != "mset":
        storage.batch_set(keys, arena.pages([0, 1]))
    opener.simulator.quirks(fail={verb: 1})
    answers = {
        "mget": lambda: storage.batch_get(keys, arena.pages([1, 0])),
        "mset": lambda: storage.batch_set(keys, arena.pages([0, 1])),
        "mexist": lambda: storage.batch_contains(keys),
        "mdel": lambda: storage.batch_remove(keys),
    }[verb]()
    assert answers == [OK, OK]


def test_a_key_that_is_absent_is_asked_for_once(opener: Opener):
    """Retries are for what failed."""
    arena = an_arena(2)
    storage = opener(arena, retries=5)
    before = opener.simulator.calls().get("mget", 0)
    assert storage.batch_get(keys_of(2), arena.pages([0, 1])) == [MISS, MISS]
    assert opener.simulator.calls()["mget"] == before + 1


@pytest.mark.clause("C6")
@pytest.mark.parametrize("quirk", [True, False])
def test_the_codes_of_the_keys_decide_and_not_the_overall_status(opener: Opener, quirk):
    """An all-miss mget may be FAILED as a whole, an mexist SUCCESS although nothing is there."""
    arena = an_arena(4)
    storage = opener(arena)
    opener.simulator.quirks(all_miss_failed=quirk, exist_success=quirk)
    assert storage.batch_get(keys_of(2), arena.pages([0, 1])) == [MISS, MISS]
    assert storage.batch_contains(keys_of(2)) == [MISS, MISS]
    assert storage.batch_set(keys_of(2), arena.pages([2, 3])) == [OK, OK]
    assert storage.batch_contains([*keys_of(2), "x.kv"]) == [OK, OK, MISS]


@pytest.mark.clause("C11", "C12")
def test_a_call_that_hangs_costs_no_worker_for_ever(opener: Opener):
    """Reported (764): a dead write thread leaks slots."""
    arena = an_arena(8)
    storage = opener(arena, timeout_s=0.3, workers=2)
    storage.batch_set(keys_of(8), arena.pages(range(8)))
    for _ in range(3):
        opener.simulator.pause()
        calls = [
            Call(lambda i=i: storage.batch_get(keys_of(8)[i : i + 1], arena.pages([i]))) for i in range(4)
        ]
        assert {call.result(3.0)[0] for call in calls} <= TROUBLE
        opener.simulator.resume()
        assert until(lambda: storage.batch_contains(keys_of(8)) == [OK] * 8)
    assert storage._workers is not None
    assert until(lambda: storage._workers._abandoned == 0)
    assert storage._workers._made <= 2


@pytest.mark.clause("C7")
def test_nothing_is_asked_for_an_empty_batch(opener: Opener):
    """Reported (598): an empty key is probed."""
    arena = an_arena(1)
    storage = opener(arena)
    before = opener.simulator.calls()
    none = arena.pages([])
    answers = [
        storage.batch_contains([]),
        storage.batch_get([], none),
        storage.batch_set([], none),
        storage.batch_remove([]),
    ]
    assert (answers, storage.batch_exists([])) == ([[], [], [], []], 0)
    assert opener.simulator.calls() == before


def test_keys_carry_the_whole_identity(opener: Opener):
    """Seen: {model}_mha_attn_{layout}_{rank}_{size}_@sglang_{key}: no revision, dtype, LoRA or tenant."""
    arena = an_arena(1)
    storage = opener(arena)
    storage.batch_set(keys_of(1), arena.pages([0]))
    names = {key for _, _, key in opener.simulator.names() if key.endswith(keys_of(1)[0])}
    assert f"{storage.config.namespace.id}/{keys_of(1)[0]}" in names
    assert component().key in keys_of(1)[0]
