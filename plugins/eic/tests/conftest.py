"""A simulator process for each module, without quirks of an earlier test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The helpers are plain modules: pytest imports tests by path and knows no package here.
sys.path.insert(0, str(Path(__file__).parent))

from eic_builders import Opener

from hicache_eic.harness import EicHarness


@pytest.fixture(scope="module")
def process() -> Iterator[EicHarness]:
    harness = EicHarness({})
    harness.start()
    yield harness
    harness.stop()


@pytest.fixture
def simulator(process: EicHarness) -> EicHarness:
    process.quirks()
    return process


@pytest.fixture
def opener(simulator: EicHarness) -> Iterator[Opener]:
    made = Opener(simulator)
    yield made
    for storage in made.opened:
        storage.close()


@pytest.fixture(autouse=True)
def no_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads the settings of this machine's user."""
    monkeypatch.delenv("REMOTE_EIC_YAML", raising=False)
