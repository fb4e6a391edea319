"""Hearing of what vLLM does not tell a tier: weights that are replaced under a running engine.

``EngineCore.collective_rpc`` runs a method, or any function, on the workers; that is
how weights are updated (RL), reloaded, or edited. vLLM forgets its own two levels
of cache when it is asked to and goes on finding the old weights' pages in a
secondary tier. What a call does cannot be known, so only those that are known to
leave the weights alone pass unnoticed: before any other, listeners are told.

Source: vLLM 0.24 to 0.33, ``v1/engine/core.py``, ``v1/worker/worker_base.py``.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Protocol

ENGINE = ("vllm.v1.engine.core", "EngineCore")
METHOD = "collective_rpc"
#: Methods of the workers that leave the weights as they are.
HARMLESS = frozenset(
    {
        "add_lora",
        "check_health",
        "list_loras",
        "pin_lora",
        "profile",
        "remove_lora",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "sleep",
        "wake_up",
    }
)
HARMLESS_PREFIXES = ("get_", "is_", "report_")

_MARK = "_hicache_watched"


class Listener(Protocol):
    """Told on the engine's thread; may not raise."""

    def weights_changing(self, what: str) -> None:
        """The workers are about to run ``what``, which may replace weights."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(listener: Listener) -> bool:
    """Tell a listener from here on, while it lives; False where this process has no engine to hear."""
    engine = getattr(sys.modules.get(ENGINE[0]), ENGINE[1], None)
    if engine is None or not hasattr(engine, METHOD):
        return False
    _watch(engine)
    _listeners.add(listener)
    return True


def forget(listener: Listener) -> None:
    """Tell a listener no more."""
    _listeners.discard(listener)


def may_change_weights(method: Any) -> str:
    """Name a call that may replace weights; empty for one that is known not to."""
    if not isinstance(method, str):
        return f"a function ({getattr(method, '__name__', type(method).__name__)})"
    return "" if method in HARMLESS or method.startswith(HARMLESS_PREFIXES) else method


def _watch(engine: Any) -> None:
    original = getattr(engine, METHOD)
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *arguments: Any, **named: Any) -> Any:
        what = may_change_weights(method)
        if what:
            for listener in list(_listeners):
                listener.weights_changing(what)
        return original(self, method, *arguments, **named)

    setattr(collective_rpc, _MARK, True)
    setattr(engine, METHOD, collective_rpc)
