"""Level fault."""

from __future__ import annotations


class FaultLevel:
    """Cases of level fault."""
