"""Stores to test on: a root, a metadata of either form, either client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The helpers are plain modules: pytest imports tests by path and knows no package here.
sys.path.insert(0, str(Path(__file__).parent))

from hf3fs_builders import Opener

from hicache_hf3fs import usrbio_double
from hicache_hf3fs.harness import Hf3fsHarness
from hicache_hf3fs.metadata import Terms
from hicache_hf3fs.metadata_local import LocalMetadata


@pytest.fixture(params=["posix", "usrbio"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def faults() -> Iterator[usrbio_double.Faults]:
    """The faults of the usrbio double, none after the test."""
    yield usrbio_double.FAULTS
    usrbio_double.FAULTS.reset()


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    made = Opener(tmp_path / "root")
    made.root.mkdir()
    yield made
    for storage in made.opened:
        storage.close()


@pytest.fixture
def metadata(tmp_path: Path) -> Iterator[LocalMetadata]:
    """Local metadata with short terms, and no page file yet."""
    made = LocalMetadata(str(tmp_path / "m.sqlite"), "0" * 32, Terms(lease_s=60.0, hold_s=15.0))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Hf3fsHarness]:
    """A metadata server process, for one module."""
    harness = Hf3fsHarness({})
    harness.start()
    yield harness
    harness.stop()
