"""The copies between device and host pools in plain torch, unpinned: all that SGLang lacks on a CPU.

``apply`` is also the entry point of a test-only plugin, so that a scheduler
process of a real engine has it too. Nothing here touches a storage.
"""

from __future__ import annotations

import functools
import os
import tempfile
from multiprocessing.synchronize import SemLock

import torch

#: A file in the folder for temporary files: the names of semaphores that were made, one a line.
SEMAPHORES = "semaphores"


def apply() -> None:
    """Replace the transfers of MHA, MLA, DSA and Mamba host pools; once a process."""
    from sglang.srt.mem_cache.pool_host import dsa, mamba, mha, mla
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    if getattr(HostKVCache, "_hicache_cpu", False):
        return
    HostKVCache._hicache_cpu = True
    for pool in (HostKVCache, dsa.DSAIndexerPoolHost, mamba.MambaPoolHost):
        _never_pin(pool)
    _never_pin_tensors()
    for pool, halves in (
        (mha.MHATokenToKVPoolHost, _kv_halves),
        (mha.AsymmetricMHATokenToKVPoolHost, _kv_halves),
        (mla.MLATokenToKVPoolHost, _mla_halves),
    ):
        pool.backup_from_device_all_layer = _backup(halves)
        pool.load_to_device_per_layer = _load(halves)
    _leave_nothing_in_shared_memory()
    dsa.DSAIndexerPoolHost.backup_from_device_all_layer = _backup_indexer
    dsa.DSAIndexerPoolHost.load_to_device_per_layer = _load_indexer
    mamba.MambaPoolHost.backup_from_device_all_layer = _backup_mamba
    mamba.MambaPoolHost.load_to_device_per_layer = _load_mamba


def _leave_nothing_in_shared_memory() -> None:
    """Put the file of a scheduler's load, which SGLang never unlinks, where its other temporary files go.

    Semaphores have no choice of place: their names are written down there, for
    SGLang kills its processes, and their resource tracker with them.
    """
    from sglang.srt.managers import load_snapshot

    folder = tempfile.gettempdir()
    load_snapshot.shm_path_for = lambda name: f"{folder}/load-{os.path.basename(name)}"
    make = SemLock._make_name

    def noted() -> str:
        name = make()
        with open(f"{folder}/{SEMAPHORES}", "a") as file:
            file.write(f"{name}\n")
        return name

    SemLock._make_name = staticmethod(noted)


def _never_pin(pool) -> None:
    original = pool.__init__

    @functools.wraps(original)
    def init(self, *arguments, **named):
        if "pin_memory" in original.__code__.co_varnames:
            named["pin_memory"] = False
        original(self, *arguments, **named)

    pool.__init__ = init


def _never_pin_tensors() -> None:
    """LoRA pins its small tables without asking whether there is anything to pin them for."""

    def unpinned(make):
        return functools.wraps(make)(
            lambda *arguments, **named: make(*arguments, **named | {"pin_memory": False})
        )

    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


def _kv_halves(host, device):
    return ((host.kv_buffer[0], device.k_buffer), (host.kv_buffer[1], device.v_buffer))


def _mla_halves(host, device):
    return ((host.kv_buffer, device.kv_buffer),)


def _at(host, buffer, layer, indices):
    """Name the rows of a layer in a host buffer: what to put between its brackets."""
    page, row = indices // host.page_size, indices % host.page_size
    if host.layout == "layer_first":
        return (layer, indices)
    if host.layout == "page_first":
        return (indices, layer)
    if host.layout == "page_first_direct":
        return (page, layer, row)
    if host.layout == "page_head":
        return (page, slice(None), row, layer)
    raise ValueError(host.layout)


def _backup(halves):
    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend):
        for host, device in halves(self, device_pool):
            for layer, rows in enumerate(device):
                host[_at(self, host, layer, host_indices)] = rows[device_indices]

    return backup_from_device_all_layer


def _load(halves):
    def load_to_device_per_layer(
        self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False
    ):
        for host, device in halves(self, device_pool):
            device[layer_id][device_indices] = host[_at(self, host, layer_id, host_indices)]

    return load_to_device_per_layer


def _indexer_layer(host, layer):
    """Give a layer of the indexer's host buffer as (pages, bytes)."""
    buffer = host.index_k_with_scale_buffer
    if host.layout == "layer_first":
        return buffer[layer]
    view = buffer[:, layer]
    return view.reshape(view.shape[0], -1) if view.is_contiguous() else view.squeeze(1)


def _backup_indexer(self, device_pool, host_indices, device_indices, io_backend):
    pages, device_pages = (
        host_indices[:: self.page_size] // self.page_size,
        device_indices[:: self.page_size] // self.page_size,
    )
    for layer, rows in enumerate(device_pool.index_k_with_scale_buffer):
        _indexer_layer(self, layer)[pages] = rows[device_pages]


def _load_indexer(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
    pages, device_pages = (
        host_indices[:: self.page_size] // self.page_size,
        device_indices[:: self.page_size] // self.page_size,
    )
    device_pool.index_k_with_scale_buffer[layer_id][device_pages] = _indexer_layer(self, layer_id)[pages]


def _backup_mamba(self, device_pool, host_indices, device_indices, io_backend):
    for layer in range(self.num_mamba_layers):
        self.temporal_buffer[host_indices, layer, 0] = self.temporal_device_layers[layer][device_indices]
        for host, layers in zip(self.conv_buffer, self.conv_device_layers, strict=True):
            host[host_indices, layer, 0] = layers[layer][device_indices]


def _load_mamba(self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False):
    self.temporal_device_layers[layer_id][device_indices] = self.temporal_buffer[host_indices, layer_id, 0]
    for host, layers in zip(self.conv_buffer, self.conv_device_layers, strict=True):
        layers[layer_id][device_indices] = host[host_indices, layer_id, 0]


torch.set_num_threads(1)
