"""The native library: found, imported, its version checked, its codes named.

An import that fails says little ("libibverbs.so.1: cannot open shared object
file"), and the wheels overwrite each other, since all install the package
``mooncake``. So the trouble is told here in the words of what to type.

Source of codes: ``mooncake-store/include/types.h``, and 0.3.13.post1 as met.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Any

from hicache_core import Status
from hicache_core.errors import BackendDependencyMissing, BackendIncompatible
from hicache_mooncake._environment import native_environment

BACKEND = "mooncake"
#: Older versions crash in same-host copies.
LEAST_VERSION = (0, 3, 11)
LEAST_VERSION_TEXT = "0.3.11.post1"
#: Every wheel that installs the package ``mooncake``, and the extra that chooses it.
WHEELS = {
    "mooncake-transfer-engine-non-cuda": "cpu",
    "mooncake-transfer-engine": "cuda12",
    "mooncake-transfer-engine-cuda13": "cuda13",
    "mooncake-transfer-engine-efa": "",
}
EXTRAS = "pip install 'hicache-mooncake[cpu]'  (or [cuda12], [cuda13])"

#: Shared libraries that a wheel links against, and what provides them.
_LIBRARIES = {
    "libibverbs": "Run: apt-get install libibverbs1",
    "libcurl": "Run: apt-get install libcurl4",
    "libnuma": "Run: apt-get install libnuma1",
    "librdmacm": "Run: apt-get install librdmacm1",
    "libmlx5": "Run: apt-get install ibverbs-providers",
    "libcuda": "It comes with a GPU driver. Without a GPU, run: pip uninstall {wheel}; "
    "pip install 'hicache-mooncake[cpu]'",
    "libcudart": "For CUDA {cuda} choose its wheel: pip uninstall {wheel}; "
    "pip install 'hicache-mooncake[cuda{cuda}]'. Without a GPU, take [cpu]",
}
_MISSING = re.compile(r"((lib[A-Za-z0-9_+-]+)\.so[.\d]*): cannot open shared object file")

OBJECT_NOT_FOUND = -704
REPLICA_IS_NOT_READY = -703
INVALID_PARAMS = -600
OBJECT_HAS_LEASE = -706
NO_AVAILABLE_HANDLE = -200
LEASE_EXPIRED = -707
TRANSFER_FAIL = -800
RPC_FAIL = -900
RPC_TIMEOUT = -901

#: What a code says of a page, where nothing better is known.
STATUS_OF_CODE = {
    NO_AVAILABLE_HANDLE: Status.NO_SPACE,
    REPLICA_IS_NOT_READY: Status.MISS,
    OBJECT_NOT_FOUND: Status.MISS,
    OBJECT_HAS_LEASE: Status.TIMEOUT,
    LEASE_EXPIRED: Status.TIMEOUT,
    RPC_FAIL: Status.UNAVAILABLE,
    RPC_TIMEOUT: Status.TIMEOUT,
}
#: Codes that say that the master gave no answer: nothing else is asked in the same call.
NO_ANSWER = frozenset((RPC_FAIL, RPC_TIMEOUT))

_CODE_NAMES = {
    -1: "internal error",
    NO_AVAILABLE_HANDLE: "no segment with room",
    INVALID_PARAMS: "invalid parameters",
    OBJECT_HAS_LEASE: "still being read",
    TRANSFER_FAIL: "transfer failed",
    RPC_FAIL: "the master cannot be reached",
    RPC_TIMEOUT: "the master does not answer",
}

_loaded_by: int | None = None


def load(variables: Mapping[str, str]) -> Any:
    """Import ``mooncake.store`` under these variables and return the module.

    Raises:
        BackendDependencyMissing: no wheel, or a shared library that it links against.
        BackendIncompatible: two wheels, an old one, or a child forked after the import.
    """
    global _loaded_by
    check_wheels()
    if _loaded_by not in (None, os.getpid()):
        raise BackendIncompatible(
            BACKEND,
            "Mooncake cannot be used in the child of a process that had loaded it before the fork",
            remedy="Start such children with multiprocessing's 'spawn' method.",
        )
    loaded = sys.modules.get("mooncake.store")
    if loaded is not None:  # no block of the environment: another one may be held by a setup() that hangs
        _loaded_by = os.getpid()
        return loaded
    try:
        with native_environment(variables):
            # Before mooncake.engine, which any other order of imports breaks.
            module = import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise BackendDependencyMissing(BACKEND, error.name or "mooncake", remedy=f"Run: {EXTRAS}") from error
    except ImportError as error:
        raise missing_library(error) from error
    _loaded_by = os.getpid()
    return module


def missing_library(error: ImportError) -> BackendDependencyMissing:
    """Say which shared library an import lacks, and what provides it."""
    found = _MISSING.search(str(error))
    if not found:
        remedy = f"The wheel does not load: {error}. Install the one for this machine: {EXTRAS}"
        return BackendDependencyMissing(BACKEND, "mooncake.store", remedy=remedy)
    library, stem = found.groups()
    wheel = next(iter(installed_wheels()), "mooncake-transfer-engine")
    cuda = "13" if library.endswith(".13") else "12"
    remedy = _LIBRARIES.get(stem, f"Install what provides {library}, or another wheel: {EXTRAS}")
    return BackendDependencyMissing(BACKEND, library, remedy=remedy.format(wheel=wheel, cuda=cuda))


def installed_wheels() -> dict[str, str]:
    """Give each installed wheel of Mooncake with its version."""
    found = {}
    for name in WHEELS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check_wheels() -> None:
    """Refuse two wheels in one environment, and one that is too old.

    Raises: BackendIncompatible.
    """
    wheels = installed_wheels()
    if len(wheels) > 1:
        raise BackendIncompatible(
            BACKEND,
            "several wheels own the package 'mooncake', and the last one installed overwrote the others",
            value=", ".join(f"{name} {version}" for name, version in wheels.items()),
            remedy=f"Run: pip uninstall {' '.join(wheels)}; then one of: {EXTRAS}",
        )
    for name, version in wheels.items():
        if _numbers(version) < LEAST_VERSION or version in ("0.3.11", "0.3.11.post0"):
            raise BackendIncompatible(
                BACKEND,
                f"{name} is too old: it crashes when both ends are on one machine",
                value=f"{version}, wanted {LEAST_VERSION_TEXT} or newer",
                remedy=f"Run: pip install -U {name}",
            )


def code_text(code: int) -> str:
    """Name a native code for a message."""
    return f"{code} ({_CODE_NAMES[code]})" if code in _CODE_NAMES else str(code)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
