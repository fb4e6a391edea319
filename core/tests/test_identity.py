"""Identity, Placement, Shard, Component, Namespace: what must miss, what must hit, and frozen digests."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import re
from typing import Any

import pytest
from core_builders import a_component
from hypothesis import example, given
from hypothesis import strategies as st

from hicache_core.errors import InvalidIdentity, InvalidKey
from hicache_core.identity import (
    Component,
    Identity,
    Namespace,
    Placement,
    Shard,
    canonical_bytes,
    check_hashes,
)

#: Another value for every field of Identity; a new field without one fails below.
CHANGES: dict[str, list[Any]] = {
    "engine": ["sglang", "vllm", "Test"],
    "hash_scheme": ["sha256-chained", "opaque "],
    "hash_seed": ["0", "None"],
    "model": ["test/model2", "test", "test/Model"],
    "revision": ["main", "None"],
    "weights": ["v2", "None"],
    "quantization": ["awq", "None"],
    "config_overrides": [
        {"rope_scaling": 2},
        {"rope_scaling": 2.0},
        {"rope_scaling": "2"},
        {"rope_scaling": {}},
    ],
    "kv_dtype": ["fp8_e4m3", "fp8_e4m3fnuz", "fp8_e5m2"],
    "kv_scales": ["file", "None"],
    "page_tokens": [1, 63, 128],
    "lora": ["d1", "None"],
    "tenant": ["a", "b", "None"],
}

SHARD = Shard(layers=(0, 16, 32), heads=(0, 4, 8), cp=(0, 2), dcp=(0, 2), tp=(0, 2), pp=(0, 2))
SHARD_CHANGES: dict[str, list[Any]] = {
    "layers": [None, (0, 16, 64), (0, 15, 32), (1, 16, 32)],
    "heads": [None, "replicated", (4, 8, 8), (0, 4, 16)],
    "cp": [None, (1, 2), (0, 4)],
    "dcp": [None, (1, 2), (0, 4)],
    "tp": [None, (1, 2), (0, 4)],
    "pp": [None, (1, 2), (0, 4)],
}

COMPONENT = Component("kv", SHARD, "page_first", "bf16", 4096)
COMPONENT_CHANGES: dict[str, list[Any]] = {
    "name": ["k", "kv2", "draft"],
    "shard": ["whole", Shard(tp=(0, 2)), Shard(pp=(0, 2))],
    "byte_order": ["layer_first", "page_first "],
    "format": ["fp8", "bf16+scales"],
    "page_nbytes": [4095, 40960, 0],
    "draft_model": ["eagle", "None"],
}


def every_change(table: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(name, value, id=f"{name}={value!r}")
        for name, values in table.items()
        for value in values
    ]


# Identity: any change misses.


@pytest.mark.parametrize(("name", "value"), every_change(CHANGES))
def test_changing_a_field_of_identity_changes_the_namespace(name: str, value: Any) -> None:
    assert Namespace.of(Identity.for_tests(**{name: value})).id != Namespace.of(Identity.for_tests()).id


def test_every_field_of_identity_is_tried() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Identity)}


def test_all_the_changed_identities_are_apart() -> None:
    changed = [Identity.for_tests(**{name: value}) for name, values in CHANGES.items() for value in values]
    assert len({Namespace.of(identity).id for identity in changed}) == len(changed)


def test_the_schema_version_is_part_of_the_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Namespace.of(Identity.for_tests()).id
    monkeypatch.setattr("hicache_core.identity.IDENTITY_SCHEMA", 2)
    assert Namespace.of(Identity.for_tests()).id != before


def test_equal_identities_share_a_namespace_whatever_the_order_of_overrides() -> None:
    a = Identity.for_tests(config_overrides={"a": 1, "b": [1, {"c": None, "d": 2}]})
    b = Identity.for_tests(config_overrides={"b": (1, {"d": 2, "c": None}), "a": 1})
    assert Namespace.of(a) == Namespace.of(b)


def test_every_field_must_be_written_and_named() -> None:
    parameters = inspect.signature(Identity).parameters.values()
    assert [p.name for p in parameters if p.default is not p.empty or p.kind is not p.KEYWORD_ONLY] == []


def test_an_identity_does_not_change_with_the_mapping_it_was_made_from() -> None:
    overrides: dict[str, Any] = {"rope": {"factor": [2, 4]}}
    identity = Identity.for_tests(config_overrides=overrides)
    before = Namespace.of(identity)
    overrides["rope"]["factor"].append(8)
    overrides["extra"] = 1
    assert Namespace.of(identity) == before
    assert identity.config_overrides == {"rope": {"factor": [2, 4]}}
    assert before.manifest["config_overrides"] == {"rope": {"factor": [2, 4]}}


def test_the_manifest_is_readable_and_names_the_schema() -> None:
    identity = Identity.for_tests(tenant="a", config_overrides={"x": 1})
    assert Namespace.of(identity).manifest == {
        "schema": 1,
        "engine": "test",
        "hash_scheme": "opaque",
        "hash_seed": None,
        "model": "test/model",
        "revision": None,
        "weights": None,
        "quantization": None,
        "config_overrides": {"x": 1},
        "kv_dtype": "bf16",
        "kv_scales": None,
        "page_tokens": 64,
        "lora": None,
        "tenant": "a",
    }


TEXT = "Write text that is not empty"
NONE = ", or None for 'has none'."


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("engine", "", f"{TEXT}."),
        ("engine", None, f"{TEXT}."),
        ("model", 3, f"{TEXT}."),
        ("tenant", "", TEXT + NONE),
        ("lora", b"digest", TEXT + NONE),
        ("page_tokens", 0, "Give tokens a page as an integer from 1."),
        ("page_tokens", True, "Give tokens a page as an integer from 1."),
        ("page_tokens", 64.0, "Give tokens a page as an integer from 1."),
        ("page_tokens", None, "Give tokens a page as an integer from 1."),
        ("config_overrides", {}, "Give a mapping of what is overridden" + NONE),
        ("config_overrides", ["rope"], "Give a mapping of what is overridden" + NONE),
        ("config_overrides", "rope", "Give a mapping of what is overridden" + NONE),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_remedy(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(InvalidIdentity) as caught:
        Identity.for_tests(**{name: value})
    assert str(caught.value) == f"'{name}' of an identity has a wrong value: {value!r}. {remedy}"


# Placement: no way into a key.


def test_nothing_of_a_placement_reaches_a_namespace_or_a_key() -> None:
    accepting = [Namespace.of, Namespace.qualify, Component.__init__, Component.keys, Identity.__init__]
    hints = [str(p.annotation) for f in accepting for p in inspect.signature(f).parameters.values()]
    assert [hint for hint in hints if "Placement" in hint] == []
    with pytest.raises(InvalidIdentity):
        canonical_bytes(Placement())


def test_a_placement_has_every_part_that_a_change_must_hit() -> None:
    assert [field.name for field in dataclasses.fields(Placement)] == [
        *("tp_rank", "tp_size", "pp_rank", "pp_size", "dp_rank", "dp_size", "cp_rank", "cp_size"),
        *("host_layout", "device", "io_backend"),
    ]


# Components: each field reaches the key.


@pytest.mark.parametrize(("name", "value"), every_change(COMPONENT_CHANGES))
def test_changing_a_field_of_a_component_changes_its_keys(name: str, value: Any) -> None:
    changed = dataclasses.replace(COMPONENT, **{name: value})
    assert changed.keys(["h"]) != COMPONENT.keys(["h"])


@pytest.mark.parametrize(("name", "value"), every_change(SHARD_CHANGES))
def test_changing_a_field_of_a_shard_changes_the_keys(name: str, value: Any) -> None:
    changed = dataclasses.replace(COMPONENT, shard=dataclasses.replace(SHARD, **{name: value}))
    assert changed.key != COMPONENT.key


def test_every_field_of_component_and_shard_is_tried() -> None:
    assert set(COMPONENT_CHANGES) == {field.name for field in dataclasses.fields(Component) if field.init}
    assert set(SHARD_CHANGES) == {field.name for field in dataclasses.fields(Shard)}


def test_mamba_beside_a_replicated_mla_is_told_apart_by_rank() -> None:
    kv = [Component("kv", Shard(layers=(0, 8, 8), heads="replicated"), "page_first", "bf16", 4096)] * 2
    mamba = [Component("mamba", Shard(tp=(rank, 2)), "page_first", "f32", 512) for rank in range(2)]
    assert kv[0].keys(["h"]) == kv[1].keys(["h"])
    assert mamba[0].keys(["h"]) != mamba[1].keys(["h"])


def test_shards_that_say_the_same_numbers_of_other_things_are_apart() -> None:
    shards = [Shard(**{name: (0, 2)}) for name in ("tp", "pp", "cp", "dcp")]
    shards += [Shard(layers=(0, 2, 4)), Shard(heads=(0, 2, 4)), Shard(heads="replicated")]
    keys = {a_component(64, shard=shard).key for shard in (*shards, "whole")}
    assert len(keys) == len(shards) + 1


@given(
    name=st.from_regex(r"[a-z][a-z0-9_]{0,46}", fullmatch=True),
    hashes=st.lists(st.from_regex(r"[A-Za-z0-9_-]{1,128}", fullmatch=True), max_size=5),
)
def test_keys_have_their_pattern(name: str, hashes: list[str]) -> None:
    component = a_component(64, name)
    keys = component.keys(hashes)
    assert re.fullmatch(r"[a-z0-9_]{1,64}", component.key)
    assert keys == [f"{page_hash}.{component.key}" for page_hash in hashes]
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,128}\.[a-z0-9_]{1,64}", key) for key in keys)


@pytest.mark.parametrize("name", ["", "KV", "1kv", "_kv", "kv-1", "kv.1", "a" * 48, "kv\n", "é", None, 3])
def test_a_malformed_component_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidKey) as caught:
        a_component(64, name)
    assert str(caught.value) == (
        f"a component's name is not well formed: {name!r}. Use the pattern [a-z][a-z0-9_]{{0,46}}."
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"shard": "half"},
            "the shard of component 'kv' is not one: 'half'. Give a Shard, or \"whole\".",
        ),
        ({"shard": None}, "the shard of component 'kv' is not one: None. Give a Shard, or \"whole\"."),
        (
            {"page_nbytes": -1},
            "page_nbytes of component 'kv' is not a size: -1. "
            "Give bytes as an integer; 0 for a logical anchor.",
        ),
        (
            {"page_nbytes": True},
            "page_nbytes of component 'kv' is not a size: True. "
            "Give bytes as an integer; 0 for a logical anchor.",
        ),
        ({"format": ""}, f"'format' of component 'kv' has a wrong value: ''. {TEXT}."),
        ({"byte_order": None}, f"'byte_order' of component 'kv' has a wrong value: None. {TEXT}."),
        ({"draft_model": ""}, f"'draft_model' of component 'kv' has a wrong value: ''. {TEXT}{NONE}"),
    ],
)
def test_a_wrong_field_of_a_component_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidIdentity) as caught:
        dataclasses.replace(a_component(64), **changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (0, 0, 8)}, "shard 'layers' is not a range: (0, 0, 8). Write (start, stop, total)."),
        ({"layers": (4, 2, 8)}, "shard 'layers' is not a range: (4, 2, 8). Write (start, stop, total)."),
        ({"layers": (0, 9, 8)}, "shard 'layers' is not a range: (0, 9, 8). Write (start, stop, total)."),
        ({"layers": (-1, 2, 8)}, "shard 'layers' is not a range: (-1, 2, 8). Write (start, stop, total)."),
        (
            {"layers": (0, True, 8)},
            "shard 'layers' is not a range: (0, True, 8). Write (start, stop, total).",
        ),
        ({"heads": "all"}, "shard 'heads' is not a range: 'all'. Write (start, stop, total)."),
        ({"heads": (0, 2)}, "shard 'heads' is not a range: (0, 2). Write (start, stop, total)."),
        ({"tp": (2, 2)}, "shard 'tp' is not a rank of a size: (2, 2). Write (rank, size)."),
        ({"cp": (-1, 2)}, "shard 'cp' is not a rank of a size: (-1, 2). Write (rank, size)."),
        ({"pp": [0, 2]}, "shard 'pp' is not a rank of a size: [0, 2]. Write (rank, size)."),
    ],
)
def test_a_wrong_shard_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidIdentity) as caught:
        Shard(**changes)
    assert str(caught.value) == message


def test_layers_cannot_be_replicated() -> None:
    with pytest.raises(InvalidIdentity, match=r"^shard 'layers' is not a range: 'replicated'"):
        Shard(layers="replicated")  # type: ignore[arg-type]


def test_a_shard_that_says_nothing_is_refused() -> None:
    with pytest.raises(InvalidIdentity) as caught:
        Shard()
    assert str(caught.value) == (
        "a shard says nothing of itself. "
        'Give ranges, or the rank of the size; for all of the model\'s state write shard="whole".'
    )


# Namespaces.


@pytest.mark.parametrize("wrong", ["", "0" * 31, "0" * 33, "g" * 32, "A" * 32, "../" + "0" * 29, None])
def test_a_malformed_namespace_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidIdentity) as caught:
        Namespace(wrong)
    assert str(caught.value) == (
        f"a namespace id is not well formed: {wrong!r}. Make it with Namespace.of(identity)."
    )


def test_qualified_keys_begin_with_the_namespace() -> None:
    namespace = Namespace("0123456789abcdef" * 2)
    assert namespace.qualify("h.kv_1") == "0123456789abcdef0123456789abcdef/h.kv_1"
    assert str(namespace) == namespace.id


# Frozen: a change here orphans every store in the world.


@pytest.mark.parametrize(
    ("identity", "digest"),
    [
        (Identity.for_tests(), "e8a24a0640dd51e5e8329f6adb94efc3"),
        (
            Identity(
                engine="sglang",
                hash_scheme="sha256-chained",
                hash_seed="salt",
                model="meta-llama/Llama-3.1-8B",
                revision="0e9e39f249a16976918f6564b8830bc894c89659",
                weights="v3",
                quantization="awq",
                config_overrides={
                    "rope_scaling": {"type": "yarn", "factor": 4.0},
                    "context_length": 131072,
                    "flags": [True, None, "é"],
                },
                kv_dtype="fp8_e4m3",
                kv_scales="sha256:1f",
                page_tokens=64,
                lora="a1b2",
                tenant="acme",
            ),
            "9a66f9e280617c6239c08442e07b4e25",
        ),
    ],
    ids=["for tests", "every field"],
)
def test_namespace_digests_are_frozen(identity: Identity, digest: str) -> None:
    assert Namespace.of(identity).id == digest


@pytest.mark.parametrize(
    ("component", "key"),
    [
        (Component("kv", "whole", "page_first", "bf16", 65536), "kv_f966f16b2a0d25f4"),
        (
            Component("kv", Shard(layers=(0, 16, 32), heads=(4, 8, 8)), "page_head", "fp8_e4m3", 1024),
            "kv_71f9f5d6b8a7ae39",
        ),
        (
            Component("mamba", Shard(tp=(1, 2), pp=(0, 1)), "layer_first", "f32", 512),
            "mamba_5a3d7e649e00dfbe",
        ),
        (
            Component("indexer", Shard(heads="replicated", cp=(0, 2), dcp=(1, 4)), "page_first", "u8", 8),
            "indexer_6fbd825bbf461272",
        ),
        (Component("draft", "whole", "page_first", "bf16", 4096, "eagle3"), "draft_a47c5ed59ac512ed"),
        (Component("anchor", "whole", "page_first", "bf16", 0), "anchor_70860ba7ff6f956b"),
    ],
    ids=["whole", "ranges", "ranks", "replicated", "draft", "anchor"],
)
def test_component_digests_are_frozen(component: Component, key: str) -> None:
    assert component.key == key


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (None, b"n0:"),
        (True, b"b1:1"),
        (False, b"b1:0"),
        (-12, b"i3:-12"),
        (1.5, b"f20:0x1.8000000000000p+0"),
        ("é", b"s2:\xc3\xa9"),
        ([1, "a"], b"l8:i1:1s1:a"),
        ({"b": 1, "a": None}, b"m15:s1:an0:s1:bi1:1"),
    ],
)
def test_the_encoding_is_frozen(value: Any, encoded: bytes) -> None:
    assert canonical_bytes(value) == encoded


# The encoding: different values never encode alike.

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
values = st.recursive(
    scalars | st.sampled_from(["", "1", "1.0", "True", "None", "n0:", "i1:1", "l0:", 0, 1, 1.0, 0.0]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """Give a form in which Python's == is as strict as the encoding must be."""
    if isinstance(value, list):
        return ("list", tuple(map(typed, value)))
    if isinstance(value, dict):
        return ("dict", tuple(sorted((name, typed(inner)) for name, inner in value.items())))
    if isinstance(value, float):
        return ("float", value, math.copysign(1, value))
    return (type(value).__name__, value)


def key_of(value: Any) -> str:
    return repr(typed(value))


@given(a=values, b=values)
@example(a=True, b=1)
@example(a=1, b=1.0)
@example(a=1, b="1")
@example(a="", b=None)
@example(a=[], b={})
@example(a=[[], []], b=[[[]]])
@example(a=["ab", "c"], b=["a", "bc"])
@example(a=["a"], b="a")
@example(a=[None], b=[])
@example(a={"a": {"b": 1}}, b={"a": {}, "b": 1})
@example(a=["s1:a"], b=["a"])
def test_two_values_encode_alike_only_if_they_are_alike(a: Any, b: Any) -> None:
    assert (canonical_bytes(a) == canonical_bytes(b)) == (key_of(a) == key_of(b))


@given(a=st.lists(values, max_size=3), b=st.lists(values, max_size=3))
def test_no_concatenation_is_ambiguous(a: list[Any], b: list[Any]) -> None:
    joined = [b"".join(map(canonical_bytes, each)) for each in (a, b)]
    assert (joined[0] == joined[1]) == (key_of(a) == key_of(b))


@given(values)
def test_an_encoding_can_be_read_back(value: Any) -> None:
    decoded, rest = decode(canonical_bytes(value))
    assert key_of(decoded) == key_of(value)
    assert rest == b""


def decode(encoded: bytes) -> tuple[Any, bytes]:
    """Read one value by the format's own description: what can be read back was not ambiguous."""
    kind, (length, rest) = encoded[:1], encoded[1:].split(b":", 1)
    payload, rest = rest[: int(length)], rest[int(length) :]
    if kind in (b"l", b"m"):
        items = []
        while payload:
            item, payload = decode(payload)
            items.append(item)
        return (items if kind == b"l" else dict(zip(items[::2], items[1::2], strict=True))), rest
    scalar = {
        b"n": lambda text: None,
        b"b": lambda text: text == "1",
        b"i": int,
        b"f": float.fromhex,
        b"s": str,
    }[kind]
    return scalar(payload.decode()), rest


def test_an_enum_of_integers_encodes_as_its_number_on_every_python() -> None:
    class Kind(enum.IntEnum):
        FP8 = 8

    assert canonical_bytes(Kind.FP8) == b"i1:8"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {1: "a"},
            "a mapping has names that are not text: [1]",
        ),
        (
            [b"x"],
            "a value cannot be part of an identity: bytes: b'x'. "
            "Use text, numbers, booleans, None, lists and mappings of them.",
        ),
        ("\ud800", "text is not valid Unicode: '\\ud800'"),
        (
            {"a": {1, 2}},
            "a value cannot be part of an identity: set: {1, 2}. "
            "Use text, numbers, booleans, None, lists and mappings of them.",
        ),
    ],
    ids=["integer names", "bytes", "lone surrogate", "set"],
)
def test_what_is_not_json_is_refused(value: Any, message: str) -> None:
    with pytest.raises(InvalidIdentity) as caught:
        canonical_bytes(value)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["large", "small"])
def test_an_integer_that_python_will_not_write_is_refused(value: int) -> None:
    with pytest.raises(InvalidIdentity, match=r"^an integer is too long to be part of an identity$"):
        canonical_bytes(value)


def test_a_mapping_that_holds_itself_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    with pytest.raises(InvalidIdentity, match=r"^a value is nested too deep to be part of an identity"):
        canonical_bytes(endless)


# Page hashes.


@given(st.lists(st.text(max_size=6) | st.text("abcABC019_-", max_size=130), max_size=6))
@example(["a" * 128])
@example(["a" * 129])
@example(["ok", "", "ok"])
@example(["a\n"])
@example(["a.kv"])
@example(["../a"])
@example(["é"])
def test_a_batch_is_refused_exactly_where_a_hash_breaks_the_pattern(hashes: list[str]) -> None:
    bad = [at for at, text in enumerate(hashes) if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", text)]
    try:
        check_hashes(hashes)
        refused = None
    except InvalidKey as error:
        refused = error.what
    assert refused == (f"page hash {bad[0]} of {len(hashes)} is not well formed" if bad else None)


@pytest.mark.parametrize("wrong", [None, 7, b"abc", ["a"]])
def test_a_hash_that_is_no_text_is_refused_by_position(wrong: Any) -> None:
    with pytest.raises(InvalidKey) as caught:
        check_hashes(["a", wrong, "b"])
    assert str(caught.value) == (
        f"page hash 1 of 3 is not well formed: {wrong!r}. Page hashes match [A-Za-z0-9_-]{{1,128}}."
    )


def test_a_long_hash_is_shown_shortened() -> None:
    with pytest.raises(InvalidKey) as caught:
        check_hashes(["x" * 200])
    assert caught.value.value == f"'{'x' * 76}..."


@pytest.mark.parametrize("wrong", ["abc", b"abc", None, 7, (h for h in ["a"]), {"a": 1}, {"a"}])
def test_a_batch_that_is_no_sequence_of_hashes_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidKey) as caught:
        check_hashes(wrong)
    assert str(caught.value) == (
        f"page hashes are not a sequence of texts: {type(wrong).__name__}. Pass a list of page hashes."
    )


@pytest.mark.parametrize("empty", [[], ()])
def test_an_empty_batch_is_well_formed(empty: Any) -> None:
    check_hashes(empty)
