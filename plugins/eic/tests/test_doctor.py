"""What the doctor finds: the module, the address, the interfaces, each with its remedy."""

from __future__ import annotations

from hicache_eic.doctor import checks
from hicache_eic.harness import EicHarness
from hicache_eic.options import EicOptions


def rows(**options) -> dict[str, tuple[bool | None, str, str]]:
    given = {"url": "eic://127.0.0.1:1", "instance_id": "i"} | options
    return {name: (ok, found, remedy) for name, ok, found, remedy in checks(EicOptions(**given))}


def test_a_simulator_that_runs_is_called_one(simulator: EicHarness):
    found = rows(**simulator.options())
    assert {name: ok for name, (ok, _, _) in found.items()} == {"eic module": True, "address": True}
    assert "a simulator and no EIC" in found["eic module"][1]


def test_no_module_and_nobody_at_the_address():
    found = rows(module="eic_absent")
    assert (found["eic module"][0], "comes with EIC's image" in found["eic module"][2]) == (False, True)
    assert found["address"][0] is False
    assert found["address"][2] == "Start the service, or correct url (remote_url)."


def test_an_interface_that_this_machine_does_not_have():
    ok, found, remedy = rows(nic_affinity=True, gpu_nics={"cuda:0": "eth77"})["network interfaces"]
    assert (ok, "interface 'eth77'" in found, remedy) == (False, True, "Correct gpu_nics and cpu_nics.")
    assert rows(nic_affinity=True)["network interfaces"][0] is True


def test_the_yaml_is_named(tmp_path, monkeypatch):
    path = tmp_path / "eic.yaml"
    path.write_text("remote_url: eic://127.0.0.1:1\n")
    monkeypatch.setenv("REMOTE_EIC_YAML", str(path))
    assert rows()["settings"] == (None, f"what is not set otherwise comes from {path}", "")
