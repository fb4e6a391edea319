"""The hooks that observers implement, as pluggy knows them.

An observer is any object (or module) with functions marked by ``hookimpl`` and
named as below. This module imports pluggy, so it is imported only where there
is an observer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

from hicache_core.notices import described, log_warning

if TYPE_CHECKING:
    from hicache_core.cache import HiCache
    from hicache_core.observers import OperationEvent
    from hicache_core.storage import HiCacheStorage

PROJECT = "hicache"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class ObserverSpecs:
    """What happens that an observer may want to know; results are ignored."""

    @hookspec
    def hicache_started(self, cache: HiCache) -> None:
        """A HiCache is there; its storage may still have to be reached. Keep a weak reference at most."""

    @hookspec
    def hicache_ended(self, cache: HiCache) -> None:
        """A HiCache is closed; a second close tells it again."""

    @hookspec
    def hicache_opened(self, storage: HiCacheStorage) -> None:
        """A storage is open."""

    @hookspec
    def hicache_operation(self, event: OperationEvent) -> None:
        """A call of HiCache has finished; runs on the caller's thread, so be quick."""

    @hookspec
    def hicache_closed(self, storage: HiCacheStorage) -> None:
        """A storage is closed."""


class Hub:
    """All observers of the process; one that raises is reported and left out from then on."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(ObserverSpecs)

    def add(self, observer: object) -> None:
        """Register an observer; the same one twice is one.

        Raises:
            pluggy.PluginValidationError: a hook takes what no hook is given.
        """
        if not self._manager.is_registered(observer):
            self._manager.register(observer)

    def remove(self, observer: object) -> None:
        """Forget an observer; an unknown one is ignored."""
        if self._manager.is_registered(observer):
            self._manager.unregister(observer)

    @property
    def empty(self) -> bool:
        """True without observers."""
        return not self._manager.get_plugins()

    def tell(self, hook: str, **arguments: Any) -> None:
        """Call one hook of every observer; never raises."""
        for implementation in reversed(getattr(self._manager.hook, hook).get_hookimpls()):
            try:
                implementation.function(*[arguments[name] for name in implementation.argnames])
            except Exception as error:  # noqa: BLE001 - an observer must not reach into a call
                name = implementation.plugin_name
                log_warning("observer %r left out: %s raised %s", name, hook, described(error))
                self.remove(implementation.plugin)
