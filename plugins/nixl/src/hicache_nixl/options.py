"""Options of the NIXL backend.

Where values come from: arguments, then ``HICACHE_NIXL_<FIELD>``, then the file
named by HICACHE_CONFIG, then the defaults below. Complete TOML examples::

    [nixl]                                  [nixl]
    folders = ["/mnt/nvme0/kv"]             bucket = "kv"
    capacity = "2TiB"                       endpoint = "http://10.0.0.5:8333"
    io = "uring"                            access_key = "..."
                                            secret_key = "..."
"""

from __future__ import annotations

import os
import re
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from hicache_core.options import Options, Size

FILE_PLUGINS = ("POSIX", "GDS", "GDS_MT", "HF3FS")
OBJECT_PLUGINS = ("OBJ",)

#: 16 pages of 64 KiB; below this a store is all folders and no pages.
MIN_CAPACITY_NBYTES = 1 << 20
#: The lowest pool that NIXL's POSIX queue takes as it is; it clamps smaller ones.
MIN_IN_FLIGHT = 64
#: Source: nixl 1.5.1, ``get_plugin_params("POSIX")``: ios_pool_size 65536.
MAX_IN_FLIGHT = 65_536

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
#: Parameters that NIXL knows and that corrupt or hang; see docs/nixl.md.
_REFUSED = {"use_posix_aio": "it is dead for ever after one error"}


class NixlOptions(Options):
    """Where pages go and how NIXL moves them; ``folders`` or ``bucket`` is required."""

    plugin: Literal["auto", "POSIX", "GDS", "GDS_MT", "HF3FS", "OBJ"] = Field(
        default="auto",
        description="NIXL storage plugin. auto: OBJ with a bucket, HF3FS on a 3FS mount, GDS_MT where a pool "
        "lies on a GPU, else POSIX; the choice and its reason are logged.",
    )
    library: Literal["auto", "nixl_cu12", "nixl_cu13"] = Field(
        default="auto",
        description="Which NIXL to import. auto: the one imported already, else cu12, else 13.",
    )
    folders: tuple[str, ...] = Field(
        default=(),
        description="Folders that hold the pages, one a disk; pages spread over them. Made when missing.",
    )
    capacity: Size | None = Field(
        default=None,
        ge=MIN_CAPACITY_NBYTES,
        description="Most bytes of all pages in the folders, of every process and namespace; the least "
        "recently used go first. It is kept in the first folder: a new value replaces it, none keeps it.",
    )
    checksum: bool = Field(
        default=True, description="Store a checksum (xxh3) with each page and verify it on every get."
    )
    fsync: bool = Field(
        default=False, description="Flush each page to disk before its set returns: safe against power loss."
    )
    direct_io: bool = Field(
        default=False, description="Bypass the page cache (O_DIRECT); pages that are not aligned are copied."
    )
    io: Literal["aio", "uring"] = Field(default="aio", description="How POSIX talks to the kernel.")
    bucket: str | None = Field(default=None, description="S3 bucket that holds the pages; it must exist.")
    prefix: str = Field(default="", description="What every object's key begins with, for example `kv/`.")
    endpoint: str | None = Field(
        default=None, description="S3 endpoint as http(s)://host[:port]; none: AWS in `region`."
    )
    region: str = Field(default="us-east-1", min_length=1, description="S3 region, part of each signature.")
    access_key: SecretStr | None = Field(default=None, description="S3 access key.")
    secret_key: SecretStr | None = Field(default=None, description="S3 secret key.")
    session_token: SecretStr | None = Field(default=None, description="S3 session token, where there is one.")
    ca_bundle: str | None = Field(
        default=None, description="File of certificates to trust instead of the system's."
    )
    in_flight: int = Field(
        default=4096,
        ge=MIN_IN_FLIGHT,
        le=MAX_IN_FLIGHT,
        description="Most segments an agent has in flight (NIXL's ios_pool_size); for objects, requests.",
    )
    staging: Size = Field(
        default=32 << 20, ge=1 << 20, description="Private bytes a call takes at a time for objects."
    )
    lanes: int = Field(default=2, ge=1, le=2, description="Threads, each with an agent, that move a batch.")
    engine: dict[str, str] = Field(
        default_factory=dict,
        description="More parameters of the NIXL plugin, as text; unknown ones are refused.",
    )

    @field_validator("folders", mode="before")
    @classmethod
    def _one_is_a_list(cls, folders: object) -> object:
        return tuple(folders.split(os.pathsep)) if isinstance(folders, str) else folders

    @field_validator("folders")
    @classmethod
    def _absolute(cls, folders: tuple[str, ...]) -> tuple[str, ...]:
        for folder in folders:
            if not folder or "\0" in folder:
                raise ValueError(f'{folder!r} is not a path (try "/mnt/nvme0/kv")')
            if ":" in folder:
                raise ValueError(f"{folder!r} holds a colon, which separates folders")
        places = tuple(os.path.abspath(os.path.expanduser(folder)) for folder in folders)
        if len(set(places)) != len(places):
            raise ValueError("a folder is named twice")
        return places

    @field_validator("bucket")
    @classmethod
    def _bucket_name(cls, bucket: str | None) -> str | None:
        if bucket is not None and not _BUCKET.fullmatch(bucket):
            raise ValueError(f"{bucket!r} is not a bucket's name: 3 to 63 of a-z, 0-9, '.', '-'")
        return bucket

    @field_validator("endpoint")
    @classmethod
    def _endpoint_address(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        parts = urlsplit(endpoint)
        odd = not parts.hostname or parts.path.strip("/") or parts.username
        if odd or parts.scheme not in ("http", "https"):
            raise ValueError('an endpoint is http(s)://host[:port], for example "http://10.0.0.5:8333"')
        return endpoint.rstrip("/")

    @field_validator("engine")
    @classmethod
    def _no_trap(cls, engine: dict[str, str]) -> dict[str, str]:
        for name, reason in _REFUSED.items():
            if name in engine:
                raise ValueError(f"{name} is refused: {reason}; set io to aio or uring")
        return engine

    @model_validator(mode="after")
    def _one_place(self) -> NixlOptions:
        objects = self.plugin in OBJECT_PLUGINS or (self.plugin == "auto" and self.bucket is not None)
        if objects:
            self._check_objects()
        elif self.bucket is not None:
            raise ValueError(f"{self.plugin} keeps files; drop bucket, or set plugin to OBJ")
        elif not self.folders:
            raise ValueError("nowhere to put pages; set folders, or bucket for S3")
        if self.direct_io and self.plugin not in ("auto", "POSIX"):
            raise ValueError("direct_io is for POSIX; the other plugins bypass the page cache by themselves")
        if self.io == "uring" and self.plugin not in ("auto", "POSIX"):
            raise ValueError("io is for POSIX")
        return self

    def _check_objects(self) -> None:
        if self.folders:
            raise ValueError("folders and bucket exclude each other; set one of them")
        missing = [name for name in ("bucket", "access_key", "secret_key") if getattr(self, name) is None]
        if missing:
            raise ValueError(f"OBJ needs {', '.join(missing)}")
        if self.capacity is not None:
            raise ValueError("capacity is for files; bound a bucket by a quota or rule of its server")

    @property
    def keeps_objects(self) -> bool:
        """True where pages are objects, whatever plugin was asked for."""
        return self.bucket is not None
