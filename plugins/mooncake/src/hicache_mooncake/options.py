"""Options of the Mooncake backend.

Where values come from: arguments, then ``HICACHE_MOONCAKE_<FIELD>``, then the
file named by HICACHE_CONFIG, then the defaults below. A complete TOML example::

    [mooncake]
    master = "10.0.0.5:50051"
    protocol = "rdma"
    device = "mlx5_0,mlx5_1"
    segment_size = "16GiB"
    replicas = 2

    [mooncake.extra]
    enable_ssd_offload = true
    ssd_offload_path = "/var/mooncake"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from hicache_core.options import Options, Size

#: The port on which mooncake_master answers calls unless told otherwise.
MASTER_PORT = 50051
#: The port of its HTTP metrics.
METRICS_PORT = 9003
#: Metadata kept by the clients themselves, without a server.
P2P_HANDSHAKE = "P2PHANDSHAKE"
#: The allocator's unit: setup() refuses a smaller segment with -600 (0.3.13.post1).
LEAST_SEGMENT_NBYTES = 16 << 20
#: Mooncake's own default of 16 MiB; it stages what cannot go straight.
DEFAULT_BUFFER_NBYTES = 16 << 20

_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)"
_ADDRESS = re.compile(rf"{_HOST}:\d{{1,5}}")
_HOST_ONLY = re.compile(_HOST)
_METADATA = re.compile(
    rf"(?:(?:http|https)://{_HOST}(?::\d{{1,5}})?/\S+|etcd://{_HOST}:\d{{1,5}}(?:[;,]{_HOST}:\d{{1,5}})*)"
)
#: What this backend says itself, so that `extra` cannot contradict it.
_OWN_SETUP = frozenset(
    [
        "local_hostname",
        "metadata_server",
        "global_segment_size",
        "local_buffer_size",
        "protocol",
        "rdma_devices",
        "master_server_addr",
        "tenant_id",
        "engine",
    ]
)
_EXTRA_NAME = re.compile(r"MC_[A-Z0-9_]+|[a-z][a-z0-9_]*")


class MooncakeOptions(Options):
    """Where the master is, what this process gives to the store, and how pages are kept."""

    master: str = Field(
        description="Address of mooncake_master, HOST:PORT; the port may be left out (50051).",
    )
    metadata_server: str = Field(
        default=P2P_HANDSHAKE,
        description="P2PHANDSHAKE (none needed), http://HOST:PORT/metadata (the master's own), or etcd://HOST:PORT.",
    )
    metrics: str = Field(
        default="",
        description="Address of the master's HTTP metrics, HOST:PORT, for usage() and clear(); "
        "by default port 9003 on the master's host.",
    )
    protocol: Literal["tcp", "rdma"] = Field(default="tcp", description="How pages travel.")
    device: str = Field(
        default="",
        description="RDMA devices, comma-separated, for example mlx5_0; empty lets Mooncake choose.",
    )
    hostname: str = Field(
        default="",
        description="This machine's address as other clients reach it; "
        "by default the one from which the master is reached.",
    )
    segment_size: Size = Field(
        default=4 << 30,
        ge=0,
        description="Memory that this process gives to the store; 0 gives none; its pages end with it.",
    )
    buffer_size: Size = Field(
        default=DEFAULT_BUFFER_NBYTES, ge=0, description="Mooncake's private transfer buffer in this process."
    )
    daemon: str = Field(
        default="",
        description="Address of a mooncake_client on this machine, HOST:PORT, which then holds the memory; "
        "pools must come from MooncakeHostTensorAllocator.",
    )
    replicas: int = Field(default=1, ge=1, le=16, description="Copies of each page, on different segments.")
    preferred_segment: str = Field(
        default="",
        description='Segment that new pages go to first, HOST:PORT; "local" is the one this process gives.',
    )
    soft_pin: bool = Field(default=False, description="Pages are evicted only when nothing unpinned is left.")
    hard_pin: bool = Field(default=False, description="Pages are never evicted; a full store says NO_SPACE.")
    tenant: str = Field(
        default="default",
        min_length=1,
        description="Mooncake tenant, where the master knows several; only the default one's pages can be "
        "listed, which usage() and clear() need.",
    )
    checksum: bool = Field(
        default=False,
        description="Store 16 bytes more with each page and verify them on every get. "
        "Pages with and without are apart.",
    )
    connection_pool: bool = Field(default=True, description="Keep TCP connections to other clients open.")
    rpc_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Seconds that one question to the master may take; by default two fifths of timeout_s.",
    )
    log_level: Literal["info", "warning", "error"] = Field(
        default="error", description="What the native library writes to standard error."
    )
    extra: Mapping[str, Any] = Field(
        default_factory=dict,
        description="Passed through: arguments of MooncakeDistributedStore.setup(), and MC_* variables.",
    )

    @field_validator("master", "metrics", "daemon", mode="after")
    @classmethod
    def _address(cls, value: str, info: Any) -> str:
        if info.field_name == "master" and value and _HOST_ONLY.fullmatch(value):
            value = f"{value}:{MASTER_PORT}"
        if (value or info.field_name == "master") and not _is_address(value):
            raise ValueError(f"{value!r} is not an address (write HOST:PORT)")
        return value

    @field_validator("metadata_server", mode="after")
    @classmethod
    def _metadata(cls, value: str) -> str:
        if value != P2P_HANDSHAKE and not _METADATA.fullmatch(value):
            # A redis:// address aborts the process, garbage hangs for minutes (0.3.13.post1).
            raise ValueError(
                f"{value!r} is not one this backend can use "
                "(write P2PHANDSHAKE, http://HOST:PORT/metadata or etcd://HOST:PORT)"
            )
        return value

    @field_validator("hostname", mode="after")
    @classmethod
    def _hostname(cls, value: str) -> str:
        if value and not (_HOST_ONLY.fullmatch(value) or _is_address(value)):
            raise ValueError(
                f"hostname={value!r} is not a host (write a name or an address, without a scheme)"
            )
        return value

    @field_validator("segment_size", mode="after")
    @classmethod
    def _segment(cls, value: int) -> int:
        if 0 < value < LEAST_SEGMENT_NBYTES:
            raise ValueError(f"{value} bytes are too few for Mooncake (write 0, or 16MiB and more)")
        return value

    @field_validator("extra", mode="after")
    @classmethod
    def _extra(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        own = sorted(_OWN_SETUP & set(value))
        if own:
            raise ValueError(f"it may not hold {', '.join(own)}: use the option of that purpose")
        odd = [name for name in value if not _EXTRA_NAME.fullmatch(name)]
        if odd:
            raise ValueError(f"{odd[0]!r} is neither an argument of setup() nor an MC_ variable")
        return value

    @model_validator(mode="after")
    def _together(self) -> MooncakeOptions:
        if self.device and self.protocol != "rdma":
            raise ValueError(f"device={self.device!r} needs protocol='rdma'")
        if self.soft_pin and self.hard_pin:
            raise ValueError("soft_pin and hard_pin exclude each other")
        if self.daemon and self.checksum:
            # A daemon takes a page's buffers from one block of memory; a trailer lies in another.
            raise ValueError("checksum cannot be had with daemon")
        if self.daemon and self.preferred_segment == "local":
            raise ValueError("preferred_segment='local' needs a segment of this process; daemon gives none")
        return self

    @property
    def metrics_address(self) -> str:
        """Where the master's HTTP metrics are."""
        return self.metrics or f"{self.master.rpartition(':')[0]}:{METRICS_PORT}"


def split_address(address: str) -> tuple[str, int]:
    """Split a validated ``HOST:PORT``, brackets of IPv6 removed."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _is_address(value: str) -> bool:
    return bool(_ADDRESS.fullmatch(value)) and 0 < int(value.rpartition(":")[2]) < 65536
