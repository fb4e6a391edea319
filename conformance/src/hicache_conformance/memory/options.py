"""Options of the memory backend.

Where values come from: arguments, then ``HICACHE_MEMORY_<FIELD>``, then the file
named by HICACHE_CONFIG, then the defaults below. A complete TOML example::

    [memory]
    store = "scratch"
    capacity = "64mib"
    eviction = "lru"
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from hicache_core.options import Options, Size


class MemoryOptions(Options):
    """Where the pages are and how many may be kept."""

    store: str = Field(
        default="default",
        min_length=1,
        description="Name of a store in this process; instances that name the same one share it. "
        "It is gone when the last of them closes.",
    )
    server: Path | None = Field(
        default=None,
        description="Unix socket of a `python -m hicache_conformance.memory.server`, instead of `store`.",
    )
    capacity: Size | None = Field(
        default=None,
        ge=1,
        description="Most bytes of pages, all namespaces together; the first opener of a store decides.",
    )
    eviction: Literal["lru", "none"] = Field(
        default="lru",
        description="Whether a full store drops what was used least recently, or says NO_SPACE.",
    )

    @model_validator(mode="after")
    def _server_decides(self) -> MemoryOptions:
        if self.server is not None and self.capacity is not None:
            raise ValueError("capacity is the server's own where server is given; start it with --capacity")
        return self
