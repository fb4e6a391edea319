"""What a tier asks of this process' vLLM as a whole: its release, its platform, its seed."""

from __future__ import annotations

import platform
import sys

from hicache_vllm.identity import SEED_CONSTANT


def version() -> str:
    """Give vLLM's version, whatever its distribution is called."""
    import vllm

    return str(vllm.__version__)


def platform_name() -> str:
    """Name the kind of device by which vLLM chooses attention backends and layouts, such as ``cuda:9.0``."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if kind == "cpu":
        return f"cpu:{platform.machine()}"
    try:
        capability = current_platform.get_device_capability()
    except Exception:  # noqa: BLE001 - drivers raise what they like; without a capability the kind must do
        capability = None
    return kind if capability is None else f"{kind}:{capability.major}.{capability.minor}"


def hash_seed_constant() -> str | None:
    """Give the seed that this release hashes with where none is set; None where that is random."""
    module = sys.modules.get("vllm.v1.core.kv_cache_utils")
    constant = getattr(module, SEED_CONSTANT, None)
    return None if constant is None else str(constant)
