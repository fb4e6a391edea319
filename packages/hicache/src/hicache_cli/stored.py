"""Which namespaces of a store a command of upkeep works on: found by listing, chosen by what they are.

A store that can list is asked; of any other the user names a namespace by its
manifest (``--identity FILE``), since its id follows from that.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import click

from hicache_cli.described import options_model, provider_and_spec
from hicache_core.errors import InvalidArgument, InvalidIdentity
from hicache_core.factory import StorageBackendFactory
from hicache_core.identity import Identity, Namespace, Placement
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig
from hicache_core.upkeep import NamespaceUse

F = TypeVar("F", bound=Callable[..., Any])

#: The option with which a backend opens a store and leaves it as it is, whatever the backend.
READ_ONLY_OPTION = "read_only"
#: Seconds for calls that look at a whole store.
DEFAULT_TIMEOUT_S = 60.0

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_AGE_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
#: Shortcut options and the identity's field that each is.
_SHORTCUTS = {"model": "model", "dtype": "kv_dtype", "tenant": "tenant", "engine": "engine"}


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a user asked for: every condition has to hold."""

    prefixes: tuple[str, ...]
    """Beginnings of namespace ids; any of them."""
    fields: tuple[tuple[str, str], ...]
    """(identity field, pattern)."""
    older_s: float | None
    """Seconds since the last page was set."""
    manifests: tuple[Path, ...]

    @property
    def everything(self) -> bool:
        """True where nothing was asked for."""
        return not (self.prefixes or self.fields or self.older_s is not None or self.manifests)

    def includes(self, use: NamespaceUse, now_s: float) -> bool:
        """Tell whether a namespace is meant; what is not known of it is never a match."""
        if self.prefixes and not use.id.startswith(self.prefixes):
            return False
        manifest = use.manifest
        if self.fields and (manifest is None or not all(_matches(manifest, *each) for each in self.fields)):
            return False
        return self.older_s is None or (use.written_s is not None and now_s - use.written_s > self.older_s)


def choice_options(command: F) -> F:
    """Add the options that choose namespaces; they arrive as one ``chosen``."""

    def decorated(**given: Any) -> Any:
        fields = [(field, given.pop(name)) for name, field in _SHORTCUTS.items()]
        fields += [tuple(text.split("=", 1)) for text in given.pop("where")]
        chosen = Chosen(
            prefixes=given.pop("namespaces"),
            fields=tuple((field, pattern) for field, pattern in fields if pattern is not None),
            older_s=given.pop("older_than"),
            manifests=given.pop("manifests"),
        )
        return command(chosen=chosen, **given)

    decorated.__name__, decorated.__doc__ = command.__name__, command.__doc__
    decorated.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    for option in reversed(
        (
            click.option(
                "--namespace", "namespaces", multiple=True, metavar="ID", help="An id, or how it begins."
            ),
            click.option("--model", metavar="GLOB", help="The model's id, for example 'meta-llama/*'."),
            click.option("--dtype", metavar="GLOB", help="The KV cache's dtype, for example 'fp8*'."),
            click.option("--tenant", metavar="GLOB"),
            click.option("--engine", metavar="GLOB"),
            click.option(
                "--where",
                multiple=True,
                metavar="FIELD=GLOB",
                callback=_where,
                help="Any field of the identity; 'none' is one that it has not.",
            ),
            click.option("--older-than", metavar="AGE", callback=_age, help="No page set for 36h, 7d, 2w."),
            click.option(
                "--identity",
                "manifests",
                multiple=True,
                type=click.Path(exists=True, dir_okay=False, path_type=Path),
                metavar="FILE",
                help="A namespace's manifest, where the store cannot list.",
            ),
        )
    ):
        decorated = option(decorated)
    return decorated  # type: ignore[return-value]


def _where(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    known = set(Identity.for_tests().manifest()) - {"schema"}
    for value in values:
        field, separator, _ = value.partition("=")
        if not separator or field not in known:
            raise click.BadParameter(f"{value!r} is no FIELD=GLOB; the fields are {', '.join(sorted(known))}")
    return values


def _age(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    found = _AGE.fullmatch(value.strip())
    if not found:
        raise click.BadParameter(f"{value!r} is no age (write 36h, 7d or 2w)")
    return float(found[1]) * _AGE_UNITS_S[found[2]]


def _matches(manifest: Mapping[str, Any], field: str, pattern: str) -> bool:
    value = manifest.get(field)
    if value is None:
        return pattern == "none"
    text = json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else str(value)
    return fnmatchcase(text, pattern)


@contextmanager
def opened_storage(
    backend: str,
    options: Mapping[str, Any],
    timeout_s: float,
    identity: Identity | None = None,
    *,
    writes: bool = False,
) -> Iterator[HiCacheStorage]:
    """Open a store for one namespace, or for none in particular, and close it; read-only where that exists.

    Raises:
        BackendLoadError, BackendUnavailable.
    """
    provider, spec = provider_and_spec(backend)
    given = dict(options)
    fields = options_model(provider, spec).model_fields
    if not writes and READ_ONLY_OPTION in fields:
        # A reader sets no limit, whatever the environment says of one for the engines.
        reading = {READ_ONLY_OPTION: True, "capacity": None}
        given = {name: value for name, value in reading.items() if name in fields} | given
    storage = StorageBackendFactory.create_backend(
        backend, _config(identity or _nobody(), timeout_s), (), **given
    )
    try:
        yield storage
    finally:
        storage.close()


def _config(identity: Identity, timeout_s: float) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        namespace=Namespace.of(identity), identity=identity, placement=Placement(), timeout_s=timeout_s
    )


def _nobody() -> Identity:
    """An identity that no engine has; nothing is ever stored under it."""
    return Identity.for_tests(engine="hicache-upkeep", model="none", kv_dtype="none", page_tokens=1)


def find(storage: HiCacheStorage, chosen: Chosen) -> list[NamespaceUse]:
    """List the chosen namespaces, largest first.

    Raises:
        InvalidArgument: the store cannot list, and no manifest was given.
    """
    if chosen.manifests:
        return [_named(path) for path in chosen.manifests]
    if not storage.capabilities.listing:
        raise InvalidArgument(
            f"'{storage.spec.name}' cannot list its namespaces",
            remedy="Name one by its manifest, --identity FILE: the fields of hicache_core.Identity as JSON.",
        )
    now_s = time.time()
    found = [use for use in storage.namespaces() if chosen.includes(use, now_s)]
    return sorted(found, key=lambda use: (-use.bytes, use.id))


def _named(path: Path) -> NamespaceUse:
    """Read a manifest, as beside a store's pages or bare; how much there is of it is not known."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        manifest = found.get("identity", found)
        namespace = Namespace.of(Identity.of_manifest(manifest))
    except (ValueError, AttributeError) as error:
        raise InvalidArgument(
            "a manifest is not JSON of an identity",
            value=str(path),
            remedy="Give what `hicache ls --json` prints.",
        ) from error
    return NamespaceUse(id=namespace.id, manifest=manifest, pages=0, bytes=0, written_s=None)


def identity_of(use: NamespaceUse) -> Identity | None:
    """Give the identity of a namespace; None where its manifest does not lead back to it."""
    try:
        identity = Identity.of_manifest(use.manifest or {})
    except InvalidIdentity:
        return None
    return identity if Namespace.of(identity).id == use.id else None


def rows_of(uses: Sequence[NamespaceUse]) -> list[dict[str, Any]]:
    """Give namespaces as JSON."""
    return [
        {
            "namespace": use.id,
            "identity": dict(use.manifest) if use.manifest is not None else None,
            "pages": use.pages,
            "bytes": use.bytes,
            "written_s": use.written_s,
        }
        for use in uses
    ]
