"""``hicache sglang NAME``: flags that can be pasted, for the release that is asked for."""

from __future__ import annotations

import json
import shlex

import pytest
from click.testing import CliRunner

from hicache_core import StorageBackendFactory
from hicache_core.registry import registry
from hicache_sglang.command import sglang


@pytest.fixture(autouse=True)
def toy():
    StorageBackendFactory.register_backend("toy", "sgl_toy", "ToyStore")
    yield
    registry.unregister("toy")


def run(*arguments):
    done = CliRunner().invoke(sglang, arguments)
    return done.exit_code, done.output


def pasted(output: str) -> list[str]:
    """Read the launch line as a shell would."""
    text = output.partition("python -m")[2].partition("\n\n")[0].partition("\n#")[0]
    return shlex.split(text.replace("\\\n", " "))


def flag(words, name):
    return words[words.index(name) + 1]


def test_a_release_with_plugins_takes_the_backend_by_name():
    status, output = run(
        "toy", "-o", "hang_s=2.5", "-o", "mode_file=/a b", "--version", "0.5.23", "--model", "org/m"
    )
    words = pasted(output)
    extra = json.loads(flag(words, "--hicache-storage-backend-extra-config"))
    assert (status, flag(words, "--hicache-storage-backend"), flag(words, "--model-path")) == (
        0,
        "hicache.toy",
        "org/m",
    )
    assert extra == {"options": {"hang_s": 2.5, "mode_file": "/a b"}}


def test_the_attach_request_is_one_that_the_server_reads():
    _, output = run("toy", "-o", "hang_s=2", "--version", "0.5.23")
    words = shlex.split(output.partition("curl")[2].replace("\\\n", " "))
    body = json.loads(flag(words, "-d"))
    assert body["hicache_storage_backend"] == "hicache.toy"
    assert json.loads(body["hicache_storage_backend_extra_config_json"]) == {"options": {"hang_s": 2}}


@pytest.mark.parametrize(
    ("version", "dynamic", "zero_copy", "attaches"),
    [("0.5.5", True, False, False), ("0.5.9", True, True, True), ("0.5.11", False, False, True)],
)
def test_each_release_gets_what_it_knows(version, dynamic, zero_copy, attaches):
    _, output = run("toy", "--version", version)
    words = pasted(output)
    assert flag(words, "--hicache-storage-backend") == ("dynamic" if dynamic else "hicache.toy")
    given = words[words.index("--hicache-storage-backend") + 2 :]
    extra = json.loads(given[1]) if given else {}
    assert (extra.get("class_name"), "interface_v1" in extra) == (
        "HiCacheSGLang" if dynamic else None,
        zero_copy,
    )
    assert ("curl" in output) is attaches


def test_dynamic_can_be_asked_for():
    _, output = run("toy", "--version", "0.5.23", "--dynamic")
    assert flag(pasted(output), "--hicache-storage-backend") == "dynamic"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("toy", "-o", "hang=2"), "hang is unknown (hang_s?)"),
        (("toy", "-o", "hang_s"), "an option is written k=v, not 'hang_s'"),
        (("moncake",), "moncake"),
        (("toy", "--version", "0.5.4"), "the oldest is 0.5.5"),
    ],
    ids=["unknown option", "no value", "unknown backend", "too old"],
)
def test_what_cannot_work_is_an_error_with_a_remedy(arguments, words):
    status, output = run(*arguments)
    assert status == 1
    assert words in output
