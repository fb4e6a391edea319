"""MooncakeHostTensorAllocator: memory that lives as long as the tensor, and is given back once."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mooncake_builders import NBYTES, a_component, a_pool, a_store, keys_of, until

from hicache_core import HostPool, InvalidArgument, Segment, Status
from hicache_core.errors import InvalidPages
from hicache_mooncake._servers import Master, free_port, program

torch = pytest.importorskip("torch")

OK = Status.OK


@pytest.fixture
def allocator(real: None):
    from hicache_mooncake import MooncakeHostTensorAllocator

    return MooncakeHostTensorAllocator()


class Counting:
    """Stands in front of the library's allocator and counts."""

    def __init__(self, native) -> None:
        self.native, self.live, self.freed = native, set(), []

    def alloc(self, nbytes: int) -> int:
        address = self.native.alloc(nbytes)
        self.live.add(address)
        return address

    def free(self, address: int) -> int:
        self.freed.append(address)
        self.live.remove(address)
        return self.native.free(address)


def test_a_tensor_has_shape_dtype_and_memory_of_its_own(allocator):
    tensor = allocator.allocate((2, 3, 4), torch.bfloat16)
    tensor.fill_(1.5)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == ((2, 3, 4), torch.bfloat16, True)
    assert float(tensor.float().sum()) == 36.0


def test_memory_goes_back_once_and_not_before_the_last_view(allocator):
    counting = allocator._native = Counting(allocator._native)
    tensor = allocator.allocate((16, 1024), torch.uint8)
    view = tensor[3:5]
    (address,) = counting.live
    del tensor
    gc.collect()
    view.fill_(7)
    assert (int(view.sum()), counting.freed) == (7 * 2048, [])
    del view, allocator
    gc.collect()
    assert (counting.freed, counting.live) == ([address], set())


@pytest.mark.parametrize("dims", [(0,), (4, 0), (-1, -4)])
def test_no_element_is_refused_before_the_library_raises(allocator, dims):
    with pytest.raises(InvalidArgument) as raised:
        allocator.allocate(dims, torch.uint8)
    assert "Give a shape with at least one element, on 'cpu'." in str(raised.value)


def test_another_device_is_refused(allocator):
    with pytest.raises(InvalidArgument):
        allocator.allocate((4,), torch.uint8, device="meta")


class Daemon:
    """A mooncake_client that holds 64 MB on this machine."""

    def __init__(self, master: Master) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        command = [
            str(program("mooncake_client")),
            "--host=127.0.0.1",
            f"--port={port}",
            "--global_segment_size=64MB",
            f"--master_server_address={master.address}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert until(lambda: self._listens() and bool(master.admin.segments()))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End it and what it has started."""
        place = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        children = [int(pid) for pid in place.read_text().split()] if self._process.poll() is None else []
        for pid in [*children, self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self._process.wait(20)

    def _listens(self) -> bool:
        host, _, port = self.address.partition(":")
        try:
            socket.create_connection((host, int(port)), 0.2).close()
        except OSError:
            return False
        return True


@pytest.fixture
def daemon(own_master: Master) -> Iterator[Daemon]:
    daemon = Daemon(own_master)
    yield daemon
    daemon.kill()


def test_a_daemon_holds_pages_that_outlive_the_client(allocator, own_master, daemon):
    options = {"master": own_master.address, "metrics": own_master.metrics, "daemon": daemon.address}
    keys = keys_of("a", "b", "none")

    def a_tensor_and_pool():
        tensor = allocator.allocate((8, NBYTES), torch.uint8)
        return tensor, HostPool(a_component(), (Segment(tensor.data_ptr(), NBYTES, NBYTES),), 8, owner=tensor)

    tensor, pool = a_tensor_and_pool()
    tensor[0], tensor[1] = 1, 2
    first = a_store(**options)
    first.open([pool])
    assert first.batch_set(keys[:2], pool.pages([0, 1])) == [OK, OK]
    assert first.batch_set(keys[:1], pool.pages([1])) == [OK]
    first.close()
    # Memory of its own: the library maps a block for the first client that registers it, and for no other.
    tensor, pool = a_tensor_and_pool()
    second = a_store(**options)
    second.open([pool])
    try:
        assert second.batch_get(keys, pool.pages([4, 5, 6])) == [OK, OK, Status.MISS]
        assert (int(tensor[4].min()), int(tensor[4].max()), int(tensor[5].min())) == (1, 1, 2)
        assert second.clear() == 2
    finally:
        second.close()


def test_a_daemon_that_ends_is_known_in_no_time(allocator, own_master, daemon):
    """The library answers -1, as for anything else that goes wrong."""
    tensor = allocator.allocate((2, NBYTES), torch.uint8)
    pool = HostPool(a_component(), (Segment(tensor.data_ptr(), NBYTES, NBYTES),), 2, owner=tensor)
    storage = a_store(master=own_master.address, metrics=own_master.metrics, daemon=daemon.address)
    storage.open([pool])
    try:
        assert storage.batch_set(keys_of("a"), pool.pages([0])) == [OK]
        daemon.kill()
        started = time.monotonic()
        assert storage.batch_contains(keys_of("a")) == [Status.UNAVAILABLE]
        assert storage.batch_get(keys_of("a"), pool.pages([1])) == [Status.UNAVAILABLE]
        assert storage.batch_set(keys_of("b"), pool.pages([0])) == [Status.UNAVAILABLE]
        assert time.monotonic() - started < 2
    finally:
        storage.close()


def test_a_daemon_refuses_memory_that_it_cannot_map_and_names_the_allocator(own_master, daemon):
    storage = a_store(master=own_master.address, daemon=daemon.address)
    with pytest.raises(InvalidPages) as raised:
        storage.open([a_pool()])
    assert raised.value.remedy == "With 'daemon', make pools of tensors from MooncakeHostTensorAllocator."
