"""Who a page belongs to: Identity, Placement, Shard, Component, Namespace, and keys.

Wrong sharing gives wrong answers; needless distinction gives misses. So what
the bytes mean (Identity, per namespace; Component, per pool) and who happens to
ask (Placement) are apart: any change of the first two must miss, any change of
the third must hit.

Digests are taken of a canonical encoding in which each value carries its type
and length, so no two different identities can ever concatenate to the same
bytes. The encoding is frozen by test vectors: changing it orphans every store.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hicache_core.errors import InvalidIdentity, InvalidKey

#: Raised whenever a field is added or its meaning changes; part of every namespace.
IDENTITY_SCHEMA = 1

MAX_HASH_LENGTH = 128
_ALLOWED = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-"
_COMPONENT_NAME = re.compile(r"[a-z][a-z0-9_]{0,46}")
_NAMESPACE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What makes two pages of equal hash interchangeable; every field must be written.

    None means "has none" and differs from every text. The page hash covers the
    tokens (and whatever else the engine seeds it with); this covers the rest.
    """

    engine: str
    """The engine whose layouts and hashes these are, for example ``sglang``."""
    hash_scheme: str
    """How the engine hashes pages, for example ``sha256-chained``."""
    hash_seed: str | None
    """The seed of that scheme, where it has one."""
    model: str
    """The model's id, for example ``meta-llama/Llama-3.1-8B``."""
    revision: str | None
    """The model's revision or commit."""
    weights: str | None
    """A fingerprint or version of the weights that are loaded."""
    quantization: str | None
    """The weights' quantisation, for example ``awq``."""
    config_overrides: Mapping[str, Any] | None
    """What was overridden in the model's config (rope scaling, context length), as JSON values."""
    kv_dtype: str
    """The logical dtype of the KV cache; ``fp8_e4m3``, ``fp8_e4m3fnuz`` and ``fp8_e5m2`` differ."""
    kv_scales: str | None
    """Where the KV scales come from, for example a file's digest."""
    page_tokens: int
    """Tokens a page."""
    lora: str | None
    """A digest of the LoRA adapters' content (not their paths)."""
    tenant: str | None
    """Keeps users of one store apart."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            _check_field(spec.name, getattr(self, spec.name), optional="None" in str(spec.type))
        # A copy: whoever changes the mapping afterwards must not change what these pages mean.
        object.__setattr__(self, "config_overrides", _plain(self.config_overrides))

    @classmethod
    def for_tests(cls, **changes: Any) -> Identity:
        """Make an identity for examples and tests, with any field replaced."""
        fields: dict[str, Any] = {
            "engine": "test",
            "hash_scheme": "opaque",
            "hash_seed": None,
            "model": "test/model",
            "revision": None,
            "weights": None,
            "quantization": None,
            "config_overrides": None,
            "kv_dtype": "bf16",
            "kv_scales": None,
            "page_tokens": 64,
            "lora": None,
            "tenant": None,
        }
        return cls(**(fields | changes))

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any]) -> Identity:
        """Give back the identity that a manifest was made of.

        Raises:
            InvalidIdentity: it lacks a field, has another one, or is of another schema.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        if manifest.get("schema") != IDENTITY_SCHEMA or set(manifest) - {"schema"} != fields:
            raise InvalidIdentity(
                "a manifest is not one of this version",
                value=f"schema {manifest.get('schema')!r}, fields {', '.join(sorted(map(str, manifest)))}",
                remedy=f"Use the hicache-core that wrote it; this one writes schema {IDENTITY_SCHEMA}.",
            )
        return cls(**{name: manifest[name] for name in fields})

    def manifest(self) -> dict[str, Any]:
        """Give the readable form that is stored beside a namespace's pages."""
        return {"schema": IDENTITY_SCHEMA} | {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who asks, from where: nothing of this reaches a key; backends may use it to find near things."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    host_layout: str = "page_first"
    device: str = "cpu"
    io_backend: str = "kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Which part of the model's state a component's pages hold.

    Ranges are (start, stop, total). Where an engine does not tell them, the
    shard is a rank of a size: ``tp`` and ``pp`` as (rank, size).
    """

    layers: tuple[int, int, int] | None = None
    heads: tuple[int, int, int] | Literal["replicated"] | None = None
    cp: tuple[int, int] | None = None
    dcp: tuple[int, int] | None = None
    tp: tuple[int, int] | None = None
    pp: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "heads"):
            part = getattr(self, name)
            if part is None or (name == "heads" and part == "replicated") or _is_range(part):
                continue
            raise InvalidIdentity(
                f"shard '{name}' is not a range", value=repr(part), remedy="Write (start, stop, total)."
            )
        for name in ("cp", "dcp", "tp", "pp"):
            part = getattr(self, name)
            if part is not None and not (_ints(part, 2) and 0 <= part[0] < part[1]):
                raise InvalidIdentity(
                    f"shard '{name}' is not a rank of a size", value=repr(part), remedy="Write (rank, size)."
                )
        if all(getattr(self, part.name) is None for part in dataclasses.fields(self)):
            raise InvalidIdentity(
                "a shard says nothing of itself",
                remedy="Give ranges, or the rank of the size; for all of the model's state "
                'write shard="whole".',
            )


@dataclass(frozen=True, slots=True)
class Component:
    """One kind of page: what a pool holds, and the suffix of its keys.

    Replication belongs here and not to the model: Mamba state under a
    replicated MLA is sharded. ``page_nbytes`` 0 is a logical anchor: it has no
    bytes and is never stored.
    """

    name: str
    """``kv``, ``mamba``, ``indexer``, ``draft`` ...: ``[a-z][a-z0-9_]{0,46}``."""
    shard: Shard | Literal["whole"]
    byte_order: str
    """The order of bytes inside a page, for example ``page_first``."""
    format: str
    """How a value is laid out in bytes, for example ``bf16`` or ``nvfp4+scales``."""
    page_nbytes: int
    draft_model: str | None = None
    """For draft pools, the id of the draft model."""
    key: str = field(init=False, repr=False, compare=False, default="")
    """``name_digest``: the second half of every key, ``[a-z0-9_]{1,64}``."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _COMPONENT_NAME.fullmatch(self.name):
            raise InvalidKey(
                "a component's name is not well formed",
                value=repr(self.name),
                remedy=f"Use the pattern {_COMPONENT_NAME.pattern}.",
            )
        if self.shard != "whole" and not isinstance(self.shard, Shard):
            raise InvalidIdentity(
                f"the shard of component '{self.name}' is not one",
                value=repr(self.shard),
                remedy='Give a Shard, or "whole".',
            )
        for name in ("byte_order", "format"):
            _check_field(name, getattr(self, name), optional=False, owner=f"component '{self.name}'")
        _check_field("draft_model", self.draft_model, optional=True, owner=f"component '{self.name}'")
        if type(self.page_nbytes) is not int or self.page_nbytes < 0:
            raise InvalidIdentity(
                f"page_nbytes of component '{self.name}' is not a size",
                value=repr(self.page_nbytes),
                remedy="Give bytes as an integer; 0 for a logical anchor.",
            )
        shard = self.shard if isinstance(self.shard, str) else dataclasses.asdict(self.shard)
        content = [self.name, shard, self.byte_order, self.format, self.page_nbytes, self.draft_model]
        object.__setattr__(self, "key", f"{self.name}_{_digest('component', content)[:16]}")

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """Make the storage keys of validated page hashes: ``{page_hash}.{component}``."""
        suffix = f".{self.key}"
        return [page_hash + suffix for page_hash in hashes]


@dataclass(frozen=True, slots=True)
class Namespace:
    """One identity as a store sees it: the unit of clear, purge and listing."""

    id: str
    """32 hex digits."""
    manifest: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The readable identity."""

    pattern: ClassVar[re.Pattern[str]] = _NAMESPACE_ID

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not _NAMESPACE_ID.fullmatch(self.id):
            raise InvalidIdentity(
                "a namespace id is not well formed",
                value=repr(self.id),
                remedy="Make it with Namespace.of(identity).",
            )

    @classmethod
    def of(cls, identity: Identity) -> Namespace:
        """Digest an identity."""
        manifest = identity.manifest()
        return cls(_digest("namespace", manifest)[:32], manifest)

    def qualify(self, key: str) -> str:
        """Make a key unique in a store that many namespaces share: ``{namespace}/{key}``."""
        return f"{self.id}/{key}"

    def __str__(self) -> str:
        return self.id


def check_hashes(hashes: Sequence[str]) -> None:
    """Refuse a batch that holds anything but page hashes ``[A-Za-z0-9_-]{1,128}``.

    One check of the joined text a batch: .05 us a key, where a regular expression a key costs .42.

    Raises:
        InvalidKey: naming the first bad one and its position.
    """
    if not isinstance(hashes, Sequence) or isinstance(hashes, (str, bytes, bytearray)):
        raise InvalidKey(
            "page hashes are not a sequence of texts",
            value=type(hashes).__name__,
            remedy="Pass a list of page hashes.",
        )
    if not hashes:
        return
    try:
        lengths = set(map(len, hashes))
        foreign = "".join(hashes).encode().translate(None, _ALLOWED.encode())
        if not foreign and 0 not in lengths and max(lengths) <= MAX_HASH_LENGTH:
            return
    except (TypeError, UnicodeEncodeError):
        pass  # the loop below finds which one
    for position, page_hash in enumerate(hashes):
        if (
            not isinstance(page_hash, str)
            or not 0 < len(page_hash) <= MAX_HASH_LENGTH
            or page_hash.strip(_ALLOWED)
        ):
            shown = repr(page_hash)
            raise InvalidKey(
                f"page hash {position} of {len(hashes)} is not well formed",
                value=shown if len(shown) <= 80 else f"{shown[:77]}...",
                remedy=f"Page hashes match [A-Za-z0-9_-]{{1,{MAX_HASH_LENGTH}}}.",
            )


def canonical_bytes(value: Any) -> bytes:
    """Encode a JSON-like value so that different values never encode alike.

    Each value is a type letter, its payload's length in decimal, ``:``, and the
    payload; containers hold the encodings of their items, mappings sorted by key.

    Raises:
        InvalidIdentity: a value of another type, text that is not Unicode, or a
            value that cannot be written down (endless, or thousands of digits).
    """
    try:
        return _encoded(value)
    except RecursionError as error:
        raise InvalidIdentity(
            "a value is nested too deep to be part of an identity", value=type(value).__name__
        ) from error


def _encoded(value: Any) -> bytes:
    if value is None:
        return _framed(b"n", b"")
    if isinstance(value, bool):
        return _framed(b"b", b"1" if value else b"0")
    if isinstance(value, int):
        try:
            return _framed(b"i", b"%d" % value)
        except ValueError as error:  # CPython refuses to write thousands of digits
            raise InvalidIdentity("an integer is too long to be part of an identity") from error
    if isinstance(value, float):
        return _framed(b"f", value.hex().encode())
    if isinstance(value, str):
        try:
            return _framed(b"s", value.encode())
        except UnicodeEncodeError as error:
            raise InvalidIdentity("text is not valid Unicode", value=ascii(value)) from error
    if isinstance(value, (list, tuple)):
        return _framed(b"l", b"".join(map(_encoded, value)))
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise InvalidIdentity("a mapping has names that are not text", value=repr(list(value)[:8]))
        items = (_encoded(name) + _encoded(value[name]) for name in sorted(value))
        return _framed(b"m", b"".join(items))
    raise InvalidIdentity(
        "a value cannot be part of an identity",
        value=f"{type(value).__name__}: {value!r}",
        remedy="Use text, numbers, booleans, None, lists and mappings of them.",
    )


def _framed(kind: bytes, payload: bytes) -> bytes:
    return b"%b%d:%b" % (kind, len(payload), payload)


def _digest(purpose: str, content: Any) -> str:
    import hashlib  # 3 ms, which a plugin's light module need not pay

    return hashlib.sha256(canonical_bytes(["hicache", purpose, IDENTITY_SCHEMA, content])).hexdigest()


def _plain(value: Any) -> Any:
    """Copy a JSON-like value into dicts and lists of our own."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


def _check_field(name: str, value: Any, *, optional: bool, owner: str = "an identity") -> None:
    if value is None and optional:
        return
    if name == "config_overrides":
        good, remedy = isinstance(value, Mapping) and bool(value), "Give a mapping of what is overridden"
    elif name == "page_tokens":
        good, remedy = type(value) is int and value > 0, "Give tokens a page as an integer from 1"
    else:
        good, remedy = isinstance(value, str) and bool(value), "Write text that is not empty"
    if not good:
        raise InvalidIdentity(
            f"'{name}' of {owner} has a wrong value",
            value=repr(value),
            remedy=remedy + (", or None for 'has none'." if optional else "."),
        )
    canonical_bytes(value)


def _ints(part: Any, count: int) -> bool:
    return isinstance(part, tuple) and len(part) == count and all(type(n) is int for n in part)


def _is_range(part: Any) -> bool:
    return _ints(part, 3) and 0 <= part[0] < part[1] <= part[2]
