"""What the adapters of all engines share: options of their own, a backend's made printable, release data.

For adapters and their commands alone; core itself never imports it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pydantic import Field, field_validator

from hicache_core.factory import import_target, load_spec
from hicache_core.options import Options, is_secret, resolve
from hicache_core.registry import registry


class AdapterOptions(Options):
    """Options that every engine's adapter has; the backend's stand in a table of their own."""

    options: dict[str, Any] = Field(
        default_factory=dict, description="The backend's own options; see `hicache show`."
    )
    timeout_s: float = Field(default=5.0, gt=0, le=600, description="Seconds a call to the store may take.")
    model: str | None = Field(
        default=None,
        min_length=1,
        description="The model's id; default: the server's model path. Set it to one text "
        "on servers that keep the same weights under different paths.",
    )
    weights: str | None = Field(
        default=None, min_length=1, description="A fingerprint of the weights; default: taken from the files."
    )
    tenant: str | None = Field(default=None, min_length=1, description="Keeps users of one store apart.")

    @field_validator("options", mode="before")
    @classmethod
    def _options_are_a_table(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f'{value!r} is not a table of options, such as {{"root": "/data/kv"}}')
        return dict(value)


def printable_options(backend: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Validate a backend's options; give those that may be shown, and the names of secrets that must not be.

    Raises:
        BackendLoadError: an unknown backend, or options that are not valid.
    """
    provider = registry.find(backend)
    spec = load_spec(provider)
    model: type[Options] = import_target(spec.options, provider, spec)
    resolve(spec.name, model, given)
    secrets = [option for option in given if is_secret(model.model_fields[option])]
    return {option: value for option, value in given.items() if option not in secrets}, secrets


class HasVersion(Protocol):
    """A record of what an engine's release has."""

    @property
    def version(self) -> str: ...


R = TypeVar("R", bound=HasVersion)


def parsed_version(version: str) -> tuple[int, ...]:
    """Turn ``0.32.0`` (or ``0.32.0.post1``, ``0.33.0rc1``) into something that sorts."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def release_known(engine: str, releases: Sequence[R], version: str) -> R:
    """Give the newest of some releases, the oldest first, that is not newer than this version.

    Raises:
        ValueError: it is older than all of them, or no version at all.
    """
    wanted = parsed_version(version)
    known = [release for release in releases if parsed_version(release.version) <= wanted]
    if not wanted or not known:
        raise ValueError(f"{engine} {version} is not supported; the oldest is {releases[0].version}")
    return known[-1]
