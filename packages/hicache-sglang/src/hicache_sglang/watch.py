"""Hearing of what SGLang does not tell a storage: new weights, new adapters, a flushed cache.

``update_weights_*`` replaces the weights and flushes the device and host caches,
and goes on serving the old weights' pages from storage. The methods that do the
replacing are wrapped once a process, on their classes, so that whoever holds an
instance goes through the wrapper. From the first touch of the weights until the
next flush of the host cache a listener must neither store nor serve pages: the
ones in the host cache are of the old weights. After the flush it starts anew.

The targets are data; a test looks each one up in the real wheels.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

_log = logging.getLogger("hicache")

#: Where the weights are replaced: 0.5.20 and later, then 0.5.5 to 0.5.15.
WEIGHT_CLASSES = (
    ("sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater"),
    ("sglang.srt.model_executor.model_runner", "ModelRunner"),
)
FROM_DISK = "update_weights_from_disk"
FROM_ELSEWHERE = (
    "update_weights_from_distributed",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
ADAPTER_CLASS = ("sglang.srt.model_executor.model_runner", "ModelRunner")
ADAPTER_METHODS = ("load_lora_adapter", "load_lora_adapter_from_tensors")
#: Every tree's reset, and so every flush, ends in this one.
FLUSH_CLASS = ("sglang.srt.managers.cache_controller", "HiCacheController")
FLUSH_METHOD = "reset"

_MARK = "_hicache_watched"


class Listener(Protocol):
    """Told on the scheduler's thread; none of these may raise."""

    def weights_changing(self) -> None:
        """The weights are about to be replaced."""

    def weights_changed(self, model_path: str | None) -> None:
        """They were, from this path; None where they came from elsewhere or the update failed."""

    def adapter_loaded(self, name: str, path: str | None) -> None:
        """A LoRA adapter was loaded; None where its weights came as tensors."""

    def cache_flushed(self) -> None:
        """The device and host caches are empty."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_installed: dict[str, bool] = {}


def listen(listener: Listener) -> list[str]:
    """Tell a listener from here on, while it lives; return what cannot be heard in this process.

    Nothing is imported for it: outside of a scheduler process there is nothing to hear.
    """
    _listeners.add(listener)
    return [what for what, install in _INSTALLERS.items() if not _install_once(what, install)]


def forget(listener: Listener) -> None:
    """Tell a listener no more."""
    _listeners.discard(listener)


def _install_once(what: str, install: Callable[[], bool]) -> bool:
    if not _installed.get(what):
        _installed[what] = install()
    return _installed[what]


def _watch_weights() -> bool:
    heard = False
    for module_name, class_name in WEIGHT_CLASSES:
        found = _loaded_class(module_name, class_name)
        if found is None:
            continue
        heard |= _wrap(found, FROM_DISK, _around_disk)
        for method in FROM_ELSEWHERE:
            heard |= _wrap(found, method, _around_elsewhere)
    return heard


def _watch_adapters() -> bool:
    found = _loaded_class(*ADAPTER_CLASS)
    return found is not None and any([_wrap(found, method, _after_adapter) for method in ADAPTER_METHODS])


def _watch_flush() -> bool:
    found = _loaded_class(*FLUSH_CLASS)
    return found is not None and _wrap(found, FLUSH_METHOD, _after_flush)


_INSTALLERS: dict[str, Callable[[], bool]] = {
    "weight updates": _watch_weights,
    "LoRA adapters loaded while running": _watch_adapters,
    "cache flushes": _watch_flush,
}


def _loaded_class(module_name: str, class_name: str) -> Any:
    return getattr(sys.modules.get(module_name), class_name, None)


def _wrap(owner: Any, method: str, make: Callable[[Any], Any]) -> bool:
    original = owner.__dict__.get(method)
    if original is None:
        return False
    if not getattr(original, _MARK, False):
        wrapper = functools.wraps(original)(make(original))
        setattr(wrapper, _MARK, True)
        setattr(owner, method, wrapper)
    return True


def _around_disk(original: Any) -> Any:
    def update(self: Any, model_path: str, *args: Any, **kwargs: Any) -> Any:
        _tell("weights_changing")
        path: str | None = None
        try:
            result = original(self, model_path, *args, **kwargs)
            path = model_path if _succeeded(result) else None
            return result
        finally:
            _tell("weights_changed", path)

    return update


def _around_elsewhere(original: Any) -> Any:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        _tell("weights_changing")
        try:
            return original(self, *args, **kwargs)
        finally:
            _tell("weights_changed", None)

    return update


def _after_adapter(original: Any) -> Any:
    def load(self: Any, lora_ref: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, lora_ref, *args, **kwargs)
        path = getattr(lora_ref, "lora_path", None) if not args and not kwargs else None
        _tell("adapter_loaded", str(getattr(lora_ref, "lora_name", lora_ref)), path)
        return result

    return load


def _after_flush(original: Any) -> Any:
    def reset(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        _tell("cache_flushed")
        return result

    return reset


def _succeeded(result: Any) -> bool:
    return bool(result[0]) if isinstance(result, tuple) and result else bool(result)


def _tell(what: str, *arguments: Any) -> None:
    for listener in list(_listeners):
        try:
            getattr(listener, what)(*arguments)
        except Exception:  # the engine's own call must go on # noqa: BLE001
            _log.exception("hicache: %s failed", what)
