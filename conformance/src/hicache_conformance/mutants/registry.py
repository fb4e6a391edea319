"""The list of mutants, and the mark that puts a class on it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from hicache_conformance.memory.storage import MemoryStorage
from hicache_conformance.memory.store import Store

_C = TypeVar("_C", bound=type[Any])
_STORE = "hicache_conformance.memory.store:Store"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One broken backend."""

    name: str
    clause: str
    """The clause that it breaks."""
    levels: tuple[str, ...]
    """Where the cases are that must find it out."""
    match: str
    """Which of them, where the clause's others take long; in pytest's -k language."""
    hazard: bool
    """Whether it takes the process with it, so that only a supervised run survives it."""
    story: str
    storage_class: type[MemoryStorage]
    store: str
    """The server's store, as ``module:Class``."""


MUTANTS: dict[str, Mutant] = {}


def breaks(clause: str, *levels: str, match: str = "", hazard: bool = False) -> Callable[[_C], _C]:
    """Register a storage or store class as the mutant that breaks this clause."""

    def register(made: _C) -> _C:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", made.__name__).lower()
        if issubclass(made, Store):
            storage, store = MemoryStorage, f"{made.__module__}:{made.__name__}"
        else:
            storage, store = made, _STORE
        MUTANTS[name] = Mutant(
            name, clause, levels, match, hazard, (made.__doc__ or "").strip(), storage, store
        )
        return made

    return register
