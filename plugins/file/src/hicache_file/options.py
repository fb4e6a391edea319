"""The file backend's options: from the caller, ``HICACHE_FILE_<FIELD>``, or the file HICACHE_CONFIG::

[file]
root = "/var/cache/hicache"
capacity = "512GiB"
checksum = true
fsync = false
"""

from __future__ import annotations

import os

from pydantic import Field, field_validator, model_validator

from hicache_core.options import Options, Size

#: Beyond this a larger segment gains nothing and an eviction stalls longer (unlinking 64 MiB: 4 ms cached).
MAX_SEGMENT_NBYTES = 64 << 20
#: Below this the headers outweigh the pages.
MIN_SEGMENT_NBYTES = 64 << 10
#: A root takes its control files, an open segment and something to evict: 16 pages of 4 KiB.
MIN_CAPACITY_NBYTES = 64 << 10


class FileOptions(Options):
    """Options of ``file``; everything but ``root`` has a default that is safe to leave."""

    root: str = Field(
        description="The folder of the pages, made when it is missing; processes share pages by sharing it."
    )
    read_only: bool = Field(
        default=False,
        description="Get and look, never write: sets are refused, nothing is marked, removed or evicted.",
    )
    capacity: Size | None = Field(
        default=None,
        description="Most bytes that all files of the root take, for all its processes. It is stored in the "
        "root: an explicit value replaces it, none keeps it; without any the root grows without limit.",
    )
    checksum: bool = Field(
        default=True,
        description="Store a checksum (xxh3) with each page, verify it on every get; always over a network.",
    )
    fsync: bool = Field(
        default=False,
        description="Flush each batch to the disk before its set returns, so that a power loss keeps it too.",
    )
    lanes: int = Field(
        default=2,
        ge=1,
        le=2,
        description="Open segments a process writes to, and threads that move one batch.",
    )
    segment_size: Size = Field(
        default=MAX_SEGMENT_NBYTES,
        ge=MIN_SEGMENT_NBYTES,
        le=MAX_SEGMENT_NBYTES,
        description="Bytes of a segment where no capacity asks for smaller ones.",
    )
    max_open_segments: int = Field(
        default=256,
        ge=8,
        le=65536,
        description="Segments whose two file descriptors are kept open for reading.",
    )
    network: bool | None = Field(
        default=None,
        description="Whether the root lies on a network file system; by the mount table when not set.",
    )

    @field_validator("root")
    @classmethod
    def _absolute(cls, root: str) -> str:
        if not root or "\0" in root:
            raise ValueError(f'root={root!r} is not a path (try "/var/cache/hicache")')
        return os.path.abspath(os.path.expanduser(root))

    @field_validator("capacity")
    @classmethod
    def _holds_something(cls, capacity: int | None) -> int | None:
        if capacity is not None and capacity < MIN_CAPACITY_NBYTES:
            raise ValueError(
                f"capacity={capacity} bytes holds no page; the least is {MIN_CAPACITY_NBYTES} bytes, "
                f'and 16 times the largest page (try "1GiB")'
            )
        return capacity

    @model_validator(mode="after")
    def _reads_or_writes(self) -> FileOptions:
        if self.read_only and self.fsync:
            raise ValueError("read_only and fsync exclude each other: drop one")
        if self.read_only and self.capacity is not None:
            raise ValueError("read_only and capacity exclude each other: a reader sets no budget; drop one")
        return self
