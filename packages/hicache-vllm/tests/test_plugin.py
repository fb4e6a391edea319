"""The entry point: the tier type, and the configuration behind a spec."""

from __future__ import annotations

import gc
import logging
import sys
from types import SimpleNamespace

import vllm_fake

from hicache_vllm import plugin


def test_registering_twice_names_the_tier_once_and_changes_no_call(fake):
    modules = fake()
    plugin.register()
    plugin.register()
    tiers = modules["vllm.v1.kv_offload.tiering.factory"].SecondaryTierFactory
    assert tiers.registry == {"hicache": ("hicache_vllm.tier", "HiCacheTier")}
    factory = modules["vllm.distributed.kv_transfer.kv_connector.factory"].KVConnectorFactory
    config = vllm_fake.vllm_config("m")
    assert factory.create_connector(config, "worker", None) == "connector of worker"
    assert factory.made == [(config, "worker")]


def test_the_config_of_a_spec_is_found_by_its_engine_and_not_kept_alive(fake):
    modules = fake()
    plugin.register()
    factory = modules["vllm.distributed.kv_transfer.kv_connector.factory"].KVConnectorFactory
    configs = [vllm_fake.vllm_config("m", kv_transfer_config__engine_id=f"dp{rank}") for rank in range(2)]
    specs = [vllm_fake.spec(config) for config in configs]
    for config in configs:
        factory.create_connector(config=config, role="scheduler", kv_cache_config=None)
    assert [plugin.config_of(spec) for spec in specs] == configs
    factory.made.clear()
    del configs, config
    gc.collect()
    assert [plugin.config_of(spec) for spec in specs] == [None, None]


def test_a_spec_that_holds_its_config_is_asked_first(fake):
    fake(old=True)
    config = vllm_fake.vllm_config("m")
    assert plugin.config_of(vllm_fake.spec(config, old=True)) is config


def test_without_an_engine_id_nothing_is_remembered(fake):
    modules = fake()
    plugin.register()
    factory = modules["vllm.distributed.kv_transfer.kv_connector.factory"].KVConnectorFactory
    factory.create_connector(SimpleNamespace(kv_transfer_config=None), "scheduler", None)
    assert plugin.config_of(SimpleNamespace(config=SimpleNamespace(engine_id=None))) is None


def test_a_vllm_without_tiers_is_said(fake, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.WARNING, "hicache"):
        plugin.register()
    assert "0.24 to 0.33 have it" in caplog.text
