"""Level evict."""

from __future__ import annotations


class EvictLevel:
    """Cases of level evict."""
