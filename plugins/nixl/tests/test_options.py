"""Options: what is refused, and how the message reads."""

from __future__ import annotations

import pytest

from hicache_core.errors import InvalidOptions
from hicache_core.options import resolve
from hicache_nixl.choice import choose, parameters
from hicache_nixl.options import NixlOptions

S3 = {"bucket": "kv-pages", "access_key": "a", "secret_key": "s"}


def resolved(**options) -> NixlOptions:
    return resolve("nixl", NixlOptions, options, environment={}).options


def problem(**options) -> str:
    with pytest.raises(InvalidOptions) as caught:
        resolved(**options)
    return "; ".join(complaint for _, complaint, _ in caught.value.problems)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "nowhere to put pages; set folders, or bucket for S3"),
        ({**S3, "folders": ["/kv"]}, "folders and bucket exclude each other; set one of them"),
        ({"bucket": "kv-pages"}, "OBJ needs access_key, secret_key"),
        (
            {**S3, "capacity": "1GiB"},
            "capacity is for files; bound a bucket by a quota or rule of its server",
        ),
        ({"folders": ["/kv"], "plugin": "OBJ"}, "folders and bucket exclude each other; set one of them"),
        ({**S3, "plugin": "POSIX"}, "POSIX keeps files; drop bucket, or set plugin to OBJ"),
        ({"folders": ["/kv"], "direct_io": True, "plugin": "GDS"}, "direct_io is for POSIX"),
        ({"folders": ["/kv", "/kv/"]}, "a folder is named twice"),
        ({**S3, "bucket": "KV"}, "'KV' is not a bucket's name"),
        ({**S3, "endpoint": "10.0.0.5:8333"}, "an endpoint is http(s)://host[:port]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_do_not_fit_say_what_to_do(options, complaint):
    assert complaint in problem(**options)


def test_options_take_one_folder_as_text_and_several_with_colons():
    assert resolved(folders="/a:/b").folders == ("/a", "/b")


def test_options_misspelt_secret_offers_the_right_name():
    """SGLang's README spells it so; NIXL would silently sign with nothing."""
    assert problem(**S3, secrete_key="s") == "secrete_key is unknown (secret_key?)"


def test_options_show_no_secret():
    shown = repr(resolved(**S3 | {"secret_key": "hush-hush"}))
    assert "hush-hush" not in shown


def test_options_refuse_the_queue_that_is_dead_after_one_error():
    assert "use_posix_aio is refused" in problem(folders="/kv", engine={"use_posix_aio": "true"})


def test_engine_parameters_that_nixl_would_ignore_are_refused():
    with pytest.raises(InvalidOptions) as caught:
        parameters("POSIX", resolved(folders="/kv", engine={"kernel_queue_sise": "512"}))
    assert "engine.kernel_queue_sise is unknown to POSIX (kernel_queue_size?)" in str(caught.value)


def test_posix_parameters_name_the_queue_and_its_size():
    options = resolved(folders="/kv", io="uring", in_flight=512, engine={"kernel_queue_size": "64"})
    assert parameters("POSIX", options) == {
        "ios_pool_size": "512",
        "use_uring": "true",
        "kernel_queue_size": "64",
    }


def test_object_parameters_are_spelt_as_nixl_reads_them():
    options = resolved(**S3, endpoint="http://127.0.0.1:1/")
    assert parameters("OBJ", options) == {
        "bucket": "kv-pages",
        "region": "us-east-1",
        "access_key": "a",
        "secret_key": "s",
        "endpoint_override": "http://127.0.0.1:1",
        "scheme": "http",
        "use_virtual_addressing": "false",
        "req_checksum": "required",
    }


@pytest.mark.parametrize(
    ("options", "plugin", "reason"),
    [
        ({"folders": "/"}, "POSIX", "pages lie in folders and in host memory"),
        (S3, "OBJ", "a bucket is set"),
        ({"folders": "/", "plugin": "GDS"}, "GDS", "it was asked for"),
    ],
)
def test_choice_gives_a_reason(options, plugin, reason):
    choice = choose(resolved(**options), ())
    assert (choice.plugin, choice.reason) == (plugin, reason)


def test_choice_of_a_3fs_mount_is_spelt_as_nixl_spells_it(monkeypatch):
    """SGLang's order says 3FS, which NIXL has never heard of."""
    monkeypatch.setattr("hicache_nixl.choice.file_system_of", lambda folder: "hf3fs")
    assert choose(resolved(folders="/3fs"), ()).plugin == "HF3FS"
    assert "HF3FS" in problem(folders="/3fs", plugin="3FS")
