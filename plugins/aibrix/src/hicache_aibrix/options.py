"""The aibrix backend's options: the caller's, ``HICACHE_AIBRIX_<FIELD>``, or a table in a file::

[aibrix]
backend = "shfs"
root = "/mnt/shared/hicache"
"""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, field_validator, model_validator

from hicache_core.options import Options, Size

#: The library's own default of RocksDB's buffers.
DEFAULT_WRITE_BUFFER = 64 << 20


class AibrixOptions(Options):
    """Options of ``aibrix``."""

    backend: Literal["rocksdb", "shfs"] = Field(
        default="rocksdb",
        description="The library's store: rocksdb (a local disk, one process) or shfs (files, on a file "
        "system that hosts share).",
    )
    root: str = Field(description="The folder of the store, made when it is missing.")
    ttl_s: int = Field(
        default=0,
        ge=0,
        description="rocksdb: seconds after which a page may be dropped; 0 keeps all. The library's own "
        "default is 600.",
    )
    write_buffer: Size = Field(
        default=DEFAULT_WRITE_BUFFER,
        ge=1 << 16,
        description="rocksdb: bytes that a memory table holds before it goes to the disk.",
    )
    workers: int = Field(
        default=8, ge=1, le=64, description="Threads of the library that move a batch's pages."
    )
    network: bool | None = Field(
        default=None,
        description="Whether the root lies on a network file system, where calls may hang; found out from "
        "the mount table when not set.",
    )

    @field_validator("root")
    @classmethod
    def _absolute(cls, root: str) -> str:
        if not root or "\0" in root:
            raise ValueError(f'root={root!r} is not a path (try "/var/cache/hicache")')
        return os.path.abspath(os.path.expanduser(root))

    @model_validator(mode="after")
    def _ttl_is_rocksdbs(self) -> AibrixOptions:
        if self.backend == "shfs" and self.ttl_s:
            raise ValueError("ttl_s works with backend='rocksdb' only: shfs never drops a page; drop ttl_s")
        return self
