"""``hicache vllm NAME``: a configuration that can be pasted, for the release that is asked for."""

from __future__ import annotations

import json
import shlex

import pytest
from click.testing import CliRunner

from hicache_core import StorageBackendFactory
from hicache_core.registry import registry
from hicache_vllm.command import vllm
from hicache_vllm.settings import read_settings
from hicache_vllm.versions import RELEASES, release_of


@pytest.fixture(autouse=True)
def toy():
    StorageBackendFactory.register_backend("toy", "vllm_toy", "ToyStore")
    yield
    registry.unregister("toy")


def run(*arguments):
    done = CliRunner().invoke(vllm, arguments)
    return done.exit_code, done.output


def pasted(output: str) -> dict:
    """Read the launch line as a shell would."""
    words = shlex.split(output.partition("vllm serve")[2].replace("\\\n", " "))
    return json.loads(words[words.index("--kv-transfer-config") + 1])


def test_the_line_holds_a_tier_that_the_adapter_reads():
    status, output = run(
        "toy", "-o", "hang_s=2.5", "--cpu-bytes", "1GiB", "--version", "0.32.0", "--model", "o/m"
    )
    config = pasted(output)
    extra = config["kv_connector_extra_config"]
    assert (status, config["kv_connector"], config["kv_role"]) == (0, "OffloadingConnector", "kv_both")
    assert (extra["spec_name"], extra["cpu_bytes_to_use"]) == ("TieringOffloadingSpec", 1 << 30)
    (entry,) = extra["secondary_tiers"]
    assert entry == {"type": "hicache", "backend": "toy", "options": {"hang_s": 2.5}}
    assert read_settings(entry).options == {"hang_s": 2.5}
    assert "vllm serve o/m" in output
    assert "--shutdown-timeout 30" in output


def test_json_is_the_value_alone():
    _, output = run("toy", "--version", "0.32.0", "--blocks-per-chunk", "4", "--json")
    assert json.loads(output)["kv_connector_extra_config"]["blocks_per_chunk"] == 4


@pytest.mark.parametrize(
    ("version", "seeded", "chunks"),
    [("0.24.0", False, False), ("0.28.0", False, True), ("0.33.0", True, True)],
)
def test_each_release_gets_what_it_knows(version, seeded, chunks):
    _, output = run("toy", "--version", version, "--blocks-per-chunk", "4")
    assert ("PYTHONHASHSEED" not in output) is seeded
    assert ("blocks_per_chunk" in pasted(output)["kv_connector_extra_config"]) is chunks


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("toy", "-o", "hang=2"), "hang is unknown (hang_s?)"),
        (("toy", "-o", "hang_s"), "an option is written k=v, not 'hang_s'"),
        (("moncake",), "moncake"),
        (("toy", "--version", "0.23.0"), "the oldest is 0.24.0"),
        (("toy", "--cpu-bytes", "4 gigs"), "is not a size"),
    ],
    ids=["unknown option", "no value", "unknown backend", "too old", "no size"],
)
def test_what_cannot_work_is_an_error_with_a_remedy(arguments, words):
    status, output = run(*arguments)
    assert status == 1
    assert words in output


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.24.0", "0.24.0"), ("0.30.1", "0.28.0"), ("0.32.0.post1", "0.32.0"), ("0.40", "0.33.0")],
)
def test_a_release_between_known_ones_is_like_the_one_before(version, known):
    assert release_of(version).version == known
    assert [release.version for release in RELEASES] == sorted(release.version for release in RELEASES)
