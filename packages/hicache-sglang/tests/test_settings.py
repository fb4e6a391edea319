"""The adapter's keys in SGLang's extra config: all problems at once, SGLang's own keys left alone."""

from __future__ import annotations

import pytest

from hicache_core.errors import InvalidOptions
from hicache_sglang.settings import SGLANG_KEYS, backend_named, read_settings


def test_keys_of_sglang_are_not_ours_to_refuse():
    settings = read_settings(dict.fromkeys(SGLANG_KEYS, 1) | {"options": {"root": "/kv"}, "tenant": "a"})
    assert (settings.options, settings.tenant, settings.timeout_s) == ({"root": "/kv"}, "a", 5.0)
    assert read_settings(None) == read_settings({})


def test_every_bad_key_is_named_at_once_with_a_close_match():
    with pytest.raises(InvalidOptions) as refused:
        read_settings({"tenent": "a", "timeout_s": 0, "options": "root=/kv"})
    assert [field for field, _, _ in refused.value.problems] == ["options", "timeout_s", "tenent"]
    assert "tenent is unknown (tenant?)" in str(refused.value)
    assert """'root=/kv' is not a table of options, such as {"root": "/data/kv"}""" in str(refused.value)


def test_the_environment_sets_what_the_extra_config_does_not(monkeypatch):
    monkeypatch.setenv("HICACHE_SGLANG_TENANT", "from-environment")
    assert read_settings({}).tenant == "from-environment"
    assert read_settings({"tenant": "explicit"}).tenant == "explicit"


def test_a_backend_is_named_with_or_without_the_prefix():
    assert [backend_named(name) for name in ("file", "hicache.file")] == ["file", "file"]
    with pytest.raises(InvalidOptions, match="backend_name is required"):
        backend_named(None)
