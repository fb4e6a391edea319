"""Memory from MooncakeHostMemAllocator, which a Mooncake daemon on this machine can map.

Source: 0.3.13.post1; alloc(0) raises RuntimeError, and a block is freed by its
address, once.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from hicache_core.errors import BackendUnavailable


def allocate(native: Any, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Allocate a block; it goes back to ``native`` when the array and every view of it are gone.

    Raises: BackendUnavailable.
    """
    try:
        address = int(native.alloc(nbytes) or 0)
    except RuntimeError:
        address = 0
    if not address:
        raise BackendUnavailable(
            "Mooncake could not allocate host memory",
            value=f"{nbytes} bytes",
            remedy="Free memory, or raise this container's limit of shared memory.",
        )
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, _free, native, address).atexit = False
    return memory


def _free(native: Any, address: int) -> None:
    native.free(address)
