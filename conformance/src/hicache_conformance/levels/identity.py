"""Level identity."""

from __future__ import annotations


class IdentityLevel:
    """Cases of level identity."""
