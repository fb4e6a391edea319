"""The entry point ``sglang.srt.plugins``: each installed backend as a backend name, ``hicache.<name>``.

SGLang calls ``register`` in every process before it reads its command line. Names
of its own stay as they are; nothing of a backend is imported here. Four small
hooks make a registered name work everywhere: a constructor for it, the command
line's list of choices, and the zero-copy calls after attach, which SGLang picks by
a list of names. Where a release lacks a hook's target, one log line says so, and
``dynamic`` still works.

Source: SGLang 0.5.11 to 0.5.23, ``plugins/``, ``mem_cache/storage/backend_factory.py``,
``server_args.py``, ``managers/cache_controller.py``.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from typing import Any

from hicache_core.registry import registry
from hicache_sglang.settings import PREFIX

_log = logging.getLogger("hicache")

_FACTORY = "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory"
CONSTRUCTOR = f"{_FACTORY}._create_builtin_backend"
CHOICES = "sglang.srt.server_args.ServerArgs.add_cli_args"
ATTACH = "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend"
OPTION = "--hicache-storage-backend"


def register() -> None:
    """Make every installed backend known to SGLang; called by SGLang, takes nothing, gives nothing."""
    factory = _resolved(_FACTORY, "register_backend", "backends are only available as dynamic")
    if factory is None:
        return
    for name in registry.names():
        factory.register_backend(f"{PREFIX}{name}", "hicache_sglang", "HiCacheSGLang")
    _hook(CONSTRUCTOR, "AROUND", create, "backends are only available as dynamic")
    _hook(
        CHOICES, "AFTER", extend_choices, "the command line does not accept their names; attach at run time"
    )
    _hook(ATTACH, "AFTER", use_zero_copy, "pages are copied through the generic calls")


def create(original: Callable[..., Any], cls: Any, backend_name: str, backend_class: Any, *rest: Any) -> Any:
    """Construct ours; AROUND ``_create_builtin_backend``, a class method whose hook gets the class."""
    if not backend_name.startswith(PREFIX):
        return original(cls, backend_name, backend_class, *rest)
    return backend_class.from_plugin(rest[0], backend_name)


def extend_choices(result: Any, parser: Any, *_: Any, **__: Any) -> None:
    """Let the command line accept our names; AFTER ``add_cli_args``."""
    for action in parser._actions:
        if OPTION in action.option_strings and action.choices is not None:
            ours = [f"{PREFIX}{name}" for name in registry.names()]
            action.choices = [*action.choices, *(name for name in ours if name not in action.choices)]


def use_zero_copy(result: Any, controller: Any, *_: Any, **__: Any) -> None:
    """Choose the zero-copy calls for ours; AFTER ``attach_storage_backend``."""
    if str(getattr(controller, "storage_backend_type", "")).startswith(PREFIX):
        controller.page_get_func = controller._page_get_zero_copy
        controller.page_set_func = controller._page_set_zero_copy


def _hook(target: str, kind: str, hook: Callable[..., Any], without: str) -> None:
    path, _, attribute = target.rpartition(".")
    if _resolved(path, attribute, without) is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType[kind])


def _resolved(path: str, attribute: str, without: str) -> Any:
    """Find what a hook hangs on; None, and one log line, where this SGLang has it no more."""
    try:
        found = pkgutil.resolve_name(path)
        getattr(found, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        _log.warning("hicache: this SGLang has no %s.%s (%s): %s", path, attribute, error, without)
        return None
    return found
