"""Level lifecycle."""

from __future__ import annotations


class LifecycleLevel:
    """Cases of level lifecycle."""
