"""Pages shared between machines through a Mooncake store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_mooncake.allocator import MooncakeHostTensorAllocator
    from hicache_mooncake.storage import MooncakeStore

__all__ = ["MooncakeHostTensorAllocator", "MooncakeStore"]

_HOMES = {"MooncakeHostTensorAllocator": "allocator", "MooncakeStore": "storage"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-mooncake")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
