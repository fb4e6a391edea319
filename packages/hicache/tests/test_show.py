from __future__ import annotations

import pytest


@pytest.fixture
def acme(site, acme_source):
    site.backend("acme", acme_source())


def option(shown, name):
    return next(row for row in shown["options"] if row["name"] == name)


def test_an_option_has_type_bounds_default_environment_value_and_source(acme, run_json):
    shown = run_json("show", "acme")
    assert option(shown, "streams") == {
        "name": "streams",
        "type": "int",
        "bounds": ">= 1, <= 64",
        "default": "4",
        "environment": "HICACHE_ACME_STREAMS",
        "value": "4",
        "source": "default",
        "secret": False,
        "description": "Connections.",
    }
    types = {row["name"]: row["type"] for row in shown["options"]}
    assert types == {
        "bounce": "bool",
        "url": "text",
        "token": "secret or unset",
        "streams": "int",
        "cache": "size",
        "mode": "fast | safe",
    }


def test_each_value_names_where_it_comes_from(acme, run_json, monkeypatch, tmp_path):
    config = tmp_path / "hicache.toml"
    config.write_text('[acme]\nurl = "acme://file"\nstreams = 8\n')
    monkeypatch.setenv("HICACHE_CONFIG", str(config))
    monkeypatch.setenv("HICACHE_ACME_STREAMS", "16")
    monkeypatch.setenv("HICACHE_ACME_CACHE", "1gib")
    shown = run_json("show", "acme")
    assert {row["name"]: (row["value"], row["source"]) for row in shown["options"]} == {
        "bounce": ("False", "default"),
        "url": ("acme://file", f"{config} line 2"),
        "token": ("", "default"),
        "streams": ("16", "HICACHE_ACME_STREAMS"),
        "cache": (str(1 << 30), "HICACHE_ACME_CACHE"),
        "mode": ("safe", "default"),
    }


def test_a_secret_is_never_shown(acme, run, monkeypatch):
    monkeypatch.setenv("HICACHE_ACME_TOKEN", "hunter2")
    for arguments in (("show", "acme"), ("show", "acme", "--json")):
        output = run(*arguments).output
        assert "hunter2" not in output
        assert "********" in output


def test_secrets_are_marked(acme, run_json):
    assert [row["name"] for row in run_json("show", "acme")["options"] if row["secret"]] == ["token"]


def test_bad_values_are_shown_with_their_sources_and_every_complaint(acme, run_json, run, monkeypatch):
    monkeypatch.setenv("HICACHE_ACME_STREAMS", "a few")
    monkeypatch.setenv("HICACHE_ACME_CACHE", "4 gigs")
    monkeypatch.setenv("HICACHE_ACME_TOKEN", "hunter2")
    shown = run_json("show", "acme", exit_code=1)
    assert (option(shown, "streams")["value"], option(shown, "streams")["source"]) == (
        "a few",
        "HICACHE_ACME_STREAMS",
    )
    assert {(p["option"], p["source"]) for p in shown["problems"]} == {
        ("streams", "HICACHE_ACME_STREAMS"),
        ("cache", "HICACHE_ACME_CACHE"),
    }
    result = run("show", "acme")
    assert result.exit_code == 1
    assert "2 options of 'acme' are not valid" in result.stderr
    assert "hunter2" not in result.output


def test_a_required_option_that_nobody_set_is_no_error(site, acme_source, run_json):
    site.backend("acme", acme_source(options="master: str = Field(description='The master.')"))
    row = option(run_json("show", "acme"), "master")
    assert (row["default"], row["value"], row["source"]) == ("required", "", "not set")


def test_capabilities_and_requirements_are_there(site, acme_source, run_json, run):
    site.backend(
        "acme",
        acme_source(
            requires='Requirement(module="acme_native", pip="pip install acme-native", apt="libacme1"),'
        ),
    )
    shown = run_json("show", "acme")
    assert shown["capabilities"]["remove"] is True
    assert shown["requires"] == [
        {"module": "acme_native", "pip": "pip install acme-native", "apt": "libacme1", "versions": ""}
    ]
    assert (
        "needs module acme_native: pip install acme-native; apt-get install libacme1"
        in run("show", "acme").output
    )


def test_the_storage_class_is_not_imported(site, acme_source, run):
    source = acme_source().replace(
        'target="fake_hicache_acme_spec:AcmeStorage"', 'target="fake_absent:Storage"'
    )
    site.backend("acme", source)
    assert run("show", "acme").exit_code == 0
