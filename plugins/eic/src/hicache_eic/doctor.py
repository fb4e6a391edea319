"""What `hicache doctor eic` looks at besides opening a store: each trouble with its remedy."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

from hicache_core.errors import HiCacheError
from hicache_eic.affinity import near_interfaces
from hicache_eic.native import load
from hicache_eic.options import EicOptions
from hicache_eic.yaml_settings import YAML_VARIABLE

Row = tuple[str, "bool | None", str, str]
"""Check, whether it is well (None: a remark), what was found, what to do."""

_CONNECT_S = 3.0


def checks(options: EicOptions) -> Iterator[Row]:
    """Check the module, the address, the network interfaces, and what each restricts."""
    yield _row("eic module", lambda: _module(options))
    yield _row("address", lambda: _address(options))
    if options.nic_affinity:
        yield _row("network interfaces", lambda: _interfaces(options))
    yaml = options.yaml or os.environ.get(YAML_VARIABLE, "")
    if yaml:
        yield "settings", None, f"what is not set otherwise comes from {yaml}", ""


def _row(check: str, work: Callable[[], str]) -> Row:
    try:
        return check, True, work(), ""
    except HiCacheError as error:
        return check, False, str(error).removesuffix(error.remedy).strip(), error.remedy


def _module(options: EicOptions) -> str:
    module = load(options)
    if getattr(module, "SIMULATOR", False):
        return f"{options.module}, a simulator and no EIC"
    return f"{options.module}, {getattr(module, '__file__', 'built in')}"


def _address(options: EicOptions) -> str:
    host, _, port = options.endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise HiCacheError(
            f"nothing listens at {options.endpoint}",
            value=str(error),
            remedy="Start the service, or correct url (remote_url).",
        ) from error
    return f"{options.endpoint} accepts connections"


def _interfaces(options: EicOptions) -> str:
    tables = (options.gpu_nics, options.cpu_nics)
    devices = sorted({*options.gpu_nics, *options.cpu_nics}) or ["cpu"]
    known = {name for name in os.listdir("/sys/class/net")} if os.path.isdir("/sys/class/net") else set()
    found = []
    for device in devices:
        names = near_interfaces(device, *tables)
        absent = [name for name in names.split(",") if name and name not in known]
        if absent:
            raise HiCacheError(
                f"'{device}' is to use interface '{absent[0]}', which this machine does not have",
                value=f"it has {', '.join(sorted(known))}",
                remedy="Correct gpu_nics and cpu_nics.",
            )
        found.append(f"{device}: {names or 'any'}")
    return "; ".join(found)
