"""A dictionary as a backend, with misbehaviour on demand; for tests in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hicache_core import BackendSpec, Capabilities, HiCacheStorage, Pages, Status, Usage
from hicache_core.options import Options

#: Namespace and key to bytes; one for the process, like a server that outlives its clients.
STORE: dict[str, bytes] = {}
#: What a verb does before its work, by verb; may wait or raise.
BEFORE: dict[str, Callable[[], None]] = {}
#: The verbs that ran, with how many keys.
CALLS: list[tuple[str, int]] = []


class ToyOptions(Options):
    hang_s: float = 30.0


class ToyStore(HiCacheStorage):
    spec = BackendSpec(
        name="toy",
        api=1,
        target="vllm_toy:ToyStore",
        options="vllm_toy:ToyOptions",
        capabilities=Capabilities(shared=True, checksum=True, deadline="hold"),
    )

    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        with self._gate:
            self._begin("contains", keys)
            return [Status.OK if self._name(key) in STORE else Status.MISS for key in keys]

    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        self._check(keys, locs, writes_slots=True)
        with self._gate:
            self._begin("get", keys)
            return [self._read(key, locs.views(i)[0]) for i, key in enumerate(keys)]

    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        self._check(keys, locs)
        with self._gate:
            self._begin("set", keys)
            for i, key in enumerate(keys):
                STORE.setdefault(self._name(key), bytes(locs.views(i)[0]))
            return [Status.OK] * len(keys)

    def usage(self) -> Usage:
        return Usage(len(STORE), sum(map(len, STORE.values())), 0, None)

    def _read(self, key: str, view: memoryview) -> Status:
        value = STORE.get(self._name(key))
        if value is None:
            return Status.MISS
        if not value:
            view[:] = bytes(len(view))
            return Status.CORRUPT
        view[:] = value
        return Status.OK

    def _name(self, key: str) -> str:
        return self.config.namespace.qualify(key)

    def _begin(self, verb: str, keys: Sequence[str]) -> None:
        CALLS.append((verb, len(keys)))
        BEFORE.get(verb, lambda: None)()


def hang(event: threading.Event) -> Callable[[], None]:
    """Make something that waits for an event, at most 30 s."""
    return lambda: event.wait(30) and None
