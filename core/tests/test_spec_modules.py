"""A plugin's light module that raises: listing survives, and the error names the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_core import StorageBackendFactory
from hicache_core.errors import BackendImportFailed


@pytest.fixture
def badname(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "badname-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: badname\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hicache.backends]\nbadname = fake_badname_spec:SPEC\n")
    (tmp_path / "fake_badname_spec.py").write_text(
        "from hicache_core import BackendSpec\n"
        "SPEC = BackendSpec(name='Bad Name', api=1, target='m:Storage', options='m:Options')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("badname")
def test_listing_survives_a_spec_that_is_refused():
    row = next(row for row in StorageBackendFactory.list() if row.name == "badname")
    assert isinstance(row.error, BackendImportFailed)
    assert str(row.error) == (
        "importing 'fake_badname_spec:SPEC' of badname 1.0 for backend 'badname' failed: InvalidArgument: "
        "a backend's name is not well formed: 'Bad Name'. Use the pattern [a-z][a-z0-9_]{0,31}. "
        "Report it to the authors of badname 1.0, or leave it out with HICACHE_BACKENDS_DENY=badname."
    )
