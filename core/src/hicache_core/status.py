"""Status: what became of one page in one call.

One small enumeration instead of a bool, since an engine must tell a miss from a
refusal, and an operator must see which of the two it was.
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import Any


@unique
class Status(IntEnum):
    """The outcome for one page; true only when it is ``OK``.

    Hot loops compare by identity or count members (``statuses.count(OK)``);
    constructing ``Status(x)`` for each page costs more than the rest of a call.
    """

    OK = 1
    """The verb did what it says for this page."""
    MISS = 2
    """The store has no value under this key."""
    SIZE_MISMATCH = 3
    """A value is stored, and its size differs from the slot's."""
    CORRUPT = 4
    """A value is stored, and its bytes are known to be damaged."""
    NO_SPACE = 5
    """The store is full; later sets may work."""
    DENIED = 6
    """Permissions, or a read-only store, forbid the operation."""
    TIMEOUT = 7
    """No answer within the deadline; the key is absent or whole."""
    UNAVAILABLE = 8
    """The backend as a whole cannot be reached or refuses to work."""
    SKIPPED = 9
    """Not attempted."""
    ERROR = 10
    """Anything else; the log line of HiCache names the cause."""

    def __bool__(self) -> bool:
        return self is Status.OK


OK = Status.OK
"""The one true status, by a short name for hot loops."""


def is_answer(answer: Any, count: int) -> bool:
    """Tell whether a backend's answer keeps C1: a list of exactly one Status a key."""
    return type(answer) is list and len(answer) == count and set(map(type, answer)) <= {Status}
