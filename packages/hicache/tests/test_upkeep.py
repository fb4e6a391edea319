"""`hicache ls`, `usage`, `purge`, `verify`: over the file backend, and over one that cannot list."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hicache_core import Component, HiCache, HostPool, Identity, Namespace, Placement

NBYTES = 4096
#: Name -> what is stored: (identity, pages, hours since the last set).
NAMESPACES = {
    "llama": ({"model": "meta-llama/Llama-3.1-8B", "kv_dtype": "bf16", "tenant": "a"}, 5, 1),
    "llama_fp8": ({"model": "meta-llama/Llama-3.1-8B", "kv_dtype": "fp8_e4m3", "tenant": "b"}, 3, 50),
    "qwen": ({"model": "Qwen/Qwen3-8B", "config_overrides": {"rope": 2}, "page_tokens": 128}, 2, 200),
}


def identity(name: str) -> Identity:
    return Identity.for_tests(**NAMESPACES[name][0])


def id_of(name: str) -> str:
    return Namespace.of(identity(name)).id


def opened(root: Path, name: str) -> HiCache:
    component = Component("kv", shard="whole", byte_order="opaque", format="bytes", page_nbytes=NBYTES)
    pool = HostPool.from_buffer(bytearray(os.urandom(8 * NBYTES)), component)
    cache = HiCache.open(
        "file",
        identity=identity(name),
        placement=Placement(),
        pools=[pool],
        options={"root": str(root), "capacity": "64mib"},
        strict=True,
    )
    cache.pool = pool
    return cache


@pytest.fixture
def root(tmp_path) -> Path:
    """A root with three namespaces of different ages."""
    place = tmp_path / "kv"
    for name, (_, pages, hours) in NAMESPACES.items():
        with opened(place, name) as cache:
            hashes = [f"page-{n}" for n in range(pages)]
            assert all(cache.set(hashes, cache.pool.pages(range(pages))))
        for segment in (place / id_of(name)).glob("*.seg"):
            os.utime(segment, (time.time() - hours * 3600,) * 2)
    return place


@pytest.fixture
def hicache(run_json, root):
    """Run a command on the root and give its JSON."""

    def invoke(command: str, *arguments: str, exit_code: int = 0):
        return run_json(command, "file", "--option", f"root={root}", *arguments, exit_code=exit_code)

    return invoke


def pages_of(answer) -> dict[str, int]:
    names = {id_of(name): name for name in NAMESPACES}
    return {names[row["namespace"]]: row["pages"] for row in answer["namespaces"]}


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ([], ["llama", "llama_fp8", "qwen"]),
        (["--model", "meta-llama/*"], ["llama", "llama_fp8"]),
        (["--model", "*llama*", "--dtype", "fp8*"], ["llama_fp8"]),
        (["--tenant", "b"], ["llama_fp8"]),
        (["--tenant", "none"], ["qwen"]),
        (["--engine", "test"], ["llama", "llama_fp8", "qwen"]),
        (["--where", "page_tokens=128"], ["qwen"]),
        (["--where", 'config_overrides=*"rope": 2*'], ["qwen"]),
        (["--where", "config_overrides=none", "--older-than", "2d"], ["llama_fp8"]),
        (["--older-than", "36h"], ["llama_fp8", "qwen"]),
        (["--older-than", "2w"], []),
        (["--model", "LLAMA"], []),
    ],
)
def test_ls_chooses_by_what_a_namespace_is(hicache, choice, wanted):
    assert pages_of(hicache("ls", *choice)) == {name: NAMESPACES[name][1] for name in wanted}


def test_ls_chooses_by_the_beginning_of_an_id(hicache):
    assert list(pages_of(hicache("ls", "--namespace", id_of("qwen")[:8]))) == ["qwen"]


def test_ls_tells_everything_and_makes_nothing(hicache, root):
    before = sorted(path.name for path in root.iterdir())
    first = hicache("ls")["namespaces"][0]
    assert (first["namespace"], first["pages"], first["bytes"]) == (id_of("llama"), 5, 5 * NBYTES)
    assert first["identity"] == identity("llama").manifest()
    assert abs(time.time() - 3600 - first["written_s"]) < 600
    assert sorted(path.name for path in root.iterdir()) == before


def test_settings_that_are_meant_for_engines_do_not_keep_ls_from_reading(hicache, monkeypatch):
    monkeypatch.setenv("HICACHE_FILE_CAPACITY", "128mib")
    assert sum(pages_of(hicache("ls")).values()) == 10
    assert hicache("usage")["capacity"] == 64 << 20


def test_ls_for_people(run, root):
    result = run("ls", "file", "--option", f"root={root}")
    assert result.exit_code == 0
    (line,) = [line for line in result.output.splitlines() if id_of("llama_fp8")[:12] in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[1:] == [
        "meta-llama/Llama-3.1-8B", "fp8_e4m3", "64", "-", "b", "3", "12 KiB", "2 d ago",
    ]  # fmt: skip


def test_usage_tells_the_store_s_limit_and_what_it_takes(hicache, run, root):
    answer = hicache("usage")
    assert pages_of(answer) == {"llama": 5, "llama_fp8": 3, "qwen": 2}
    assert answer["capacity"] == 64 << 20
    taken = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert answer["store_bytes"] == taken
    text = run("usage", "file", "--option", f"root={root}").output
    assert " of 64 MiB (" in text
    assert "3 namespaces, 10 pages, 40 KiB." in text


def test_purge_removes_what_was_chosen_for_every_process_and_nothing_else(hicache, root):
    with opened(root, "llama_fp8") as running:
        assert running.exists(["page-0"]) == 1
        answer = hicache("purge", "--dtype", "fp8*", "--yes")
        assert [(row["namespace"], row["removed"]) for row in answer["namespaces"]] == [
            (id_of("llama_fp8"), 3)
        ]
        assert running.exists(["page-0"]) == 0
    assert pages_of(hicache("ls")) == {"llama": 5, "llama_fp8": 0, "qwen": 2}


def test_purge_everything_only_when_asked_for(hicache):
    error = hicache("purge", "--yes", exit_code=1)["error"]
    assert "or say --all" in error["remedy"]
    assert (
        hicache("purge", "--all", "--tenant", "a", "--yes", exit_code=1)["error"]["type"] == "InvalidArgument"
    )
    assert sum(row["removed"] for row in hicache("purge", "--all", "--yes")["namespaces"]) == 10
    assert set(pages_of(hicache("ls")).values()) == {0}


def test_a_dry_run_tells_the_same_and_removes_nothing(hicache, run, root):
    answer = hicache("purge", "--older-than", "36h", "--dry-run")
    assert pages_of(answer) == {"llama_fp8": 3, "qwen": 2}
    assert answer["dry_run"] is True
    text = run("purge", "file", "--option", f"root={root}", "--model", "Qwen/*", "--dry-run").output
    assert "Would remove 2 pages, 8 KiB. Nothing was removed." in text
    assert sum(pages_of(hicache("ls")).values()) == 10


@pytest.mark.parametrize(("answer", "left", "exit_code"), [("y\n", 0, 0), ("n\n", 2, 1), ("", 2, 1)])
def test_purge_asks(run, hicache, root, answer, left, exit_code):
    result = run("purge", "file", "--option", f"root={root}", "--model", "Qwen/*", input=answer)
    assert "Remove these 1 namespaces (2 pages) from 'file'?" in result.output
    assert result.exit_code == exit_code
    assert pages_of(hicache("ls"))["qwen"] == left


def test_purge_asks_nobody_where_json_is_read(hicache):
    error = hicache("purge", "--tenant", "a", exit_code=1)["error"]
    assert error["remedy"] == "Say --yes, or --dry-run to see what would go."
    assert pages_of(hicache("ls"))["llama"] == 5


def test_a_namespace_without_a_readable_manifest_is_named_and_left(hicache, root):
    (root / id_of("qwen") / "manifest.json").write_text("{}")
    answer = hicache("purge", "--all", "--yes", exit_code=1)
    assert list(answer["errors"]) == [id_of("qwen")]
    assert {row["namespace"]: row["removed"] for row in answer["namespaces"]}[id_of("llama")] == 5
    assert "manifest cannot be read" in answer["errors"][id_of("qwen")]["message"]


def damage(root: Path, name: str) -> None:
    (segment,) = [path for path in (root / id_of(name)).glob("*.seg") if path.stat().st_size]
    with segment.open("r+b") as file:
        file.seek(NBYTES + 5)
        (byte,) = file.read(1)
        file.seek(NBYTES + 5)
        file.write(bytes([byte ^ 1]))


def test_verify_finds_damage_and_removes_it(hicache, run, root):
    whole = {"read": 10, "read_bytes": 10 * NBYTES, "damaged": 0, "removed": 0}
    assert hicache("verify")["total"] == whole
    damage(root, "llama")
    found = hicache("verify", exit_code=1)
    assert found["total"] == whole | {"damaged": 1}
    assert {row["namespace"]: row["damaged"] for row in found["namespaces"]}[id_of("llama")] == 1
    text = run("verify", "file", "--option", f"root={root}", "--tenant", "a").output
    assert f"{id_of('llama')}: 1 of 5 pages damaged, 0 removed" in text
    assert hicache("verify", "--remove")["total"] == whole | {"damaged": 1, "removed": 1}
    assert hicache("verify")["total"] == {"read": 9, "read_bytes": 9 * NBYTES, "damaged": 0, "removed": 0}
    with opened(root, "llama") as cache:
        assert len([s for s in cache.contains([f"page-{n}" for n in range(5)]) if s]) == 4


def test_verify_of_a_chosen_namespace_leaves_the_others_alone(hicache, root):
    damage(root, "llama")
    assert hicache("verify", "--model", "Qwen/*")["total"]["read"] == 2


# A backend that cannot list.


@pytest.fixture
def acme(site, acme_source, run_json):
    site.backend("acme", acme_source())
    return lambda command, *arguments, exit_code=0: run_json(command, "acme", *arguments, exit_code=exit_code)


@pytest.mark.parametrize("command", [["ls"], ["purge", "--all", "--yes"], ["verify"]])
def test_a_store_that_cannot_list_says_how_to_name_a_namespace(acme, command):
    error = acme(*command, exit_code=1)["error"]
    assert error["message"].startswith("'acme' cannot list its namespaces")
    assert "--identity FILE" in error["remedy"]


@pytest.mark.parametrize("wrap", [lambda manifest: manifest, lambda manifest: {"identity": manifest}])
def test_a_namespace_named_by_its_manifest_is_purged(acme, tmp_path, wrap):
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(wrap(identity("llama").manifest())))
    answer = acme("purge", "--identity", str(manifest), "--yes")
    assert [(row["namespace"], row["removed"]) for row in answer["namespaces"]] == [(id_of("llama"), 0)]
    assert answer["errors"] == {}
    assert [row["namespace"] for row in acme("usage", "--identity", str(manifest))["namespaces"]] == [
        id_of("llama")
    ]


def test_a_store_that_cannot_verify_says_so(acme, tmp_path):
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(identity("llama").manifest()))
    answer = acme("verify", "--identity", str(manifest), exit_code=1)
    assert answer["errors"][id_of("llama")]["type"] == "UnsupportedOperation"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"identity": {"schema": 9}}'])
def test_a_manifest_that_is_none_is_refused(acme, tmp_path, text):
    manifest = tmp_path / "manifest.json"
    manifest.write_text(text)
    assert acme("ls", "--identity", str(manifest), exit_code=1)["error"]["type"] in (
        "InvalidArgument",
        "InvalidIdentity",
    )


@pytest.mark.parametrize(
    "arguments", [["--older-than", "soon"], ["--where", "colour=red"], ["--where", "model"]]
)
def test_a_choice_that_means_nothing_is_misuse(run, arguments):
    assert run("ls", "file", *arguments).exit_code == 2
