"""MooncakeHostTensorAllocator: host tensors in memory that a Mooncake daemon on this machine can map.

With the option ``daemon`` the memory of a pool must be shared with that process,
and only memory from MooncakeHostMemAllocator is. Without it, this is memory like
any other. The one module that imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hicache_core import InvalidArgument
from hicache_mooncake import _hostmem
from hicache_mooncake._native import load


class MooncakeHostTensorAllocator:
    """Allocates tensors; each keeps its memory, and that keeps the native allocator, while it is used."""

    def __init__(self) -> None:
        self._native = load({}).MooncakeHostMemAllocator()

    def allocate(self, dims: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        """Allocate an uninitialised tensor of this shape.

        Its memory is freed once, when the tensor and every view of it are gone.

        Raises:
            InvalidArgument: no element, or a device other than the CPU.
            BackendUnavailable: there is not as much memory.
        """
        shape = tuple(dims)
        count = math.prod(shape)
        if count < 1 or min(shape, default=1) < 1 or torch.device(device).type != "cpu":
            raise InvalidArgument(
                "a host tensor cannot be allocated so",
                value=f"shape {shape} on '{device}'",
                remedy="Give a shape with at least one element, on 'cpu'.",
            )
        nbytes = count * torch.empty((), dtype=dtype).element_size()
        memory = _hostmem.allocate(self._native, nbytes)
        return torch.frombuffer(memory, dtype=dtype, count=count).reshape(shape)
