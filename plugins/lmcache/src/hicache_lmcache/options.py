"""The lmcache backend's options: the caller's, ``HICACHE_LMCACHE_<FIELD>``, or a table in a file::

[lmcache]
l2 = "resp"
host = "10.0.0.7"
port = 6379
"""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from hicache_core.options import Options, Size

DEFAULT_REDIS_PORT = 6379


class LMCacheOptions(Options):
    """Options of ``lmcache``."""

    l2: Literal["fs", "resp"] = Field(
        default="fs", description="LMCache's adapter: fs (files) or resp (Redis, Valkey)."
    )
    root: str | None = Field(default=None, description="fs: the folder, made when it is missing.")
    host: str = Field(default="127.0.0.1", min_length=1, description="resp: the server.")
    port: int = Field(default=DEFAULT_REDIS_PORT, ge=1, le=65535, description="resp: its port.")
    username: str = Field(default="", description="resp: who logs in.")
    password: SecretStr | None = Field(default=None, description="resp: the password.")
    workers: int = Field(
        default=4, ge=1, le=64, description="Connections (resp), or parts of a batch under way at once (fs)."
    )
    l1_bytes: Size = Field(
        default=0,
        ge=0,
        description="Memory of this process for LMCache's L1 in front of the store; 0 for none.",
    )
    network: bool | None = Field(
        default=None,
        description="fs: whether the root lies on a network file system, where calls may hang; found out "
        "from the mount table when not set.",
    )

    @field_validator("root")
    @classmethod
    def _absolute(cls, root: str | None) -> str | None:
        if root is None:
            return None
        if not root or "\0" in root:
            raise ValueError(f'root={root!r} is not a path (try "/var/cache/hicache")')
        return os.path.abspath(os.path.expanduser(root))

    @model_validator(mode="after")
    def _root_is_for_files(self) -> LMCacheOptions:
        if self.l2 == "fs" and self.root is None:
            raise ValueError("l2='fs' needs root: name a folder")
        if self.l2 == "resp" and self.root is not None:
            raise ValueError("l2='resp' has no root: drop root, or choose l2='fs'")
        return self
