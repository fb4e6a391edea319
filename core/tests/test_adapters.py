"""What adapters of all engines share."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hicache_core.adapters import AdapterOptions, parsed_version, release_known
from hicache_core.errors import InvalidOptions
from hicache_core.options import resolve


@dataclass(frozen=True)
class Release:
    version: str


RELEASES = [Release("0.5.5"), Release("0.5.9"), Release("0.5.20")]


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.5.5", 0), ("0.5.8.post1", 0), ("0.5.9rc1", 1), ("0.5.10", 1), ("0.5.20", 2), ("1.0", 2)],
)
def test_a_release_is_the_newest_that_is_not_newer(version: str, known: int) -> None:
    assert release_known("Engine", RELEASES, version) is RELEASES[known]


@pytest.mark.parametrize("version", ["0.5.4", "0.4", "", "main"])
def test_what_is_too_old_or_no_version_is_told_with_the_oldest(version: str) -> None:
    with pytest.raises(ValueError, match=f"^Engine {version} is not supported; the oldest is 0.5.5$"):
        release_known("Engine", RELEASES, version)


def test_versions_sort_as_numbers() -> None:
    assert parsed_version("0.5.9") < parsed_version("0.5.20.post1") == (0, 5, 20)


def test_a_backends_options_are_a_table() -> None:
    resolved = resolve("engine", AdapterOptions, {"options": {"root": "/data"}, "tenant": "a"}).options
    assert resolved.options == {"root": "/data"}
    with pytest.raises(InvalidOptions, match="is not a table of options"):
        resolve("engine", AdapterOptions, {"options": "root=/data"})
