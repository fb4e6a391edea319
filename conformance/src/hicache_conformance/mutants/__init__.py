"""Mutants: the memory backend broken in one thing each, the way a real backend was.

They prove the suite: each must be found out by a case of the clause that it
breaks. A mutant's docstring says who did it; facts about other projects' code
are as of the versions that docs/conformance-report.md names.

A mutant is a storage class or a store class, marked with ``@breaks``; its name is
the class's in lower case with underscores. ``hicache check`` runs one as the
subject ``mutant=NAME``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from hicache_conformance.mutants.registry import MUTANTS, Mutant
from hicache_conformance.subject import Subject
from hicache_core import HiCacheStorage, HiCacheStorageConfig, InvalidArgument

if TYPE_CHECKING:
    from hicache_conformance.harness import Harness

__all__ = ["Mutant", "all_mutants", "mutant_subject"]

_MODULES = ("answers", "hazards", "lives", "names", "slots", "stopped", "stores", "values")


def all_mutants() -> Mapping[str, Mutant]:
    """Give every mutant by name."""
    for module in _MODULES:
        import_module(f"hicache_conformance.mutants.{module}")
    return MUTANTS


def mutant_subject(name: str) -> Subject:
    """Make the subject for one of them.

    Raises:
        InvalidArgument: no such mutant.
    """
    mutant = all_mutants().get(name)
    if mutant is None:
        raise InvalidArgument(
            "no such mutant", value=repr(name), remedy=f"One of: {', '.join(sorted(MUTANTS))}."
        )
    return Subject(
        name=f"mutant {name}",
        spec=mutant.storage_class.spec,
        create=partial(_create, mutant),
        harness=partial(_harness, mutant),
        reference=f"mutant={name}",
        distribution="hicache-conformance",
    )


def _create(mutant: Mutant, config: HiCacheStorageConfig, options: Mapping[str, Any]) -> HiCacheStorage:
    from hicache_conformance.memory.options import MemoryOptions
    from hicache_core.options import resolve

    sourced = resolve("memory", MemoryOptions, options)
    return mutant.storage_class(config, cast("MemoryOptions", sourced.options))


def _harness(mutant: Mutant, given: Mapping[str, Any]) -> Harness:
    from hicache_conformance.memory.harness import MemoryHarness

    harness = MemoryHarness(given)
    harness.store_class = mutant.store
    return harness
