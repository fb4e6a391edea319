"""Level durable."""

from __future__ import annotations


class DurableLevel:
    """Cases of level durable."""
