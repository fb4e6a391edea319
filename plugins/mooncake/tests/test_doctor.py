"""`hicache doctor mooncake`: each trouble with its cause and remedy, within ten seconds."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from hicache_mooncake.doctor import diagnose
from hicache_mooncake.options import MooncakeOptions

pytest.importorskip("hicache_cli")


def doctor(**options: object) -> list[dict]:
    """Run the command, and give the checks that failed."""
    command = [
        sys.executable,
        "-c",
        "from hicache_cli.main import main; main()",
        "doctor",
        "mooncake",
        "--json",
    ]
    for name, value in options.items():
        command += ["--option", f"{name}={value}"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert time.monotonic() - started < 10
    report = json.loads(done.stdout)
    return [check for check in report["checks"] if check["ok"] is False]


def told(checks: list[dict], name: str) -> tuple[str, str]:
    (check,) = [check for check in checks if check["name"] == name]
    return check["found"], check["remedy"]


def test_a_store_that_works_passes(master, holder):
    assert doctor(master=master.address, metrics=master.metrics, segment_size=0) == []


def test_master_down(real):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found, remedy = told(doctor(master=address, segment_size=0), "master")
    assert f"master {address} cannot be reached: Connection refused" in found
    assert remedy == "Start mooncake_master there, or correct the option master."


def test_wrong_port(master):
    """The metrics port takes connections and is no master."""
    found, remedy = told(doctor(master=master.metrics, segment_size=0), "opening")
    assert f"setting up a client of master {master.metrics} failed" in found
    assert f"What listens on {master.metrics} may not be a mooncake_master" in remedy
    assert "Compare the option master with its --rpc_port." in remedy


def test_wrong_protocol(master):
    found, _ = told(doctor(master=master.address, protocol="udp"), "options")
    assert "protocol='udp': input should be 'tcp' or 'rdma'" in found


def test_a_protocol_without_its_device(master, tmp_path, monkeypatch):
    monkeypatch.setattr("hicache_mooncake._preflight.INFINIBAND", tmp_path / "none")
    rows = {row[0]: row for row in diagnose(MooncakeOptions(master=master.address, protocol="rdma"))}
    check, ok, found, _ = rows["protocol"]
    assert (check, ok) == ("protocol", False)
    assert "this machine has no RDMA device (write protocol='tcp')" in found


def test_segment_too_small(master):
    found, _ = told(doctor(master=master.address, segment_size="1mb"), "options")
    assert "1000000 bytes are too few for Mooncake (write 0, or 16MiB and more)" in found


def test_segment_larger_than_memory(master):
    rows = {row[0]: row for row in diagnose(MooncakeOptions(master=master.address, segment_size="9tb"))}
    _, ok, found, remedy = rows["memory for the segment"]
    assert (ok, "MiB free" in found) == (False, True)
    assert remedy.startswith("Lower segment_size, or write 0")


def test_nobody_gives_memory(own_master):
    checks = doctor(master=own_master.address, metrics=own_master.metrics, segment_size=0)
    found, remedy = told(checks, "segments")
    assert found == "nobody gives memory to the store"
    assert "segment_size='4GiB'" in remedy


def test_two_wheels(real, tmp_path, monkeypatch):
    second = tmp_path / "mooncake_transfer_engine-0.3.12.dist-info"
    second.mkdir()
    (second / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mooncake-transfer-engine\nVersion: 0.3.12\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found, remedy = told(doctor(master="127.0.0.1:1", segment_size=0), "wheel")
    assert (
        "several wheels own the package 'mooncake', and the last one installed overwrote the others" in found
    )
    assert ", mooncake-transfer-engine 0.3.12" in found
    assert remedy.startswith(
        "Run: pip uninstall mooncake-transfer-engine-non-cuda mooncake-transfer-engine; then one of: "
    )


def test_missing_libibverbs(tmp_path, monkeypatch):
    """A library that the wheel links against is not found: the loader's words, and what to install."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    complaint = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    (package / "store.py").write_text(f"raise ImportError({complaint!r})")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found, remedy = told(doctor(master="127.0.0.1:1", segment_size=0), "module mooncake.store")
    assert found == f"ImportError: {complaint}"
    assert remedy.endswith("apt-get install libibverbs1 libcurl4 libnuma1")
