"""Network interfaces by tables and by the PCI topology of a made-up sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest
from eic_builders import Opener

from hicache_core.errors import InvalidOptions
from hicache_eic.affinity import near_interfaces
from hicache_eic.simulator import eic

#: Two sockets; on each a root port with a switch of two GPUs and one interface, and an interface of its own.
_DEVICES = {
    "0000:17:00.0": ("pci0000:16/0000:16:01.0/0000:17:00.0", "gpu", 0),
    "0000:18:00.0": ("pci0000:16/0000:16:01.0/0000:18:00.0", "gpu", 0),
    "0000:19:00.0": ("pci0000:16/0000:16:01.0/0000:19:00.0", "eth1", 0),
    "0000:2a:00.0": ("pci0000:16/0000:16:02.0/0000:2a:00.0", "gpu", 0),
    "0000:97:00.0": ("pci0000:96/0000:96:01.0/0000:97:00.0", "gpu", 1),
    "0000:98:00.0": ("pci0000:96/0000:96:01.0/0000:98:00.0", "eth3", 1),
    "0000:99:00.0": ("pci0000:96/0000:96:01.0/0000:99:00.0", "eth4", 1),
    "0000:c0:00.0": ("pci0000:c0/0000:c0:01.0/0000:c0:00.0", "gpu", 1),
    "0000:d0:00.0": ("pci0000:d0/0000:d0:01.0/0000:d0:00.0", "eth9", 0),
}


@pytest.fixture
def sysfs(tmp_path: Path) -> str:
    root = tmp_path / "sys"
    (root / "bus/pci/devices").mkdir(parents=True)
    (root / "class/net/lo").mkdir(parents=True)
    for address, (path, kind, node) in _DEVICES.items():
        place = root / "devices" / path
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{node}\n")
        (place / "vendor").write_text("0x10de\n" if kind == "gpu" else "0x15b3\n")
        (place / "class").write_text("0x030200\n" if kind == "gpu" else "0x020000\n")
        (root / "bus/pci/devices" / address).symlink_to(place)
        if kind != "gpu":
            net = root / "class/net" / kind
            net.mkdir()
            (net / "device").symlink_to(place)
            (net / "operstate").write_text("down\n" if kind == "eth9" else "up\n")
    for cpu, node in ((0, 0), (1, 1)):
        (root / f"devices/system/cpu/cpu{cpu}/node{node}").mkdir(parents=True)
    return str(root)


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ("cuda:0", "eth1"),
        ("cuda:1", "eth1"),
        ("cuda:2", "eth1"),
        ("cuda:3", "eth3,eth4"),
        ("cuda:4", "eth3,eth4"),
        ("cpu", "eth1"),
    ],
    ids=[
        "one switch",
        "its other GPU",
        "same host bridge",
        "two are as near",
        "same NUMA node",
        "host memory",
    ],
)
def test_the_nearest_interfaces_by_topology(sysfs, device, wanted):
    assert near_interfaces(device, {}, {}, sysfs=sysfs, visible="", cpus=[0]) == wanted


def test_visible_devices_renumber_gpus(sysfs):
    assert near_interfaces("cuda:0", {}, {}, sysfs=sysfs, visible="3,0") == "eth3,eth4"
    assert near_interfaces("cuda:1", {}, {}, sysfs=sysfs, visible="3, 0") == "eth1"


def test_the_environment_says_which_devices_are_visible(sysfs, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert near_interfaces("cuda:0", {}, {}, sysfs=sysfs) == "eth3,eth4"


@pytest.mark.parametrize(
    ("device", "visible", "said"),
    [
        ("cuda:5", "", "5 GPUs in"),
        ("cuda:1", "0", "CUDA_VISIBLE_DEVICES is '0'"),
        ("cuda:0", "GPU-8f6d", "CUDA_VISIBLE_DEVICES is 'GPU-8f6d'"),
    ],
    ids=["no such GPU", "not visible", "named by UUID"],
)
def test_a_gpu_whose_place_is_not_known_is_an_error_with_the_remedy(sysfs, device, visible, said):
    with pytest.raises(InvalidOptions) as caught:
        near_interfaces(device, {}, {}, sysfs=sysfs, visible=visible)
    assert said in str(caught.value)
    assert "set gpu_nics" in str(caught.value)


@pytest.mark.parametrize(
    ("gpu", "cpu", "wanted"),
    [
        ({"cuda:0": "eth7"}, {}, "eth7"),
        ({"cuda:0": "eth7"}, {"cuda:0": "eth8"}, "eth8"),
        ({"cuda:0": "eth7"}, {"cuda:0": "cpu"}, ""),
        ({}, {"cuda:1": "eth8"}, "eth1"),
    ],
    ids=["GPU table", "CPU table wins", "none in particular", "another device's entry"],
)
def test_tables_win_over_topology(sysfs, gpu, cpu, wanted):
    assert near_interfaces("cuda:0", gpu, cpu, sysfs=sysfs, visible="") == wanted


def test_a_table_without_this_gpu_is_an_error(sysfs):
    with pytest.raises(InvalidOptions) as caught:
        near_interfaces("cuda:3", {"cuda:0": "eth1"}, {}, sysfs=sysfs)
    assert "gpu_nics has no entry for 'cuda:3'; it has cuda:0" in str(caught.value)


def test_a_machine_without_any_has_none(tmp_path):
    assert near_interfaces("cpu", {}, {}, sysfs=str(tmp_path)) == ""


def test_the_client_is_told_the_interface_of_its_own_gpu(opener: Opener, monkeypatch):
    """Upstream rebinds the module's tables, so that a second instance re-tunes the first."""
    told = []
    init = eic.Client.init

    def recorded(self, instance, endpoint, about):
        told.append(about.multi_net_local_interface_names)
        return init(self, instance, endpoint, about)

    monkeypatch.setattr(eic.Client, "init", recorded)
    tables = {"nic_affinity": True, "gpu_nics": {"cuda:0": "eth1", "cuda:1": "eth2"}}
    opener(device="cuda:1", **tables)
    opener(device="cuda:0", **tables)
    opener(device="cuda:0", **(tables | {"nic_affinity": False}))
    assert told == ["eth2", "eth1", ""]
