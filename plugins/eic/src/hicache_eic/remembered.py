"""Keys that are remembered for a while, such as those on which a get has failed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from hicache_core.status import OK, Status

#: The latest are kept.
MAX_REMEMBERED = 65_536


class Remembered:
    """A bounded set of keys, the latest kept; thread-safe."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, keys: set[str]) -> None:
        """Remember keys."""
        if keys:
            with self._lock:
                self._keys.update(dict.fromkeys(keys))
                while len(self._keys) > MAX_REMEMBERED:
                    self._keys.popitem(last=False)

    def note(self, keys: Sequence[str], statuses: Sequence[Status], wanted: Sequence[Status]) -> None:
        """Remember keys with one of these statuses, forget those that are OK."""
        self.add({key for key, status in zip(keys, statuses, strict=True) if status in wanted})
        if self._keys:
            with self._lock:
                for key, status in zip(keys, statuses, strict=True):
                    if status is OK:
                        self._keys.pop(key, None)
