"""HiCache: what an engine uses; names pages, guards calls, counts, and never raises into the engine.

An engine must not die, hang or lie because of its cache. So whatever a backend
does (raise, hang, answer nonsense), each page gets a Status, a dead store is
answered for at once, and one rate-limited line says why (guard.py). Only misuse
by the caller raises: a length mismatch, pages of an unknown pool, a malformed
hash. Retrying is not among the guards: a page that could not be had is
computed, which is what the engine would do anyway.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from hicache_core.counters import Counters, Stats
from hicache_core.errors import InvalidArgument, InvalidPages
from hicache_core.factory import Loaded, StorageBackendFactory
from hicache_core.guard import Guard
from hicache_core.identity import Component, Identity, Namespace, Placement, check_hashes
from hicache_core.lifecycle import close_in_child
from hicache_core.memory import HostPool, Pages
from hicache_core.observers import OperationEvent
from hicache_core.probe import ComponentQuery, Hit, combine, reach
from hicache_core.status import OK, Status
from hicache_core.storage import HiCacheStorage, HiCacheStorageConfig, Usage

#: Outcomes that need no log line.
_QUIET = frozenset({Status.OK, Status.MISS, Status.SKIPPED, Status.UNAVAILABLE, Status.TIMEOUT})


class HiCache:
    """One engine's view of one store, for one identity; made by ``HiCache.open``.

    Threads: every method may be called from any thread at any time; pages of
    running calls must be disjoint. In the child of a fork, and after close, it
    answers misses.
    """

    def __init__(self, loaded: Loaded, config: HiCacheStorageConfig, pools: Sequence[HostPool]) -> None:
        """Use ``HiCache.open``; this keeps its arguments."""
        self._guard = Guard(loaded, config)
        self._limits = loaded.spec.capabilities
        self._counters = Counters()
        for pool in pools:
            self._check_served(pool)
            self._guard.pools[id(pool)] = pool
        self._components: dict[str, tuple[Component, ...]] = {}
        self._index_components()
        close_in_child(self)

    @classmethod
    def open(
        cls,
        backend: str,
        *,
        identity: Identity,
        placement: Placement,
        pools: Sequence[HostPool] = (),
        timeout_s: float = 5.0,
        options: Mapping[str, Any] | None = None,
        strict: bool = False,
    ) -> HiCache:
        """Load a backend, open it, and return the cache; use it as a context manager.

        Args:
            backend: an installed or registered name, or ``name@distribution``.
            identity: what the pages mean; decides the namespace.
            placement: where this process sits.
            pools: the engine's memory; more may come by add_pool.
            timeout_s: seconds a call to the backend may take.
            options: the backend's own; see ``hicache show NAME``.
            strict: raise when the store cannot be reached, instead of answering
                misses and trying again.

        Raises:
            BackendLoadError: unknown, broken or blocked backend, InvalidOptions.
            InvalidPages: a pool that this backend can never serve.
            BackendUnavailable: with ``strict`` only.
        """
        loaded = StorageBackendFactory.load(backend, options or {})
        config = HiCacheStorageConfig(
            namespace=Namespace.of(identity), identity=identity, placement=placement, timeout_s=timeout_s
        )
        cache = cls(loaded, config, tuple(pools))
        cache._start(strict=strict)
        return cache

    # What engines call.

    def exists(self, hashes: Sequence[str], component: str = "kv") -> int:
        """Count the leading pages that are in the store; 0 where that cannot be known.

        Raises: InvalidKey, InvalidArgument (a component without a pool).
        """
        components = self._named(component)
        check_hashes(hashes)
        if not hashes:
            return 0
        started = time.perf_counter()
        run = len(hashes)
        for each in components:
            run = self._guard.exists(each.keys(hashes[:run])) if each.page_nbytes and run else 0
        answers = [OK] * run + [Status.MISS] * (len(hashes) - run)
        self._record("exists", component, answers, 0, started)
        return run

    def contains(self, hashes: Sequence[str], component: str = "kv") -> list[Status]:
        """Tell for each page whether the store has it, holes included.

        Raises: as exists.
        """
        components = self._named(component)
        check_hashes(hashes)
        if not hashes:
            return []
        started = time.perf_counter()
        statuses: list[Status] = [OK] * len(hashes)
        for each in components:
            found = (
                self._guard.contains(each.keys(hashes)) if each.page_nbytes else [Status.MISS] * len(hashes)
            )
            statuses = [new if old is OK else old for old, new in zip(statuses, found, strict=True)]
        self._record("contains", component, statuses, 0, started)
        return statuses

    def probe(self, hashes: Sequence[str], queries: Sequence[ComponentQuery] = ()) -> Hit:
        """Tell how much of a prefix can be restored, sidecar components considered.

        Raises: as exists.
        """
        anchored = all(component.page_nbytes == 0 for component in self._named("kv"))
        check_hashes(hashes)
        kv_run = None if anchored else self.exists(hashes)
        asked = hashes if kv_run is None else hashes[:kv_run]
        reached = []
        for query in queries:
            present = [status is OK for status in self.contains(asked, query.name)]
            reached.append((query, reach(query, present)))
        return combine(kv_run, len(hashes), reached)

    def get(self, hashes: Sequence[str], pages: Pages) -> list[Status]:
        """Read each page into its own slot; OK only where the slot holds the whole page.

        Where the status is not OK the slot's content is undefined. Pages of a
        component without bytes are SKIPPED.

        Raises: InvalidKey, InvalidPages (lengths, unknown pool, read-only memory).
        """
        self._check_batch(hashes, pages)
        if pages.readonly:
            raise InvalidPages(
                "a get needs writable slots", value="read-only buffers", remedy="Pass writable memory."
            )
        return self._transfer("get", hashes, pages)

    def set(self, hashes: Sequence[str], pages: Pages) -> list[Status]:
        """Store each slot's bytes under its hash; OK where the page is stored now or was before.

        Pages of a component without bytes are SKIPPED.

        Raises: InvalidKey, InvalidPages (lengths, unknown pool).
        """
        self._check_batch(hashes, pages)
        return self._transfer("set", hashes, pages)

    def touch(self, hashes: Sequence[str], component: str = "kv") -> None:
        """Count as a use of each page, where the store evicts by use.

        Raises: as exists.
        """
        components = self._named(component)
        check_hashes(hashes)
        for each in components if hashes else ():
            self._guard.touch(each.keys(hashes))

    # Pools and identity.

    def add_pool(self, pool: HostPool) -> None:
        """Serve one more pool; the same one twice is one.

        Raises: InvalidPages (a pool that this backend can never serve).
        """
        self._check_served(pool)
        self._guard.add_pool(pool)
        self._index_components()

    def drop_pool(self, pool: HostPool) -> None:
        """Forget a pool; no call uses its pages any more."""
        self._guard.drop_pool(pool)
        self._index_components()

    def rebind(self, identity: Identity) -> None:
        """Serve another identity from here on: after a weight update, or another LoRA set.

        Waits for running calls up to timeout_s; they end in the old namespace.
        Calls during the change are answered at once, without a hit. Never raises
        for the store's sake: where it cannot be reached, opening is tried again.
        """
        old = self._guard.config
        self._guard.rebind(
            HiCacheStorageConfig(
                namespace=Namespace.of(identity),
                identity=identity,
                placement=old.placement,
                timeout_s=old.timeout_s,
            )
        )

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self._guard.name

    @property
    def identity(self) -> Identity:
        """What the pages mean now."""
        return self._guard.config.identity

    @property
    def namespace(self) -> Namespace:
        """The namespace of the present identity."""
        return self._guard.config.namespace

    @property
    def storage(self) -> HiCacheStorage | None:
        """The open storage, for tools; None while the store cannot be reached."""
        session = self._guard.session
        return session.storage if session is not None else None

    # What operators call: these raise HiCacheError, since a quiet failure would mislead them.

    def remove(self, hashes: Sequence[str], component: str = "kv") -> list[Status]:
        """Remove pages; OK where there was one.

        Raises: InvalidKey, InvalidArgument; else as clear.
        """
        components = self._named(component)
        check_hashes(hashes)
        statuses: list[Status] = [Status.MISS] * len(hashes)
        for each in components if hashes else ():
            found = self._guard.remove(each.keys(hashes))
            statuses = [old if old is OK else new for old, new in zip(statuses, found, strict=True)]
        return statuses

    def clear(self) -> int:
        """Remove every page of this namespace and return how many.

        Raises: UnsupportedOperation, BackendUnavailable, BackendTimeout, StorageClosed;
            HiCacheError where the backend failed in another way.
        """
        removed = self._guard.operate(
            "clear", lambda session: session.storage.clear(), lambda count: type(count) is int and count >= 0
        )
        session = self._guard.session
        if session is not None:
            session.forget_dead()
        return removed

    def usage(self) -> Usage:
        """Tell what the namespace holds and the store takes; raises as clear."""
        return self._guard.operate(
            "usage", lambda session: session.storage.usage(), lambda usage: isinstance(usage, Usage)
        )

    def stats(self) -> Stats:
        """Give a snapshot of the counters."""
        session = self._guard.session
        return Stats(
            verbs=self._counters.snapshot(),
            late=self._guard.late,
            abandoned=session.abandoned if session is not None else 0,
            breaker=self._guard.breaker.state.value,
            dead_keys=session.dead_keys if session is not None else 0,
        )

    def close(self) -> None:
        """Close the storage within timeout_s and a second; idempotent."""
        self._guard.close()
        self._tell("hicache_ended")

    def __enter__(self) -> HiCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def after_fork_in_child(self) -> None:
        """Answer misses in a fork's child; takes no lock."""
        self._guard.end_in_child()
        self._counters = Counters()

    # Names, checks, counting.

    def _transfer(self, verb: str, hashes: Sequence[str], pages: Pages) -> list[Status]:
        component = pages.component
        if not hashes or not component.page_nbytes:
            return [Status.SKIPPED] * len(hashes)
        started = time.perf_counter()
        statuses = self._guard.transfer(verb, component.keys(hashes), pages)
        self._record(verb, component.name, statuses, component.page_nbytes, started)
        return statuses

    def _record(
        self, verb: str, component: str, statuses: list[Status], page_nbytes: int, started: float
    ) -> None:
        seconds = time.perf_counter() - started
        self._counters.record(verb, statuses, page_nbytes, seconds)
        good = statuses.count(OK)
        if good != len(statuses):
            self._log_bad_pages(verb, statuses)
        observers = self._guard.observers
        if observers is not None:
            event = OperationEvent(
                backend=self._guard.name,
                namespace=self.namespace.id,
                verb=verb,
                component=component,
                pages=len(statuses),
                nbytes=good * page_nbytes,
                statuses={status: statuses.count(status) for status in set(statuses)},
                seconds=seconds,
            )
            observers.tell("hicache_operation", event=event)

    def _start(self, *, strict: bool) -> None:
        self._guard.open(strict=strict)
        self._tell("hicache_started")

    def _tell(self, hook: str) -> None:
        observers = self._guard.observers
        if observers is not None:
            observers.tell(hook, cache=self)

    def _log_bad_pages(self, verb: str, statuses: list[Status]) -> None:
        for status in set(statuses) - _QUIET:
            detail = f"{status.name} for {statuses.count(status)} of {len(statuses)} pages"
            self._guard.notices.warn(f"hicache '{self._guard.name}' {verb}", f"page {status.name}", detail)

    def _named(self, component: str) -> tuple[Component, ...]:
        found = self._components.get(component)
        if found is None:
            raise InvalidArgument(
                "no pool holds this component",
                value=repr(component),
                remedy=f"Add its pool first; there are: {', '.join(sorted(self._components)) or 'none'}.",
            )
        return found

    def _index_components(self) -> None:
        """Several components may share a name (head groups): a page is there when all of them have it."""
        named: dict[str, dict[Component, None]] = {}
        for pool in list(self._guard.pools.values()):
            named.setdefault(pool.component.name, {})[pool.component] = None
        self._components = {name: tuple(components) for name, components in named.items()}

    def _check_batch(self, hashes: Sequence[str], pages: Pages) -> None:
        if not isinstance(pages, Pages):
            raise InvalidPages(
                "slots are not Pages",
                value=type(pages).__name__,
                remedy="Make them with pool.pages(indices) or Pages.of_buffers.",
            )
        check_hashes(hashes)
        if len(hashes) != len(pages):
            raise InvalidPages(
                "a batch has unequal lengths",
                value=f"{len(hashes)} page hashes, {len(pages)} pages",
                remedy="Pass one page for each hash.",
            )
        if pages.pool is not None and id(pages.pool) not in self._guard.pools:
            raise InvalidPages(
                "pages of an unknown pool",
                value=f"component '{pages.component.name}'",
                remedy="Pass the pool to HiCache.open or add_pool first.",
            )

    def _check_served(self, pool: HostPool) -> None:
        name, limits = self._guard.name, self._limits
        if pool.device != "cpu" and not limits.device_memory:
            raise InvalidPages(
                f"'{name}' cannot reach the memory of component '{pool.component.name}'",
                value=f"device {pool.device}",
                remedy="Give a pool in host memory, or choose a backend with device_memory.",
            )
        most = limits.max_page_nbytes
        if most is not None and pool.component.page_nbytes > most:
            raise InvalidPages(
                f"pages of component '{pool.component.name}' are too large for '{name}'",
                value=f"{pool.component.page_nbytes} bytes, at most {most}",
                remedy="Use fewer tokens a page.",
            )
