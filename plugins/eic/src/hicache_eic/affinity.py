"""Which network interface is near: by a table, or by the PCI topology in sysfs.

Two devices are the nearer, the longer the part of their sysfs paths that they share: the same switch, the
same root port, the same host bridge. Host memory has no path; its interfaces are those of its NUMA node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hicache_core.errors import InvalidOptions

_NVIDIA = "0x10de"
#: PCI classes of GPUs: VGA and 3D controllers.
_GPU_CLASSES = ("0x0300", "0x0302")
#: In a table of interfaces for host memory: no interface in particular. SGLang's default table says so.
_NO_INTERFACE = ("", "cpu")


@dataclass(frozen=True, slots=True)
class _Device:
    name: str
    path: tuple[str, ...]
    numa_node: int


def near_interfaces(
    device: str,
    gpu_nics: Mapping[str, str],
    cpu_nics: Mapping[str, str],
    *,
    sysfs: str = "/sys",
    visible: str | None = None,
    cpus: Iterable[int] | None = None,
) -> str:
    """Name the interfaces to use, joined by commas; "" for whichever the client takes.

    Args:
        device: ``cuda:N`` of the engine, or ``cpu``.
        gpu_nics, cpu_nics: device -> interface; the latter wins.
        visible: CUDA_VISIBLE_DEVICES, which renumbers ``cuda:N``; the environment's when not given.
        cpus: the CPUs that this process may run on, for ``cpu``; asked for when not given.

    Raises: InvalidOptions, where a GPU's place cannot be found and no table says it.
    """
    for table in (cpu_nics, gpu_nics):
        if device in table:
            return "" if table[device] in _NO_INTERFACE else table[device]
    if gpu_nics and device != "cpu":
        complaint = f"gpu_nics has no entry for '{device}'; it has {', '.join(sorted(gpu_nics))}"
        raise InvalidOptions("eic", [("gpu_nics", complaint, "")])
    interfaces = _interfaces(sysfs)
    if device.startswith("cuda:"):
        return ",".join(_nearest(_gpu(device, sysfs, visible), interfaces))
    nodes = _nodes_of(sysfs, os.sched_getaffinity(0) if cpus is None else cpus)
    return ",".join(nic.name for nic in interfaces if nic.numa_node in nodes)


def _nearest(gpu: _Device, interfaces: list[_Device]) -> list[str]:
    shared = {nic.name: _shared(gpu.path, nic.path) for nic in interfaces}
    # The path to the host bridges themselves is no nearness: /sys/devices.
    best = max(shared.values(), default=0)
    if best > _depth_of_bridges(gpu):
        return [name for name, n in shared.items() if n == best]
    return [nic.name for nic in interfaces if nic.numa_node == gpu.numa_node]


def _shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """Count the leading parts that two paths have in common."""
    for count, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return count
    return min(len(one), len(other))


def _depth_of_bridges(gpu: _Device) -> int:
    return next((i for i, part in enumerate(gpu.path) if part.startswith("pci")), len(gpu.path))


def _gpu(device: str, sysfs: str, visible: str | None) -> _Device:
    """Find a GPU; CUDA numbers those of one kind in the order of their PCI addresses."""
    number = int(device.removeprefix("cuda:"))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    if chosen:
        entries = [entry.strip() for entry in chosen.split(",")]
        if number >= len(entries) or not entries[number].isdigit():
            raise _unknown(device, f"CUDA_VISIBLE_DEVICES is {chosen!r}")
        number = int(entries[number])
    folder = os.path.join(sysfs, "bus", "pci", "devices")
    found = []
    for address in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        place = os.path.join(folder, address)
        if _read(place, "vendor") == _NVIDIA and _read(place, "class").startswith(_GPU_CLASSES):
            found.append(_device(address, place, sysfs))
    if number >= len(found):
        raise _unknown(device, f"{len(found)} GPUs in {folder}")
    return found[number]


def _unknown(device: str, value: str) -> InvalidOptions:
    complaint = f"the place of '{device}' is not known ({value}); set gpu_nics, or nic_affinity=false"
    return InvalidOptions("eic", [("nic_affinity", complaint, "")])


def _interfaces(sysfs: str) -> list[_Device]:
    """List the interfaces that are devices of their own and are not down."""
    folder = os.path.join(sysfs, "class", "net")
    found = []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        place = os.path.join(folder, name, "device")
        if os.path.exists(place) and _read(os.path.join(folder, name), "operstate") != "down":
            found.append(_device(name, place, sysfs))
    return found


def _device(name: str, place: str, sysfs: str) -> _Device:
    real = os.path.realpath(place)
    parts = os.path.relpath(real, os.path.realpath(sysfs)).split(os.sep)
    node = _read(real, "numa_node")
    return _Device(name, tuple(parts), int(node) if re.fullmatch(r"\d+", node) else -1)


def _nodes_of(sysfs: str, cpus: Iterable[int]) -> set[int]:
    nodes: set[int] = set()
    for cpu in cpus:
        folder = os.path.join(sysfs, "devices", "system", "cpu", f"cpu{cpu}")
        names = os.listdir(folder) if os.path.isdir(folder) else []
        nodes |= {int(name[4:]) for name in names if re.fullmatch(r"node\d+", name)}
    return nodes


def _read(folder: str, name: str) -> str:
    try:
        with open(os.path.join(folder, name), encoding="ascii") as file:
            return file.read().strip()
    except (OSError, UnicodeError):
        return ""
