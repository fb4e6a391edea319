"""The entry point ``vllm.general_plugins``: the tier type ``hicache``.

vLLM calls ``register`` in every process, sometimes more than once, before an engine
is made. It names the class without importing it, and has vLLM's connector factory
remember the configuration of the engine that it makes a connector for: from 0.28
on a tier is told too little of it to know what its pages mean.

Source: vLLM 0.24 to 0.33, ``plugins/``, ``v1/kv_offload/tiering/factory.py``,
``distributed/kv_transfer/kv_connector/factory.py``.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
import sys
import weakref
from typing import Any

_log = logging.getLogger("hicache")

TIER = "hicache"
TIER_FACTORY = "vllm.v1.kv_offload.tiering.factory.SecondaryTierFactory"
CONNECTOR_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory"

_MARK = "_hicache_remembers"
#: The engine's configuration by its KV-transfer engine id, which is the replica's own under data parallelism.
_configs: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def register() -> None:
    """Make the tier type known to vLLM; called by vLLM, takes nothing, gives nothing."""
    tiers, connectors = _found(TIER_FACTORY), _found(CONNECTOR_FACTORY)
    if tiers is None or connectors is None:
        _log.warning("hicache: this vLLM has no %s; 0.24 to 0.33 have it", TIER_FACTORY)
        return
    try:
        tiers.register_tier(TIER, "hicache_vllm.tier", "HiCacheTier")
    except ValueError:
        pass  # known already: plugins may be loaded again in one process
    _remember_configs(connectors)


def config_of(spec: Any) -> Any:
    """Find the VllmConfig behind an offloading spec; None where nothing tells.

    0.24 hands it over; later the connector factory's hook has seen it.
    """
    own = getattr(spec, "vllm_config", None)
    if own is not None:
        return own
    found = _configs.get(getattr(getattr(spec, "config", None), "engine_id", None) or "")
    if found is not None:
        return found
    current = getattr(sys.modules.get("vllm.config"), "get_current_vllm_config_or_none", None)
    return current() if current is not None else None


def _remember_configs(factory: Any) -> None:
    original = factory.create_connector.__func__
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def create_connector(cls: Any, *arguments: Any, **named: Any) -> Any:
        config = arguments[0] if arguments else named.get("config")
        engine_id = getattr(getattr(config, "kv_transfer_config", None), "engine_id", None)
        if engine_id:
            _configs[engine_id] = config
        return original(cls, *arguments, **named)

    setattr(create_connector, _MARK, True)
    factory.create_connector = classmethod(create_connector)


def _found(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None
