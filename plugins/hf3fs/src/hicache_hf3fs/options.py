"""The hf3fs backend's options: the caller's, ``HICACHE_HF3FS_<FIELD>``, or a table in a file::

[hf3fs]
root = "/mnt/3fs/hicache"
file_size = "512GiB"
client = "usrbio"
metadata_url = "http://10.0.0.5:18480"
metadata_token = "..."
"""

from __future__ import annotations

import os
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from hicache_core.options import Options, Size

#: Long after any verb's deadline, so that a slow writer keeps its pages; short enough to get a dead one's
#: back.
DEFAULT_LEASE_S = 60.0
#: A reader that has not finished by then discards what it read.
DEFAULT_HOLD_S = 15.0
#: Where the metadata server listens unless told.
DEFAULT_PORT = 18480
MIN_FILE_NBYTES = 4096


class Hf3fsOptions(Options):
    """Options of ``hf3fs``."""

    root: str = Field(
        description="The folder of the page files, made when it is missing; on the file system that all "
        "hosts mount."
    )
    file_size: Size = Field(
        ge=MIN_FILE_NBYTES,
        description="Bytes of pages in a page file, preallocated. There is one file a component: each "
        "tp_rank's own, or one for all where the component is replicated.",
    )
    client: Literal["posix", "usrbio"] = Field(
        default="posix",
        description="How pages move: pread and pwrite on any mounted file system (the 3FS FUSE mount "
        "included), or 3FS usrbio, past the mount.",
    )
    metadata_url: str | None = Field(
        default=None,
        description="The metadata server, http://host:port; without one the metadata is this process's own, "
        "and no other process can use the root.",
    )
    metadata_token: SecretStr | None = Field(default=None, description="The server's bearer token.")
    metadata_path: str | None = Field(
        default=None,
        description="Without a server: the metadata's sqlite file, on a local disk; ROOT/metadata.sqlite "
        "when not set.",
    )
    checksum: bool = Field(
        default=True,
        description="Store a checksum (xxh3) of each page with its place and verify it on every get; always "
        "on over a network.",
    )
    fsync: bool = Field(
        default=False,
        description="Flush each batch to the disk before it is confirmed, so that a power loss keeps it too; "
        "always on over a network, where other hosts read from the disk.",
    )
    numjobs: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Threads that move one batch (posix; on a local disk at most one a core), or lanes of "
        "rings (usrbio).",
    )
    entries: int = Field(default=32, ge=1, le=4096, description="usrbio: most pages in flight in a lane.")
    memory: Size = Field(
        default=256 << 20,
        ge=1 << 16,
        description="usrbio: bytes of shared memory for all lanes together; a lane carries as many pages as "
        "fit its part.",
    )
    lease_s: float = Field(
        default=DEFAULT_LEASE_S,
        gt=0,
        description="Without a server: seconds after which a page that a writer took and never confirmed is "
        "free again.",
    )
    hold_s: float = Field(
        default=DEFAULT_HOLD_S,
        gt=0,
        description="Without a server: most seconds for which a page that is being read goes to no writer.",
    )
    retries: int = Field(
        default=2,
        ge=0,
        le=10,
        description="Repeats of a request that did not reach the server, within the deadline.",
    )
    network: bool | None = Field(
        default=None,
        description="Whether the root lies on a network file system; found out from the mount table when not "
        "set.",
    )
    usrbio_module: str = Field(
        default="hf3fs_fuse.io",
        description="The Python module of usrbio, as it was built; some builds: hf3fs_py_usrbio.",
    )

    @field_validator("root")
    @classmethod
    def _absolute(cls, root: str) -> str:
        if not root or "\0" in root:
            raise ValueError(f'root={root!r} is not a path (try "/mnt/3fs/hicache")')
        return os.path.abspath(os.path.expanduser(root))

    @field_validator("metadata_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.path.strip("/")
            or parts.query
        ):
            raise ValueError(f'metadata_url={url!r} is not a server (try "http://127.0.0.1:{DEFAULT_PORT}")')
        return url.rstrip("/")

    @field_validator("metadata_token")
    @classmethod
    def _is_token(cls, token: SecretStr | None) -> SecretStr | None:
        text = token.get_secret_value() if token is not None else ""
        if not (text.isascii() and text.isprintable()):
            raise ValueError("metadata_token has characters that HTTP does not carry (a line's end?)")
        return token

    @field_validator("usrbio_module")
    @classmethod
    def _is_module(cls, name: str) -> str:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f'usrbio_module={name!r} is not a module (try "hf3fs_fuse.io")')
        return name

    @model_validator(mode="after")
    def _one_metadata(self) -> Hf3fsOptions:
        if self.metadata_url is not None and self.metadata_path is not None:
            raise ValueError("metadata_url and metadata_path exclude each other: drop one")
        if self.metadata_url is None and self.metadata_token is not None:
            raise ValueError("metadata_token without metadata_url: name the server, or drop the token")
        return self
