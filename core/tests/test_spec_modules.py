"""A plugin's light module that raises: listing survives, and the error names the plugin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hicache_core import StorageBackendFactory
from hicache_core.errors import BackendImportFailed

_REFUSED = """
from hicache_core import BackendSpec
SPEC = BackendSpec(name="Bad Name", api=1, target="m:Storage", options="m:Options")
"""


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        pytest.param(
            _REFUSED,
            "InvalidArgument: a backend's name is not well formed: 'Bad Name'. "
            "Use the pattern [a-z][a-z0-9_]{0,31}.",
            id="refused",
        ),
        pytest.param("raise SystemExit(3)", "SystemExit: 3.", id="exits"),
    ],
)
def test_listing_survives_a_spec_module_that_raises(
    source: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hicache.backends]\nbroken = fake_broken_spec:SPEC\n")
    (tmp_path / "fake_broken_spec.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("fake_broken_spec", None)
    row = next(row for row in StorageBackendFactory.list() if row.name == "broken")
    assert isinstance(row.error, BackendImportFailed)
    assert str(row.error) == (
        f"importing 'fake_broken_spec:SPEC' of broken 1.0 for backend 'broken' failed: {cause} "
        "Report it to the authors of broken 1.0, or leave it out with HICACHE_BACKENDS_DENY=broken."
    )
