"""What `hicache doctor mooncake` looks at besides opening a store: each trouble with its remedy, in seconds.

Nothing here sets the library up: on a wrong address that takes it minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hicache_core import HiCacheError
from hicache_mooncake import _native, _preflight
from hicache_mooncake._admin import Admin
from hicache_mooncake.options import MooncakeOptions

Row = tuple[str, bool | None, str, str]
"""Check, whether it is well (None: a remark), what was found, what to do."""

_SERVERS_S = 5.0
_METRICS_S = 2.0
_MEMINFO = Path("/proc/meminfo")


def diagnose(options: MooncakeOptions) -> Iterator[Row]:
    """Check wheels, protocol, servers, and who gives memory; a failure does not end the list."""
    yield _row("wheel", _wheel)
    yield _row("protocol", lambda: _protocol(options))
    yield _row("memory for the segment", lambda: _segment(options))
    reached = _row("master", lambda: _servers(options))
    yield reached
    if reached[1]:
        yield from _store(options)


def _row(check: str, work: Callable[[], str]) -> Row:
    try:
        return check, True, work(), ""
    except HiCacheError as error:
        return check, False, str(error).removesuffix(error.remedy).strip(), error.remedy


def _wheel() -> str:
    _native.check_wheels()
    wheels = _native.installed_wheels()
    return ", ".join(f"{name} {version}" for name, version in wheels.items()) or "built from source"


def _protocol(options: MooncakeOptions) -> str:
    _preflight.check_device(options)
    return f"{options.protocol}{f' over {options.device}' if options.device else ''}"


def _segment(options: MooncakeOptions) -> str:
    given = 0 if options.daemon else options.segment_size + options.buffer_size
    free = _available_nbytes()
    if free is not None and given > free:
        raise HiCacheError(
            "this machine has less memory free than this process is to give to the store",
            value=f"{given >> 20} MiB wanted, {free >> 20} MiB free",
            remedy="Lower segment_size, or write 0 and let another client give the memory.",
        )
    return f"{options.segment_size >> 20} MiB given" if given else "none given by this process"


def _servers(options: MooncakeOptions) -> str:
    connection, near = _preflight.check_servers(options, time.monotonic() + _SERVERS_S)
    connection.close()
    return f"{options.master} takes connections; this machine is {near} to it"


def _store(options: MooncakeOptions) -> Iterator[Row]:
    admin = Admin(options.metrics_address, _METRICS_S, options.tenant)
    try:
        segments = admin.segments()
    except HiCacheError as error:
        yield (
            "metrics",
            None,
            f"{error.what}: {error.value}; usage() will not work, nor clear() on pages asked for lately",
            error.remedy,
        )
        return
    if segments or options.segment_size or options.daemon:
        yield "segments", True, f"{len(segments)} in the store before this process", ""
    else:
        remedy = "Give some: segment_size='4GiB' here, or start mooncake_client on a machine with memory."
        yield "segments", False, "nobody gives memory to the store", remedy


def _available_nbytes() -> int | None:
    for line in _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
