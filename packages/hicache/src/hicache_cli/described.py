"""A backend's options described for people: type, bounds, default, environment name, present value, source.

Everything is read from the pydantic model and from ``hicache_core.options``, so
that a plugin writes each option once. The storage class is not imported.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hicache_cli.output import nbytes_text
from hicache_core.errors import InvalidOptions
from hicache_core.factory import import_target, load_spec
from hicache_core.options import Options, environment_name, is_secret, resolve, shown
from hicache_core.registry import Provider, registry
from hicache_core.spec import BackendSpec

#: Attributes of pydantic's and annotated_types' constraints, and how each reads.
_BOUNDS = {
    "gt": "> {}",
    "ge": ">= {}",
    "lt": "< {}",
    "le": "<= {}",
    "multiple_of": "a multiple of {}",
    "min_length": "at least {} long",
    "max_length": "at most {} long",
    "pattern": "like {}",
}


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option as `hicache show` prints it; all text, secrets masked."""

    name: str
    type: str
    bounds: str
    default: str
    environment: str
    value: str
    source: str
    secret: bool
    description: str


@dataclass(frozen=True, slots=True)
class Described:
    """A backend's options with their present values, and what is wrong with them."""

    rows: list[OptionRow]
    problems: list[tuple[str, str, str]]
    """(field, complaint, source), as in InvalidOptions; a required option that nobody set yet is none."""


def options_model(provider: Provider, spec: BackendSpec) -> type[Options]:
    """Import a backend's options class, and nothing else of it.

    Raises:
        BackendLoadError: as any import of a plugin's target.
    """
    model: type[Options] = import_target(spec.options, provider, spec)
    return model


def describe(provider: Provider, spec: BackendSpec, explicit: Mapping[str, Any] | None = None) -> Described:
    """Describe every option of a backend as it stands now."""
    model = options_model(provider, spec)
    present = present_values(spec.name, model, explicit or {})
    values: Mapping[str, Any] = present
    problems: list[tuple[str, str, str]] = []
    try:
        options = resolve(spec.name, model, explicit or {}, neighbours=registry.names()).options
        values = {name: (getattr(options, name), source) for name, (_, source) in present.items()}
    except InvalidOptions as error:
        problems = [p for p in error.problems if not (p[1].endswith("is required") and not p[2])]
    rows = [_row(spec.name, name, field, *values[name]) for name, field in model.model_fields.items()]
    return Described(rows, problems)


def present_values(
    backend: str, model: type[Options], explicit: Mapping[str, Any]
) -> dict[str, tuple[Any, str]]:
    """Gather each option's value as given, unvalidated, and its source; None where it is required and unset.

    A model of the same fields that accepts anything takes the same path through
    the sources, so a value that is not valid can still be shown with its source.

    Raises:
        InvalidOptions: the file that HICACHE_CONFIG names cannot be read.
    """
    fields: dict[str, Any] = {
        name: (Any, None if field.is_required() else field.get_default(call_default_factory=True))
        for name, field in model.model_fields.items()
    }
    lenient = create_model("Lenient", __base__=_Lenient, **fields)
    sourced = resolve(backend, lenient, explicit, neighbours=registry.names())
    return {name: (getattr(sourced.options, name), sourced.sources[name]) for name in model.model_fields}


class _Lenient(Options):
    model_config = ConfigDict(extra="ignore")


def provider_and_spec(name: str) -> tuple[Provider, BackendSpec]:
    """Find a backend and its spec, importing its light module only.

    Raises:
        BackendLoadError: any of its kinds.
    """
    provider = registry.find(name)
    return provider, load_spec(provider)


def _row(backend: str, name: str, field: FieldInfo, value: Any, source: str) -> OptionRow:
    secret = is_secret(field)
    required = field.is_required()
    default = "" if required else shown(field.get_default(call_default_factory=True), field)
    return OptionRow(
        name=name,
        type=type_text(field),
        bounds=_bounds_text(field),
        default="required" if required else default,
        environment=environment_name(backend, name),
        value=shown(value, field),
        source="not set" if required and source == "default" else source,
        secret=secret,
        description=field.description or "",
    )


def type_text(field: FieldInfo) -> str:
    """Name an option's type as a user would write its values."""
    if _is_size(field):
        return "size"
    return _annotation_text(field.annotation)


def _annotation_text(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        if any(isinstance(extra, FieldInfo) and _is_size(extra) for extra in arguments[1:]):
            return "size"
        return _annotation_text(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join("unset" if part is type(None) else _annotation_text(part) for part in arguments)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is not None:
        inner = ", ".join(_annotation_text(part) for part in arguments if part is not Ellipsis)
        return f"{origin.__name__} of {inner}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(str(member.value) for member in annotation)
    if isinstance(annotation, type):
        words = {"str": "text", "SecretStr": "secret", "SecretBytes": "secret"}
        return "path" if issubclass(annotation, Path) else words.get(annotation.__name__, annotation.__name__)
    return str(annotation).replace("typing.", "")


def _is_size(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and extra.get("unit") == "bytes"


def _bounds_text(field: FieldInfo) -> str:
    parts: list[str] = []
    is_size = type_text(field).startswith("size")
    extras = list(field.metadata)
    for part in get_args(field.annotation):
        extras += [extra for extra in get_args(part)[1:] if get_origin(part) is Annotated]
    for extra in extras:
        for attribute, text in _BOUNDS.items():
            bound = getattr(extra, attribute, None)
            if bound is not None and bound is not PydanticUndefined:
                parts.append(text.format(nbytes_text(bound) if is_size else bound))
    return ", ".join(parts)
