"""What upkeep asks of a store besides the verbs of engines: what is in it, and is it still whole.

Both are optional (capabilities ``listing`` and ``verify``): an engine never
needs them, and not every store can list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceUse:
    """One namespace of a store, whoever's it is."""

    id: str
    """Its 32 hex digits."""
    manifest: Mapping[str, Any] | None
    """The readable identity that was stored beside the pages; None where there is none that can be read."""
    pages: int
    bytes: int
    """Bytes of its pages."""
    written_s: float | None
    """When its last page was set, in seconds since 1970; None where the store cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a piece of verify found; pieces add up."""

    pages: int = 0
    """Pages that were read, damaged ones included."""
    bytes: int = 0
    """Their bytes."""
    damaged: int = 0
    """Pages that are not what was set."""
    removed: int = 0
    """Damaged pages that were removed."""

    def __add__(self, other: Verified) -> Verified:
        return Verified(
            pages=self.pages + other.pages,
            bytes=self.bytes + other.bytes,
            damaged=self.damaged + other.damaged,
            removed=self.removed + other.removed,
        )
