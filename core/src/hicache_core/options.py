"""Options: one pydantic model a backend, and where each value comes from.

Precedence: explicit > environment ``HICACHE_<BACKEND>_<FIELD>`` > file (TOML,
named by ``HICACHE_CONFIG``, a table for each backend) > default. Every problem
is reported at once, by field, with its source and a close match.

This is the one module of core that loads pydantic, and it loads on need. A
plugin's options module begins ``from hicache_core.options import Options, Size``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from hicache_core.errors import InvalidOptions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_VARIABLE = "HICACHE_CONFIG"

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {unit + "b": factor for unit, factor in _UNITS.items() if unit in tuple("kmgt")}
_UNITS |= {
    unit + tail: 1 << shift
    for unit, shift in zip("kmgt", (10, 20, 30, 40), strict=True)
    for tail in ("i", "ib")
}
# No machine has a size of more digits, and Python refuses to read thousands of them.
_NUMBER = r"(\d{1,24}(?:\.\d{1,24})?)"
_SIZE = re.compile(rf"\s*{_NUMBER}\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_ALMOST_A_SIZE = re.compile(rf"\s*{_NUMBER}\s*([kmgt])", re.ASCII | re.IGNORECASE)


def parse_size(value: Any) -> int:
    """Turn ``"64mb"``, ``"1.5GiB"`` or an int into bytes; kb, mb, gb, tb are decimal, kib and so on binary.

    Raises:
        ValueError: with what to write instead.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"{value} is negative; a size is 0 or more bytes")
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        met = repr(value)
        raise ValueError(
            f'{met if len(met) < 50 else met[:46] + "..."} is not a size (try "{_size_hint(value)}")'
        )
    return int(match[1]) * factor if match[1].isdigit() else round(float(match[1]) * factor)


def _size_hint(value: Any) -> str:
    match = _ALMOST_A_SIZE.match(value) if isinstance(value, str) else None
    return f"{match[1]}{match[2].upper()}iB" if match else "4GiB"


#: A number of bytes that may be written "64mb", "1.5GiB" or as an int.
Size = Annotated[int, BeforeValidator(parse_size), Field(json_schema_extra={"unit": "bytes"})]


class Options(BaseModel):
    """The base of every backend's options: frozen, unknown fields refused, secrets never shown."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True)

    bounce: bool = Field(
        default=False,
        description="Let the backend touch private memory only, at the price of a copy, so that a call that "
        "hangs in native code is left behind at the deadline. HiCache does so by itself where it must.",
    )


@dataclass(frozen=True, slots=True)
class Sourced:
    """Validated options, and for each field the place its value came from."""

    options: Options
    sources: Mapping[str, str]


def resolve(
    backend: str,
    model: type[Options],
    explicit: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    neighbours: Iterable[str] = (),
) -> Sourced:
    """Gather, validate and freeze the options of one backend.

    Args:
        backend: its name, as in environment variables and the file's tables.
        model: its options class.
        explicit: what the caller passed; wins.
        environment: instead of os.environ, for tests.
        neighbours: other backends' names, so that HICACHE_A_B_C of a backend
            ``a_b`` is not taken for an unknown option of ``a``.

    Raises:
        InvalidOptions: every bad field, with close matches and sources.
    """
    variables = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in (
        _from_file(backend, variables),
        _from_environment(backend, model, variables, neighbours),
        {name: (value, "") for name, value in explicit.items()},
    ):
        for name, (value, source) in layer.items():
            values[name] = value
            sources[name] = source
    try:
        options = model.model_validate(values)
    except ValidationError as error:
        raise InvalidOptions(backend, _problems(model, error, sources)) from error
    given = {name: source or "explicit" for name, source in sources.items()}
    return Sourced(options, {name: given.get(name, "default") for name in model.model_fields})


def environment_name(backend: str, option: str) -> str:
    """Name the variable that sets an option: ``HICACHE_<BACKEND>_<FIELD>``."""
    return f"HICACHE_{backend}_{option}".upper()


def is_secret(field: FieldInfo) -> bool:
    """True where a field's value, or any part of it, must never be shown."""
    return _holds_secret(field.annotation, set())


def _holds_secret(annotation: Any, seen: set[Any]) -> bool:
    origin = get_origin(annotation) or annotation
    if hasattr(origin, "get_secret_value"):
        return True
    inner = list(get_args(annotation)) if origin is not Literal else []
    if isinstance(origin, type) and issubclass(origin, BaseModel) and origin not in seen:
        seen.add(origin)
        inner += [field.annotation for field in origin.model_fields.values()]
    return any(_holds_secret(part, seen) for part in inner)


def shown(value: Any, field: FieldInfo) -> str:
    """Give a value's text for people, secrets masked."""
    if value is None:
        return ""
    return "********" if is_secret(field) or hasattr(value, "get_secret_value") else str(value)


def _from_environment(
    backend: str, model: type[Options], variables: Mapping[str, str], neighbours: Iterable[str]
) -> dict[str, tuple[Any, str]]:
    prefix = f"HICACHE_{backend.upper()}_"
    longer = tuple(f"HICACHE_{name.upper()}_" for name in neighbours if name.startswith(f"{backend}_"))
    found: dict[str, tuple[Any, str]] = {}
    for variable in sorted(variables):
        if not variable.startswith(prefix) or (longer and variable.startswith(longer)):
            continue
        name = variable[len(prefix) :].lower()
        text = variables[variable]
        found[name] = (_parsed(text, model.model_fields.get(name)), variable)
    return found


def _parsed(text: str, field: FieldInfo | None) -> Any:
    """Read JSON where the field holds more than a scalar; pydantic reads scalars from text itself."""
    if field is None or text[:1] not in ("[", "{"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _from_file(backend: str, variables: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    path = variables.get(CONFIG_VARIABLE, "")
    if not path:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
        document = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        complaint = f"the file {path!r} cannot be read: {error}"
        raise InvalidOptions(backend, [(CONFIG_VARIABLE, complaint, CONFIG_VARIABLE)]) from error
    table = document.get(backend, {})
    if not isinstance(table, dict):
        complaint = f"'{backend}' in {path!r} is not a table; write [{backend}]"
        raise InvalidOptions(backend, [(backend, complaint, f"{path} {_line_of(text, backend, backend)}")])
    return {name: (value, f"{path} {_line_of(text, backend, name)}".strip()) for name, value in table.items()}


def _line_of(text: str, table: str, name: str) -> str:
    """Find the line that sets an option, for messages; empty where the file is written in an unusual way."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("["):
            inside = re.match(rf"\[\s*[\"']?{re.escape(table)}[\"']?\s*\]", stripped) is not None
        elif re.match(rf"[\"']?{re.escape(name)}[\"']?\s*=", stripped) and (inside or name == table):
            return f"line {number}"
    return ""


def _problems(
    model: type[Options], error: ValidationError, sources: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    problems: list[tuple[str, str, str]] = []
    for item in error.errors(include_url=False, include_context=True):
        name, where = str(item["loc"][0]) if item["loc"] else "", ".".join(map(str, item["loc"]))
        source = sources.get(name, "")
        if item["type"] == "extra_forbidden":
            known = list(model.model_fields) if where == name else []
            close = difflib.get_close_matches(name, known, n=1)
            problems.append((name, f"{where} is unknown{f' ({close[0]}?)' if close else ''}", source))
            continue
        message = item["msg"].removeprefix("Value error, ").strip()
        message = message[:1].lower() + message[1:] if message[1:2].islower() else message
        field = model.model_fields.get(name)
        if field is None:
            problems.append((name, message, source))
        elif item["type"] == "missing":
            problems.append((name, f"{where} is required", source))
        else:
            met = "" if is_secret(field) or item["type"] == "value_error" else f"={item['input']!r}"
            problems.append((name, f"{where}{met}: {message}", source))
    return problems
