"""Options and the spec: what is refused, in which words, and what an opened instance still promises."""

from __future__ import annotations

import dataclasses

import pytest
from hf3fs_builders import NBYTES, Opener, an_arena

from hicache_core.errors import InvalidOptions
from hicache_core.options import resolve
from hicache_hf3fs.options import Hf3fsOptions
from hicache_hf3fs.spec import SPEC

GOOD = {"root": "/mnt/3fs/hicache", "file_size": "64mib"}


def options(environment=None, **given) -> Hf3fsOptions:
    return resolve("hf3fs", Hf3fsOptions, GOOD | given, environment=environment or {}).options


def test_two_options_are_enough():
    made = options()
    assert (made.root, made.file_size, made.client, made.metadata_url) == (
        "/mnt/3fs/hicache",
        64 << 20,
        "posix",
        None,
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"root": ""}, "is not a path"),
        ({"file_size": "4 gigs"}, 'try "4GiB"'),
        ({"file_size": 100}, "greater than or equal to 4096"),
        ({"client": "nfs"}, "'posix' or 'usrbio'"),
        ({"metadata_url": "10.0.0.5:18480"}, 'try "http://127.0.0.1:18480"'),
        ({"metadata_url": "http://h:1/path"}, "is not a server"),
        ({"metadata_url": "http://h:1", "metadata_path": "/x"}, "exclude each other: drop one"),
        ({"metadata_token": "t"}, "metadata_token without metadata_url"),
        ({"metadata_url": "http://h:1", "metadata_token": "a\nb"}, "characters that HTTP does not carry"),
        ({"usrbio_module": "a b"}, "is not a module"),
        ({"numjob": 4}, "numjob is unknown (numjobs?)"),
        ({"numjobs": 0}, "greater than or equal to 1"),
        ({"hold_s": 0}, "greater than 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_option_is_refused_with_what_to_write(given, said):
    with pytest.raises(InvalidOptions) as caught:
        options(**given)
    assert said in str(caught.value)


def test_the_token_is_never_shown():
    made = options(metadata_url="http://h:1", metadata_token="s3cret")
    assert "s3cret" not in repr(made)
    with pytest.raises(InvalidOptions) as caught:
        options(metadata_token="s3cret", numjobs=0)
    assert "s3cret" not in str(caught.value)


def test_the_environment_gives_what_the_caller_does_not():
    made = options({"HICACHE_HF3FS_CLIENT": "usrbio", "HICACHE_HF3FS_NUMJOBS": "7"}, numjobs=3)
    assert (made.client, made.numjobs) == ("usrbio", 3)


@pytest.mark.parametrize(
    ("given", "narrowed"),
    [
        ({}, {"shared": False, "deadline": "hold", "transport": "local mount"}),
        ({"network": True}, {"shared": False, "deadline": "none", "transport": "network mount"}),
        ({"checksum": False}, {"shared": False, "checksum": False, "deadline": "hold"}),
        ({"client": "usrbio"}, {"shared": False, "zero_copy": False, "transport": "usrbio"}),
    ],
    ids=["local disk", "network mount", "no checksum", "usrbio"],
)
def test_an_opened_instance_promises_what_its_way_allows(opener: Opener, given, narrowed):
    storage = opener(**given)
    changed = {
        field.name: getattr(storage.capabilities, field.name)
        for field in dataclasses.fields(SPEC.capabilities)
        if getattr(storage.capabilities, field.name) != getattr(SPEC.capabilities, field.name)
    }
    wanted = {"transport": "local mount"} | narrowed
    assert changed == wanted
    assert SPEC.capabilities.narrowing_violations(storage.capabilities) == []


def test_checksums_cannot_be_switched_off_over_a_network(opener: Opener):
    assert opener(network=True, checksum=False).capabilities.checksum is True


def test_metadata_on_a_network_file_system_is_refused(opener: Opener, monkeypatch):
    monkeypatch.setattr("hicache_hf3fs.connect.is_network", lambda path: True)
    with pytest.raises(InvalidOptions) as caught:
        opener(an_arena(1), network=True)
    assert "set metadata_path to a local disk, or metadata_url to a server" in str(caught.value)


def test_a_root_that_cannot_be_made_names_it_and_the_remedy(opener: Opener):
    (opener.root / "file").write_bytes(b"")
    with pytest.raises(Exception) as caught:
        opener(an_arena(1), root=str(opener.root / "file" / "root"))
    assert "cannot be made" in str(caught.value)
    assert str(opener.root) in str(caught.value)


def test_the_file_size_of_a_root_cannot_change_unnoticed(opener: Opener):
    opener(an_arena(1)).close()
    with pytest.raises(InvalidOptions) as caught:
        opener(an_arena(1), file_size=128 * NBYTES)
    assert f"set file_size={64 * NBYTES}" in str(caught.value)
