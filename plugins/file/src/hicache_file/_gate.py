"""A gate whose last verb gives everything back, when close() could not wait for it (C12)."""

from __future__ import annotations

from collections.abc import Callable

from hicache_core.lifecycle import VerbGate


class ReleasingGate(VerbGate):
    """Calls ``release`` when the last verb leaves a gate that is shut; it may be called more than once."""

    __slots__ = ("_release",)

    def __init__(self, name: str, release: Callable[[], None]) -> None:
        super().__init__(name)
        self._release = release

    def leave(self) -> None:
        super().leave()
        if self.is_closed and not self.running:
            self._release()
