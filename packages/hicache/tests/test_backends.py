from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

from hicache_core import Capabilities
from hicache_core.registry import INSTALL_HINTS

BARE = """
from hicache_core import BackendSpec
SPEC = BackendSpec(name={name!r}, api={api}, target="{module}:Storage", options="{module}:Options")
"""


def row_of(listing, name):
    return next(row for row in listing["backends"] if row["name"] == name)


def test_lists_version_distribution_and_capabilities(run_json, site, acme_source):
    site.backend("acme", acme_source(capabilities='shared=True, eviction="lru"'), version="3.2")
    assert row_of(run_json("backends"), "acme") == {
        "name": "acme",
        "version": "3.2",
        "distribution": "hicache-acme",
        "summary": "an example",
        "capabilities": dataclasses.asdict(Capabilities(shared=True, eviction="lru")),
        "error": None,
    }


def test_the_table_has_a_column_a_backend_and_a_row_a_capability(run, site, acme_source):
    site.backend("acme", acme_source(capabilities='max_batch=77, transport="pigeon"'))
    output = run("backends").output
    assert "acme" in output
    for text in ("survives kill -9", "finds damage", "77", "pigeon"):
        assert text in output


def test_known_backends_that_are_missing_come_with_their_pip_line(run_json, run):
    listing = run_json("backends")
    installed = {row["name"] for row in listing["backends"]}
    expected = [{"name": n, "install": line} for n, line in INSTALL_HINTS.items() if n not in installed]
    assert listing["not_installed"] == expected
    output = run("backends").output
    for entry in expected:
        assert entry["install"] in output


def test_broken_plugins_are_rows_with_their_error_and_the_rest_is_listed(run_json, run, site, acme_source):
    site.backend("acme", acme_source())
    site.backend("raises", "raise RuntimeError('half installed')")
    site.backend("needs", "import nothing_of_this_name\nSPEC = None")
    site.backend("nospec", "SPEC = 3")
    site.backend("typo", "import os\nSPEC = os.no_such_attribute")
    site.backend("old", BARE.format(name="old", api=0, module="m"))
    site.backend("badname", BARE.format(name="Bad Name", api=1, module="m"))
    site.backend("twice", acme_source(), project="one-dist")
    site.backend("twice", acme_source(), project="other-dist")
    listing = run_json("backends")
    errors = {row["name"]: row["error"]["type"] for row in listing["backends"] if row["error"]}
    expected = {
        "raises": "BackendImportFailed",
        "needs": "BackendDependencyMissing",
        "nospec": "BackendIncompatible",
        "old": "BackendIncompatible",
        "typo": "BackendImportFailed",
        "badname": "BackendImportFailed",
        "twice": "BackendConflict",
    }
    assert {name: kind for name, kind in errors.items() if name in expected} == expected
    assert all(row["error"]["remedy"] for row in listing["backends"] if row["error"])
    assert row_of(listing, "acme")["error"] is None
    result = run("backends")
    assert result.exit_code == 0
    assert "RuntimeError: half installed" in result.output
    assert "'twice@one-dist'" in result.output
    assert "'twice@other-dist'" in result.output


def test_an_allowed_name_that_is_not_installed_is_said(run_json, run, monkeypatch):
    monkeypatch.setenv("HICACHE_BACKENDS_ALLOW", "memory, ghost")
    assert run_json("backends")["allowed_but_not_installed"] == ["ghost"]
    assert "HICACHE_BACKENDS_ALLOW names 'ghost', which is not installed." in run("backends").output


def test_a_denied_backend_says_so(run_json, site, acme_source, monkeypatch):
    site.backend("acme", acme_source())
    monkeypatch.setenv("HICACHE_BACKENDS_DENY", "acme")
    assert row_of(run_json("backends"), "acme")["error"]["type"] == "BackendBlocked"


def test_no_backend_and_none_of_the_heavy_modules_is_imported(site):
    site.backend("heavy", BARE.format(name="heavy", api=1, module="fake_heavy"))
    (site.folder / "fake_heavy.py").write_text("raise SystemExit('the backend was imported')")
    code = (
        "import sys, json\n"
        "from hicache_cli.main import main\n"
        "main(['backends'], standalone_mode=False)\n"
        "heavy = {'pydantic', 'numpy', 'torch', 'fake_heavy'} & sys.modules.keys()\n"
        "print('\\n' + json.dumps(sorted(heavy)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(site.folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
