"""What doctor says of the installed wheel."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_nixl import doctor
from hicache_nixl.options import NixlOptions

OPTIONS = NixlOptions(folders=("/tmp",))


def test_doctor_names_every_plugin_of_the_wheel_and_what_is_missing(nixl):
    rows = {name: (ok, found, remedy) for name, ok, found, remedy in doctor.checks(OPTIONS)}
    assert rows["plugin POSIX"] == (True, "loads", "")
    assert rows["plugin OBJ"][0] is None
    wheel = {f"plugin {name}" for name in doctor.plugins_of("nixl_cu12")}
    assert wheel
    assert wheel <= set(rows)
    for name, (_, found, remedy) in rows.items():
        if "cannot work here" in found:
            assert found.split(": ")[1].startswith("lib"), name
            assert remedy, name


def test_doctor_fails_the_plugin_that_was_asked_for(nixl, monkeypatch):
    monkeypatch.setattr(doctor, "trouble", lambda path: "libcufile.so.0 missing")
    rows = {name: (ok, found, remedy) for name, ok, found, remedy in doctor.checks(OPTIONS)}
    assert rows["plugin POSIX"][:2] == (False, "cannot work here: libcufile.so.0 missing")
    assert rows["plugin POSIX"][2].startswith("Run: pip install nvidia-cufile")


def test_doctor_survives_a_plugin_that_ends_the_process(tmp_path):
    assert "cannot be loaded" in doctor.trouble(Path(tmp_path / "none.so")) or "missing" in doctor.trouble(
        Path(tmp_path / "none.so")
    )


def test_doctor_without_nixl_says_what_to_type(monkeypatch):
    from hicache_core.errors import BackendDependencyMissing

    def absent(library):
        raise BackendDependencyMissing("nixl", "nixl_cu12", remedy="Run: pip install 'hicache-nixl[cu12]'")

    monkeypatch.setattr(doctor, "load", absent)
    assert list(doctor.checks(OPTIONS)) == [
        (
            "NIXL",
            False,
            "'nixl' needs 'nixl_cu12', which is not installed.",
            "Run: pip install 'hicache-nixl[cu12]'",
        )
    ]


@pytest.mark.parametrize(("setting", "ok"), [("0\n", True), ("2\n", False)])
def test_doctor_sees_that_io_uring_is_off(monkeypatch, tmp_path, setting, ok):
    (tmp_path / "io_uring_disabled").write_text(setting)
    monkeypatch.setattr(doctor, "_IO_URING", tmp_path / "io_uring_disabled")
    rows = {
        name: verdict for name, verdict, _, _ in doctor.queues(NixlOptions(folders=("/tmp",), io="uring"))
    }
    assert rows["io_uring"] is ok
