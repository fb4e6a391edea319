"""Level shared."""

from __future__ import annotations


class SharedLevel:
    """Cases of level shared."""
