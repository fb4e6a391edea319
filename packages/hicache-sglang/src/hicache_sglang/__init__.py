"""The adapter between SGLang's hierarchical cache and any hicache backend.

SGLang names it by module and class: ``{"module_path": "hicache_sglang",
"class_name": "HiCacheSGLang", ...}``. The class derives from SGLang's own, so it is
imported on first use: this package itself imports neither SGLang nor torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["HiCacheSGLang"]


def __getattr__(name: str) -> Any:
    if name == "HiCacheSGLang":
        from hicache_sglang.adapter import HiCacheSGLang

        return HiCacheSGLang
    if name == "__version__":
        from importlib.metadata import version

        return version("hicache-sglang")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
