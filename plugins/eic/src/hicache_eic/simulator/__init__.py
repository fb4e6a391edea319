"""A simulator of EIC: a server process, and a module with the surface of `eic`. For tests, never for use."""

from __future__ import annotations
