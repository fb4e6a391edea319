"""Options, and the YAML that SGLang's users have."""

from __future__ import annotations

import pytest
from eic_builders import Opener, an_arena

from hicache_core.errors import BackendDependencyMissing, BackendUnavailable, InvalidOptions
from hicache_core.options import resolve
from hicache_eic.options import EicOptions
from hicache_eic.spec import SPEC

GOOD = {"url": "eic://10.0.0.7:12500", "instance_id": "kv-1"}

YAML = """
remote_url: "eic://10.0.0.9:12500"
eic_instance_id: "from-yaml"
eic_thread_num: 4
eic_log_dir: "/var/log/eic"
eic_log_level: 1
eic_trans_type: 2
eic_flag_file: "/etc/eic.flags"
eic_namespace: "team"
enable_kvset_direct: false
enable_kvget_direct: true
enable_kvset_gpu_direct: false
enable_gpu_nic_affinity: true
gpu_nic_affinity_config: '{"cuda:0": "eth1", "cuda:1": "eth2"}'
cpu_nic_affinity_config: '{"cuda:0": "cpu"}'
"""


def options(**given) -> EicOptions:
    return resolve("eic", EicOptions, GOOD | given, environment={}).options


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "10.0.0.7:12500"}, 'try "eic://10.0.0.7:12500"'),
        ({"url": "eic://host"}, "is not a service"),
        ({"instance_id": ""}, "at least 1 character"),
        ({"gpu_nics": {"gpu0": "eth1"}}, "'gpu0' is no device"),
        ({"staging": "big"}, "is not a size"),
        ({"ttl_s": 0}, "greater than or equal to 1"),
        ({"module": "a-b"}, "is not a module"),
        ({"instance": "x"}, "instance is unknown (instance_id?)"),
        ({"yaml": "/nonexistent/eic.yaml"}, "'/nonexistent/eic.yaml' cannot be read"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_option_is_refused_with_what_to_write(given, said):
    with pytest.raises(InvalidOptions) as caught:
        options(**given)
    assert said in str(caught.value)


@pytest.mark.parametrize("by", ["option", "environment"])
def test_the_yaml_of_sglangs_users_gives_every_setting(tmp_path, monkeypatch, by):
    path = tmp_path / "remote-eic.yaml"
    path.write_text(YAML)
    given = {}
    if by == "option":
        given["yaml"] = str(path)
    else:
        monkeypatch.setenv("REMOTE_EIC_YAML", str(path))
    made = resolve("eic", EicOptions, given, environment={}).options
    assert made.endpoint == "10.0.0.9:12500"
    assert made.model_dump(include=set(EicOptions.model_fields) - {"yaml", "url"}) == {
        "bounce": False,
        "instance_id": "from-yaml",
        "eic_namespace": "team",
        "ttl_s": None,
        "transport_type": 2,
        "nic_affinity": True,
        "gpu_nics": {"cuda:0": "eth1", "cuda:1": "eth2"},
        "cpu_nics": {"cuda:0": "cpu"},
        "register_set": False,
        "register_get": True,
        "staging": 64 << 20,
        "workers": 4,
        "max_keys": 128,
        "retries": 2,
        "log_dir": "/var/log/eic",
        "log_level": 1,
        "flag_file": "/etc/eic.flags",
        "module": "eic",
    }


def test_other_options_win_over_the_yaml(tmp_path):
    path = tmp_path / "remote-eic.yaml"
    path.write_text(YAML)
    environment = {"HICACHE_EIC_LOG_LEVEL": "3"}
    given = {"yaml": str(path), "instance_id": "mine"}
    made = resolve("eic", EicOptions, given, environment=environment).options
    assert (made.instance_id, made.log_level, made.transport_type) == ("mine", 3, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("remote_urll: eic://h:1", "remote_urll in"),
        ("- a\n- b", "holds no settings"),
        ("remote_url: [", "cannot be read"),
        ("gpu_nic_affinity_config: '{bad'", "gpu_nic_affinity_config in"),
    ],
    ids=["a misspelt field", "a list", "no yaml", "no json"],
)
def test_a_yaml_that_cannot_be_meant_is_refused(tmp_path, text, said):
    path = tmp_path / "eic.yaml"
    path.write_text(text)
    with pytest.raises(InvalidOptions) as caught:
        resolve("eic", EicOptions, GOOD | {"yaml": str(path)}, environment={})
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_module_that_is_not_there_says_where_it_comes_from(opener: Opener):
    with pytest.raises(BackendDependencyMissing) as caught:
        opener(module="eic_absent")
    assert caught.value.module == "eic_absent"
    assert "comes with EIC's image" in str(caught.value)


def test_numbers_that_eic_does_not_know_are_named_together(opener: Opener):
    with pytest.raises(InvalidOptions) as caught:
        opener(transport_type=1, log_level=9)
    assert [field for field, _, _ in caught.value.problems] == ["log_level", "transport_type"]


def test_a_service_that_is_not_there_is_named(opener: Opener):
    with pytest.raises(BackendUnavailable) as caught:
        opener(url="eic://127.0.0.1:1")
    assert "EIC at eic://127.0.0.1:1 does not take instance 'hicache-check'" in str(caught.value)


def test_a_page_that_does_not_fit_the_staging_memory_names_the_least(opener: Opener):
    with pytest.raises(InvalidOptions) as caught:
        opener(an_arena(1, 1 << 17), staging=1 << 16)
    assert f"the least here is {(1 << 17) + 64} bytes" in str(caught.value)


def test_the_simulator_is_never_what_a_user_gets():
    assert EicOptions.model_fields["module"].default == "eic"
    assert "simulator" in SPEC.summary


@pytest.mark.parametrize(("ttl_s", "eviction"), [(None, "none"), (60, "ttl")])
def test_eviction_is_by_age_where_a_time_is_set(opener: Opener, ttl_s, eviction):
    assert opener(ttl_s=ttl_s).capabilities.eviction == eviction
