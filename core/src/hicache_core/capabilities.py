"""Capabilities: what a backend can do, as data that is readable without importing it.

Grammar of the names: a verb or a noun is a boolean promise (``clear``,
``shared``); ``needs_`` is a demand on the caller; ``max_`` is a limit, None
where there is none; the remaining fields are words from a closed list. A
declared capability works; an undeclared one is refused (C13).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from hicache_core.errors import InvalidArgument

Eviction = Literal["lru", "approx", "ttl", "none"]
Deadline = Literal["cancel", "bounce", "hold", "none"]

#: Weakest last: opening a backend may find that it can only promise less.
_DEADLINES = ("cancel", "bounce", "hold", "none")
_EVICTIONS = ("lru", "approx", "ttl", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one backend promises; frozen, compared by value."""

    shared: bool = False
    """Other instances of the namespace, on any host, see a page once its set is OK (C3)."""
    persistent: bool = False
    """What was OK before close() is there after a restart (C14)."""
    durable: bool = False
    """The same after kill -9 (C14)."""
    eviction: Eviction = "none"
    """How a full store makes room: by last use, about last use, age, or not at all (C15)."""
    remove: bool = False
    """batch_remove works."""
    clear: bool = False
    """clear() removes the whole namespace and nothing else (C9)."""
    listing: bool = False
    """namespaces() tells all that the store holds."""
    verify: bool = False
    """verify() finds damaged pages of the namespace, and removes them when asked."""
    checksum: bool = False
    """Damaged bytes are found and reported as CORRUPT (C5)."""
    zero_copy: bool = False
    """Bytes move between the store and the pool's memory without a private copy."""
    device_memory: bool = False
    """Pools on an accelerator are served directly."""
    needs_registered: bool = False
    """Slots must lie in pools that open() or add_pool() saw."""
    deadline: Deadline = "none"
    """The means by which a verb returns in time (C11)."""
    max_segments: int | None = None
    """Most segments a page, for example 16."""
    max_batch: int | None = None
    """Most pages a call, for example 1024."""
    max_page_nbytes: int | None = None
    """Largest page in bytes."""
    transport: str = "local"
    """How bytes travel, for example ``local``, ``tcp``, ``rdma``; for people."""

    def __post_init__(self) -> None:
        if self.eviction not in _EVICTIONS:
            raise _unknown_word("eviction", self.eviction, _EVICTIONS)
        if self.deadline not in _DEADLINES:
            raise _unknown_word("deadline", self.deadline, _DEADLINES)
        for field in dataclasses.fields(self):
            promise = getattr(self, field.name)
            if field.type == "bool" and type(promise) is not bool:
                raise InvalidArgument(
                    f"capability '{field.name}' is not a promise",
                    value=repr(promise),
                    remedy="Write True or False.",
                )
        for name in ("max_segments", "max_batch", "max_page_nbytes"):
            limit = getattr(self, name)
            if limit is not None and (type(limit) is not int or limit < 1):
                raise InvalidArgument(
                    f"capability '{name}' is not a limit",
                    value=repr(limit),
                    remedy="Give a count from 1, or None.",
                )

    def narrowing_violations(self, opened: Capabilities) -> list[str]:
        """Name the fields in which ``opened`` promises more than this declaration.

        Booleans may go from True to False, limits down, eviction and the
        deadline's means to a weaker word; ``needs_registered`` is a demand, and
        dropping it is allowed, adding it is not. The transport is free text.
        """
        wider: list[str] = []
        for field in dataclasses.fields(self):
            declared, now = getattr(self, field.name), getattr(opened, field.name)
            if field.name == "transport" or declared == now:
                continue
            if field.name == "deadline":
                grown = _DEADLINES.index(now) < _DEADLINES.index(declared)
            elif field.name == "eviction":
                grown = now != "none" and (declared, now) != ("lru", "approx")
            elif field.name.startswith("max_"):
                grown = now is None or (declared is not None and now > declared)
            else:
                grown = bool(now)
            if grown:
                wider.append(f"{field.name}: {declared!r} to {now!r}")
        return wider


def _unknown_word(field: str, value: object, known: tuple[str, ...]) -> InvalidArgument:
    return InvalidArgument(
        f"capability '{field}' has an unknown value",
        value=repr(value),
        remedy=f"Use one of: {', '.join(known)}.",
    )
