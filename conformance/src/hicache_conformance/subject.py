"""Subject: what a run of the suite is about, and how another process finds the same thing.

Usually an installed backend. A mutant, or a foreign class behind an adapter, is
a subject too: anything with a spec, a way to build storages and a harness.

A subject is named by ``kind=value``, so that a supervised child or a peer can
build it again. Kinds are entry points of the group ``hicache.conformance.subjects``:
functions from the value's text to a Subject. Each becomes an option of
``hicache check``: a distribution that registers ``acme-class`` adds
``--acme-class``. Two kinds are built in: ``backend`` and ``mutant``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, cast

from hicache_conformance.harness import BaseHarness, Harness
from hicache_core import (
    BackendSpec,
    HiCacheError,
    HiCacheStorage,
    HiCacheStorageConfig,
    InvalidArgument,
    StorageBackendFactory,
)

ENTRY_POINT_GROUP = "hicache.conformance.subjects"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One thing under test."""

    name: str
    """For people and reports."""
    spec: BackendSpec
    create: Callable[[HiCacheStorageConfig, Mapping[str, Any]], HiCacheStorage]
    """Build a storage, unopened, from a config and the harness's options."""
    harness: Callable[[Mapping[str, Any]], Harness]
    """Make a harness from the user's options."""
    reference: str = ""
    """``kind=value``; empty when no other process can find it, and then cases that need one are not run."""
    distribution: str = ""
    """What provides it, as ``hicache-file 0.1.0``."""

    def description(self) -> dict[str, Any]:
        """Give what a report says of it, as JSON values."""
        return {
            "name": self.name,
            "summary": self.spec.summary,
            "distribution": self.distribution,
            "native": native_versions(self.spec),
        }


def find_subject(reference: str) -> Subject:
    """Build the subject that ``kind=value`` names; a bare value is a backend.

    Raises:
        BackendLoadError: a backend that cannot be loaded.
        InvalidArgument: an unknown kind or mutant.
    """
    kind, separator, value = reference.partition("=")
    if not separator:
        kind, value = "backend", reference
    if kind == "backend":
        return _backend(value)
    if kind == "mutant":
        from hicache_conformance.mutants import mutant_subject

        return mutant_subject(value)
    for point in kinds():
        if point.name == kind:
            return cast("Subject", point.load()(value))
    raise InvalidArgument(
        "unknown kind of subject",
        value=repr(kind),
        remedy=f"Use one of: backend, mutant{''.join(f', {point.name}' for point in kinds())}.",
    )


@cache
def kinds() -> tuple[metadata.EntryPoint, ...]:
    """Give the kinds that other distributions add; imports none of them."""
    return tuple(metadata.entry_points(group=ENTRY_POINT_GROUP))


def _backend(name: str) -> Subject:
    from hicache_core.factory import import_target
    from hicache_core.registry import registry

    provider = registry.find(name)
    spec = StorageBackendFactory.spec(name)

    def create(config: HiCacheStorageConfig, options: Mapping[str, Any]) -> HiCacheStorage:
        return StorageBackendFactory.load(name, options).create(config)

    def harness(given: Mapping[str, Any]) -> Harness:
        if not spec.harness:
            return BaseHarness(given)
        made = import_target(spec.harness, provider, spec)(given)
        return cast("Harness", made)

    return Subject(
        name=name,
        spec=spec,
        create=create,
        harness=harness,
        # A class registered in this process alone cannot be found by another one.
        reference="" if provider.registered else f"backend={name}",
        distribution=f"{provider.distribution} {provider.version}".strip(),
    )


def native_versions(spec: BackendSpec) -> dict[str, str]:
    """Give the versions of the distributions that provide what a spec requires; absent ones as ''."""
    providers = metadata.packages_distributions()
    versions: dict[str, str] = {}
    for requirement in spec.requires:
        module = requirement.module.split(".")[0]
        for distribution in providers.get(module, ()):
            versions[distribution] = metadata.version(distribution)
        if module not in providers:
            versions[module] = ""
    return versions


def reason_of(error: BaseException) -> str:
    """Give an error as one line."""
    text = str(error) if isinstance(error, HiCacheError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
