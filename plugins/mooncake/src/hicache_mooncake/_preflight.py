"""What is checked before the library is set up, because it would crash, hang or lie instead.

A dead master costs it 90 s, an unknown metadata server two minutes, and `rdma`
without a device is served over TCP without a word.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from hicache_core import BackendUnavailable
from hicache_core.errors import HiCacheError, InvalidOptions
from hicache_mooncake._native import BACKEND, code_text
from hicache_mooncake.options import P2P_HANDSHAKE, MooncakeOptions, split_address

INFINIBAND = Path("/sys/class/infiniband")
#: Longest for one connection: a port that swallows packets must leave time for the message.
_CONNECT_S = 3.0


def check_device(options: MooncakeOptions) -> None:
    """Refuse `rdma` where no adapter, or not the named one, is in the machine.

    Raises: InvalidOptions.
    """
    if options.protocol != "rdma":
        return
    try:
        present = sorted(os.listdir(INFINIBAND))
    except FileNotFoundError:
        present = []
    wanted = [name.strip() for name in options.device.split(",") if name.strip()]
    absent = [name for name in wanted if name not in present]
    if present and not absent:
        return
    if not present:
        complaint = "protocol='rdma': this machine has no RDMA device (write protocol='tcp')"
        raise InvalidOptions(BACKEND, [("protocol", complaint, "")])
    complaint = f"device={', '.join(absent)!r} is not in this machine (there are: {', '.join(present)})"
    raise InvalidOptions(BACKEND, [("device", complaint, "")])


def check_servers(options: MooncakeOptions, deadline: float) -> tuple[socket.socket, str]:
    """Connect to whatever setup() will need.

    Returns: the connection to the server that calls go to, which stays open, and the
        address by which others reach this machine.

    Raises: BackendUnavailable, naming the server and what to start.
    """
    if not options.daemon and options.metadata_server != P2P_HANDSHAKE:
        _connect(
            _metadata_address(options.metadata_server),
            deadline,
            f"metadata server {options.metadata_server}",
            "Start it (mooncake_master --enable_http_metadata_server=true has one), or use P2PHANDSHAKE.",
        ).close()
    connection = _connect(
        options.master,
        deadline,
        f"master {options.master}",
        "Start mooncake_master there, or correct the option master.",
    )
    near = str(connection.getsockname()[0])
    if options.daemon:
        connection.close()
        connection = _connect(
            options.daemon,
            deadline,
            f"daemon {options.daemon}",
            "Start mooncake_client on this machine, or correct the option daemon.",
        )
    return connection, options.hostname or near


def setup_failure(options: MooncakeOptions, code: int) -> HiCacheError:
    """Explain a code of setup()."""
    if code in (-900, -901, -1):
        remedy = (
            f"What listens on {options.master} may not be a mooncake_master, or one of another version. "
            "Compare the option master with its --rpc_port."
        )
    elif code == -600:
        remedy = "Raise segment_size (16MiB at least, or 0), and check hostname and metadata_server."
    else:
        remedy = "Run: hicache doctor mooncake, with log_level='info' for the library's own words."
    return BackendUnavailable(
        f"opening 'mooncake': setting up a client of master {options.master} failed",
        value=code_text(code),
        remedy=remedy,
    )


def _connect(address: str, deadline: float, what: str, remedy: str) -> socket.socket:
    host, port = split_address(address)
    timeout_s = max(0.05, min(_CONNECT_S, deadline - time.monotonic()))
    try:
        return socket.create_connection((host, port), timeout_s)
    except TimeoutError as error:
        raise _silent(what, f"no answer within {timeout_s:.1f} s", remedy) from error
    except OSError as error:
        raise _silent(what, error.strerror or str(error), remedy) from error


def _silent(what: str, value: str, remedy: str) -> BackendUnavailable:
    return BackendUnavailable(f"opening 'mooncake': {what} cannot be reached", value=value, remedy=remedy)


def _metadata_address(server: str) -> str:
    first = server.replace(";", ",").partition(",")[0]
    parts = urlsplit(first)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 2379)
    return f"[{parts.hostname}]:{port}" if ":" in (parts.hostname or "") else f"{parts.hostname}:{port}"
