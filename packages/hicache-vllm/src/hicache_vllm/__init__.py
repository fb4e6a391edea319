"""Any hicache backend as a secondary tier of vLLM's KV offloading.

vLLM loads ``plugin`` by its entry point and makes ``HiCacheTier`` from the tier type
``hicache``. The class derives from vLLM's own, so it is imported on first use: this
package itself imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["HiCacheTier"]


def __getattr__(name: str) -> Any:
    if name == "HiCacheTier":
        from hicache_vllm.tier import HiCacheTier

        return HiCacheTier
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-vllm")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
