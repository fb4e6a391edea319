"""Device pools: what GDS is told, seen through a stand-in for NIXL, since no GPU is here."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from nixl_builders import NBYTES, a_component, a_storage

from hicache_core import HostPool, Segment, Status
from hicache_nixl import storage as storage_module
from hicache_nixl.trailer import padded_nbytes

BASE = 0x7F0000000000


def listed(rows):
    """Rows as tuples, of an array too."""
    return [tuple(row) for row in (rows if isinstance(rows, list) else rows.tolist())]


class FakeAgent:
    """Records what NIXL would be told; moves nothing."""

    told: list

    def __init__(self, name, config):
        self.name = name

    def create_backend(self, plugin, parameters):
        self.told.append(("backend", plugin, dict(parameters)))

    def register_memory(self, rows, kind):
        rows = listed(rows)
        self.told.append(("register", kind, rows))
        return SimpleNamespace(rows=rows)

    def deregister_memory(self, registration):
        self.told.append(("forget", registration.rows))

    def get_xfer_descs(self, rows, kind):
        return (kind, listed(rows))

    def initialize_xfer(self, verb, mine, theirs, name):
        self.told.append((verb, mine, [(offset, nbytes) for offset, nbytes, _ in theirs[1]]))
        for _, nbytes, descriptor in theirs[1]:
            if verb == "WRITE":
                import os

                os.posix_fallocate(descriptor, 0, nbytes)
        return object()

    def transfer(self, handle):
        return "DONE"

    def release_xfer_handle(self, handle):
        pass


@pytest.fixture
def told(monkeypatch):
    FakeAgent.told = []
    fake = SimpleNamespace(
        __name__="fake_nixl",
        nixl_agent=FakeAgent,
        nixl_agent_config=lambda **_: None,
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_RW="rw"),
    )
    monkeypatch.setitem(sys.modules, "fake_nixl", fake)
    monkeypatch.setattr(storage_module, "load", lambda library: fake)
    return FakeAgent.told


@pytest.mark.parametrize("plugin", ["auto", "GDS", "GDS_MT"])
def test_device_pool_is_registered_as_vram_and_read_into_directly(told, tmp_path, plugin):
    pool = HostPool(
        a_component(),
        (Segment(BASE, NBYTES, NBYTES // 2), Segment(BASE + 64 * NBYTES, NBYTES, NBYTES // 2)),
        4,
        device="cuda:3",
    )
    storage = a_storage(folders=(str(tmp_path),), plugin=plugin)
    storage.open([pool])
    try:
        keys = pool.component.keys(["a"])
        assert storage.batch_set(keys, pool.pages([1])) == [Status.OK]
        assert storage.batch_get(keys, pool.pages([2])) == [Status.OK]
    finally:
        storage.close()
    assert told[0] == ("backend", "GDS_MT" if plugin == "auto" else plugin, {})
    assert [each for each in told if each[0] == "register" and each[1] == "VRAM"] == [
        ("register", "VRAM", [(address, nbytes, 3, "")]) for address, nbytes in sorted(pool.regions())
    ]
    half = NBYTES // 2

    def slots(page):
        return [(BASE + page * NBYTES, half, 3), (BASE + (64 + page) * NBYTES, half, 3)]

    moves = [each for each in told if each[0] in ("WRITE", "READ")]
    assert moves == [
        ("WRITE", ("VRAM", slots(1)), [(0, half), (half, half)]),
        ("READ", ("VRAM", slots(2)), [(0, half), (half, half)]),
    ]
    files = [rows for _, kind, rows in (each for each in told if each[0] == "register") if kind == "FILE"]
    assert [(offset, nbytes) for ((offset, nbytes, _),) in files] == [(0, padded_nbytes(NBYTES))] * 2
    assert storage.capabilities.device_memory
