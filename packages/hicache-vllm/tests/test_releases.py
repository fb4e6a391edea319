"""Real vLLM releases: versions.py against each wheel, and each one's own tiering over the file backend."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hicache_vllm.versions import ABSTRACT, RELEASES

pytestmark = pytest.mark.timeout(300)  # an import of vLLM and torch, on a machine that may be busy

#: The release that is installed whole, beside those of which there are only the Python files.
INSTALLED = "0.32.0"


@pytest.fixture(scope="module", params=[release.version for release in RELEASES])
def told(request, program, tmp_path_factory):
    version = request.param
    folder = str(tmp_path_factory.mktemp(version))
    wheel = "" if version == INSTALLED else version
    return version, json.loads(program("vllm_release.py", folder, release=wheel))


def test_the_table_of_releases_says_what_the_wheel_has(told):
    version, seen = told
    release = next(each for each in RELEASES if each.version == version)
    row = {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(release).items()}
    del row["version"]
    assert {name: seen[name] for name in row} == row
    assert seen["abstract"] == sorted(ABSTRACT)


def test_everything_that_is_hooked_or_read_is_there(told):
    _, seen = told
    assert (seen["engine"], seen["lora"], seen["missing_fields"]) == (True, True, [])


def test_its_manager_stores_and_loads_and_a_damaged_page_is_a_miss(told):
    _, seen = told
    assert seen["given"] == [True] * 4 + [False, False]
    assert seen["loaded"] == [True] * 4 + [False, True]
    assert seen.get("stats_given", True)
    assert seen["threads"] == []
