"""Site and Bench: the store that a run has brought up, and what one test works with.

A Site lives as long as the run: one harness, one server. A Bench lives for one
test: it opens storages and closes them, gives each test namespaces of its own,
and puts the site back in order after a test that broke it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hicache_conformance.builders import LAYOUTS, ONE_SEGMENT, Arena, Layout, page_bytes, page_hash
from hicache_conformance.calls import PATIENCE_S, Call
from hicache_conformance.harness import Damage, Harness
from hicache_conformance.peer import Peer
from hicache_conformance.subject import Subject
from hicache_core import (
    Capabilities,
    Component,
    HiCacheStorage,
    HiCacheStorageConfig,
    Identity,
    Namespace,
    Pages,
    Placement,
    Status,
)
from hicache_core.factory import open_storage

__all__ = ["LAYOUTS", "ONE_SEGMENT", "Bench", "Site"]

#: Bytes of a page where its size does not matter.
PAGE_NBYTES = 4096


class Site:
    """A subject, its harness, and what a storage on it declares once it is open."""

    def __init__(
        self,
        subject: Subject,
        given: Mapping[str, Any],
        seed: int,
        slack_s: float = 2.0,
        recovery_s: float = PATIENCE_S,
    ) -> None:
        self.subject = subject
        self.seed = seed
        self.slack_s = slack_s
        self.recovery_s = recovery_s
        self.harness: Harness = subject.harness(given)
        self.tests = 0
        self.environment: dict[str, str] = {}
        self._capabilities: Capabilities | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What an opened storage declares; opens one the first time."""
        if self._capabilities is None:
            identity = Identity.for_tests(tenant=f"capabilities-{self.seed}")
            storage = self.create(identity, Placement(), PATIENCE_S, self.harness.options())
            open_storage(storage, ())
            self._capabilities = storage.capabilities
            storage.close()
        return self._capabilities

    def capabilities_json(self) -> dict[str, Any]:
        """Give them as JSON values."""
        return dataclasses.asdict(self.capabilities)

    def create(
        self, identity: Identity, placement: Placement, timeout_s: float, options: Mapping[str, Any]
    ) -> HiCacheStorage:
        """Build a storage, unopened."""
        config = HiCacheStorageConfig(
            namespace=Namespace.of(identity), identity=identity, placement=placement, timeout_s=timeout_s
        )
        return self.subject.create(config, options)

    def start(self) -> None:
        """Bring the store up."""
        self.harness.start()
        #: As it is before any storage was opened here, which may have changed it.
        self.environment = self.environment or dict(os.environ)

    def stop(self) -> None:
        """Take it down."""
        self.harness.stop()


class Bench:
    """One test's workplace; everything it opened is closed after the test.

    ``options`` are those of the harness, until ``bounded`` replaces them.
    """

    def __init__(self, site: Site) -> None:
        site.tests += 1
        self.site = site
        self.seed = site.seed
        self.harness = site.harness
        self.capabilities = site.capabilities
        self.options = site.harness.options()
        self.identity = Identity.for_tests(tenant=f"test-{site.seed}-{site.tests}")
        self._cleanup = contextlib.ExitStack()
        self._disturbed = False
        self._rebuild = False

    # Storages and processes.

    def open(
        self,
        *arenas: Arena,
        identity: Identity | None = None,
        placement: Placement | None = None,
        timeout_s: float = 10.0,
    ) -> HiCacheStorage:
        """Open a storage of this test's namespace, or of another identity's."""
        storage = self.create(identity=identity, placement=placement, timeout_s=timeout_s)
        open_storage(storage, [arena.pool for arena in arenas])
        self._cleanup.callback(storage.close)
        return storage

    def create(
        self,
        *,
        identity: Identity | None = None,
        placement: Placement | None = None,
        timeout_s: float = 10.0,
    ) -> HiCacheStorage:
        """Build a storage without opening it."""
        return self.site.create(identity or self.identity, placement or Placement(), timeout_s, self.options)

    def peer(self, component: Component, *, identity: Identity | None = None) -> Peer:
        """Start a second process with a storage of this test's namespace open in it."""
        return self.peers(component, 1, identity=identity)[0]

    def peers(self, component: Component, count: int, *, identity: Identity | None = None) -> list[Peer]:
        """Start several at once."""
        command = [sys.executable, "-m", "hicache_conformance.peer", self.setup(component, identity)]
        peers = []
        for _ in range(count):
            peers.append(Peer(self.harness.second_process(command)))
            self._cleanup.callback(peers[-1].close)
        for peer in peers:
            if peer.answer(2 * PATIENCE_S) != "open":
                raise AssertionError("the second process did not open its storage")
        return peers

    def setup(self, component: Component, identity: Identity | None = None) -> str:
        """Describe this test's storage for another process, as JSON."""
        fields = {
            name: getattr(component, name)
            for name in ("name", "shard", "byte_order", "format", "page_nbytes")
        }
        content = (identity or self.identity).manifest()
        content.pop("schema")
        setup = {
            "subject": self.site.subject.reference,
            "options": self.options,
            "identity": content,
            "component": fields,
            "seed": self.seed,
            "timeout_s": 10.0,
            "environment": self.site.environment,
        }
        return json.dumps(setup, default=str)

    # Pages.

    def component(self, nbytes: int = PAGE_NBYTES, name: str = "kv", **changes: Any) -> Component:
        """Make a component of this page size."""
        fields = {"shard": "whole", "byte_order": "page_first", "format": "bf16"} | changes
        return Component(name, page_nbytes=nbytes, **fields)

    def arena(
        self, num_pages: int = 8, nbytes: int = PAGE_NBYTES, layout: Layout = ONE_SEGMENT, *, shift: int = 0
    ) -> Arena:
        """Make a pool of canaries."""
        return Arena(self.component(nbytes), num_pages, layout, shift=shift)

    def keys(self, count: int, component: Component | None = None, label: str = "page") -> list[str]:
        """Make keys that no other test uses under this label."""
        hashes = [page_hash(f"{label}-{i}", self.seed) for i in range(count)]
        return (component or self.component()).keys(hashes)

    def page(self, key: str, nbytes: int = PAGE_NBYTES, version: int = 0) -> bytes:
        """Give the bytes of one version of a key's page."""
        return page_bytes(key, nbytes, version, self.seed)

    def set(
        self, storage: HiCacheStorage, keys: Sequence[str], nbytes: int = PAGE_NBYTES, version: int = 0
    ) -> list[Status]:
        """Set each key to a version of its page, from slots of its own; in batches that are allowed."""
        statuses: list[Status] = []
        for batch in self._batches(keys):
            with self.slots(storage, len(batch), nbytes) as arena:
                for index, key in enumerate(batch):
                    arena.fill(index, self.page(key, nbytes, version))
                answer = storage.batch_set(batch, arena.pages(range(len(batch))))
            statuses += aligned(answer, len(batch))
        return statuses

    def stored(
        self, storage: HiCacheStorage, keys: Sequence[str], nbytes: int = PAGE_NBYTES, version: int = 0
    ) -> None:
        """Set, and require that all of it was OK."""
        statuses = self.set(storage, keys, nbytes, version)
        assert statuses == [Status.OK] * len(keys), f"setting pages: {statuses}"

    def get(
        self, storage: HiCacheStorage, keys: Sequence[str], nbytes: int = PAGE_NBYTES
    ) -> list[tuple[Status, bytes]]:
        """Get each key into a slot of its own, and give statuses with what the slots hold."""
        found: list[tuple[Status, bytes]] = []
        for batch in self._batches(keys):
            with self.slots(storage, len(batch), nbytes) as arena:
                statuses = aligned(storage.batch_get(batch, arena.pages(range(len(batch)))), len(batch))
                found += [(status, arena.read(index)) for index, status in enumerate(statuses)]
        return found

    def contains(self, storage: HiCacheStorage, keys: Sequence[str]) -> list[Status]:
        """Ask for each key, in batches that are allowed."""
        return [
            status
            for batch in self._batches(keys)
            for status in aligned(storage.batch_contains(batch), len(batch))
        ]

    def _batches(self, keys: Sequence[str]) -> list[list[str]]:
        """Split as HiCache does for a backend that declares max_batch."""
        most = self.capabilities.max_batch or max(len(keys), 1)
        return [list(keys[start : start + most]) for start in range(0, max(len(keys), 1), most)]

    def versions(
        self, storage: HiCacheStorage, keys: Sequence[str], nbytes: int = PAGE_NBYTES, known: int = 4
    ) -> list[Status | int]:
        """Get each key: the version whose bytes came back (-1 for nobody's), or the status if not OK."""
        found: list[Status | int] = []
        for key, (status, value) in zip(keys, self.get(storage, keys, nbytes), strict=True):
            matching = [v for v in range(known) if value == self.page(key, nbytes, v)]
            found.append((matching or [-1])[0] if status is Status.OK else status)
        return found

    @contextlib.contextmanager
    def slots(self, storage: HiCacheStorage, count: int, nbytes: int = PAGE_NBYTES) -> Any:
        """Lend slots that the storage knows for the length of a call."""
        arena = self.arena(max(count, 1), nbytes)
        storage.add_pool(arena.pool)
        yield arena
        storage.drop_pool(arena.pool)

    # The harness's powers, undone after the test.

    def pause(self) -> None:
        """Stop the server from answering."""
        self._disturbed = True
        self.harness.pause()

    def resume(self) -> None:
        """Let it answer again."""
        self.harness.resume()

    def kill(self) -> None:
        """Kill the server."""
        self._disturbed = self._rebuild = True
        self.harness.kill()

    def restart(self) -> None:
        """Bring it back."""
        self._disturbed = True
        self.harness.restart()
        self._rebuild = False

    def bounded(self, capacity: int) -> None:
        """Work on an empty store of about this capacity from now on."""
        self._disturbed = self._rebuild = True
        self.options = self.harness.bounded(capacity)

    def damage(self, key: str, how: Damage, identity: Identity | None = None) -> None:
        """Damage a stored value behind the backend's back."""
        self.harness.damage(Namespace.of(identity or self.identity), key, how)

    def stored_bytes(self, key: str, identity: Identity | None = None) -> bytes | None:
        """Read a stored value round the backend."""
        return self.harness.stored_bytes(Namespace.of(identity or self.identity), key)

    def store_bytes(self, key: str, value: bytes) -> None:
        """Put a value under a key round the backend."""
        self.harness.store_bytes(Namespace.of(self.identity), key, value)

    def call(self, verb: Callable[[], Any]) -> Call[Any]:
        """Run a verb in a thread of its own, so that it may hang."""
        return Call(verb)

    def close(self, *, failed: bool) -> None:
        """Close what the test opened and put the site back in order."""
        if self._disturbed:
            self.harness.resume()
        try:
            self._cleanup.close()
        finally:
            if self._disturbed and (failed or self._rebuild):
                self.site.stop()
                self.site.start()


def aligned(statuses: object, count: int) -> list[Status]:
    """Require what C1 says of every batch verb's result: a list of one Status a key."""
    assert type(statuses) is list, f"C1: wanted a list of {count} Status, got {statuses!r}"
    wrong = [item for item in statuses if type(item) is not Status]
    assert not wrong, f"C1: results that are not a Status: {wrong[:4]!r}"
    assert len(statuses) == count, f"C1: {len(statuses)} results for {count} keys: {statuses}"
    return list(statuses)


def loose(values: Sequence[Any], component: Component) -> Pages:
    """Name loose buffers as slots."""
    return Pages.of_buffers(values, component)
