"""Level threads."""

from __future__ import annotations


class ThreadsLevel:
    """Cases of level threads."""
