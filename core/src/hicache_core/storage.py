"""The contract: what every backend implements and every caller may rely on.

``HiCache`` (cache.py) drives one storage object in this order:

0. ``Storage(config, options)`` keeps its arguments and does nothing else.
1. ``open(pools)`` connects, registers memory, and may narrow ``capabilities``.
2. ``batch_contains``, ``batch_exists``, ``batch_get``, ``batch_set``, ``batch_remove``,
   ``touch``, ``clear``, ``usage``: from any number of threads at once. Tools also
   call ``namespaces`` and ``verify``, which no engine needs.
3. ``add_pool``, ``drop_pool``: while verbs run; engines add sidecar pools late.
4. ``close()``, once or more; later verbs raise StorageClosed.

Data goes engine -> adapter -> HiCache -> this -> the store. HiCache guarantees
that keys are well formed and of this storage's namespace, that batches respect
``max_batch``, and that running verbs have disjoint ``locs``. Policy (splitting,
bouncing, breakers, counters, log lines) is HiCache's; a backend reports what
happened, page by page, and touches no slot after it has returned.

The clauses, by which the conformance suite names its tests:

C1   Results are aligned: one a key, in order.
C2   OK from get: the whole page, exactly as set, in its own slot. Anything
     else: this slot may be overwritten, no other byte is.
C3   OK from set: this instance can get the page at once; with ``shared``,
     every other instance of the namespace can.
C4   Pages are immutable; only a value known CORRUPT or SIZE_MISMATCH is
     replaced. A set that fails leaves the key absent; concurrent sets leave
     one of their pages whole; after TIMEOUT the key is absent or whole.
C5   Another size is SIZE_MISMATCH; damaged bytes are CORRUPT (``checksum``).
C6   contains is OK only for what a get would give, barring eviction, loss, or
     damage not yet seen; not for a value on which a get has failed.
C7   An empty batch gives an empty list and reaches no server; repeated keys work.
C8   Verbs may run in several threads at once on disjoint locs.
C9   Namespaces are apart; clear() removes all of its own and nothing else.
C10  Per-page trouble is a Status; trouble with the whole backend is UNAVAILABLE
     or TIMEOUT for each key; only misuse raises.
C11  Once a verb has returned, none of its slots is read or written by it; it
     returns within timeout_s + 1 s by the declared means (``hold``: later).
C12  close() is idempotent and gives everything back; a fork's child is closed.
C13  A declared capability works; an undeclared one raises UnsupportedOperation.
C14  ``persistent`` and ``durable`` mean what they say.
C15  With a capacity the store stays within it; what was used outlives what was not.
C16  No process state is changed: signals, logging, environment, locale; no prints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hicache_core.capabilities import Capabilities
from hicache_core.errors import (
    BackendTimeout,
    BackendUnavailable,
    InvalidArgument,
    InvalidPages,
    UnsupportedOperation,
)
from hicache_core.lifecycle import VerbGate, close_in_child
from hicache_core.memory import HostPool, Pages
from hicache_core.spec import BackendSpec
from hicache_core.status import Status

if TYPE_CHECKING:
    from hicache_core.identity import Identity, Namespace, Placement
    from hicache_core.options import Options
    from hicache_core.upkeep import NamespaceUse, Verified


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheStorageConfig:
    """What every backend is told besides its own options."""

    namespace: Namespace
    """Whose pages this instance stores."""
    identity: Identity
    """The same, readable."""
    placement: Placement
    """Where the caller sits."""
    timeout_s: float = 5.0
    """Seconds a verb, open and close may take (C11)."""

    def __post_init__(self) -> None:
        number = isinstance(self.timeout_s, (int, float)) and not isinstance(self.timeout_s, bool)
        if not number or not 0 < self.timeout_s < float("inf"):
            raise InvalidArgument(
                "timeout_s is not a time",
                value=repr(self.timeout_s),
                remedy="Give seconds above 0, for example 5.0.",
            )


@dataclass(frozen=True, slots=True)
class Usage:
    """What a namespace holds and what the store has."""

    pages: int
    """Pages of the namespace."""
    bytes: int
    """Their bytes."""
    store_bytes: int
    """Bytes that the store takes, all namespaces and overhead included."""
    capacity: int | None
    """The most that store_bytes may reach; None where there is no limit."""


class HiCacheStorage(ABC):
    """A store of immutable pages of one namespace.

    A backend sets ``spec`` and implements the verbs. What this class gives it:
    the state machine (``self._gate``: every verb runs ``with self._gate:``), the
    pools that it was told of (``self._pools``), and ``self._check`` for misuse.

    Threads: every verb may be called from several threads at once (C8).
    """

    spec: ClassVar[BackendSpec]

    def __init__(self, config: HiCacheStorageConfig, options: Options) -> None:
        """Keep the arguments; no I/O, no native import, no thread."""
        self.config = config
        self.options: Any = options
        #: After open(): what this instance promises, at most what the spec does.
        self.capabilities: Capabilities = self.spec.capabilities
        self._gate = VerbGate(self.spec.name)
        self._pools: dict[int, HostPool] = {}

    @property
    def is_open(self) -> bool:
        """True between open() and close()."""
        return self._gate.is_open

    def open(self, pools: Sequence[HostPool] = ()) -> None:
        """Connect, register the pools' memory, and let verbs in; all undone when it fails.

        A backend does its own work first and calls ``super().open(pools)`` last.

        Raises: BackendUnavailable, BackendTimeout, BackendDependencyMissing,
            BackendIncompatible, InvalidOptions (what only the machine can tell),
            InvalidPages (a pool that it cannot serve), StorageClosed (reopened).
        Time: timeout_s.
        """
        self._gate.check_new()
        for pool in pools:
            self._pools[id(pool)] = pool
        close_in_child(self)
        self._gate.open()

    def add_pool(self, pool: HostPool) -> None:
        """Serve one more pool; the same one twice is one.

        Raises: StorageClosed, StorageNotOpened, InvalidPages, BackendUnavailable.
        """
        self._gate.check()
        self._pools[id(pool)] = pool

    def drop_pool(self, pool: HostPool) -> None:
        """Forget a pool and its registrations; an unknown one is ignored. No verb uses its pages.

        Raises: StorageClosed, StorageNotOpened.
        """
        self._gate.check()
        self._pools.pop(id(pool), None)

    @abstractmethod
    def batch_contains(self, keys: Sequence[str]) -> list[Status]:
        """Tell for each key whether a get would give a page, reaching for no page bytes.

        Guaranteed by HiCache: keys are well formed and of this namespace.
        Returns: n Status in the order of keys: OK, MISS, or why it is unknown (C1, C6).
        Raises: StorageClosed, StorageNotOpened; nothing else (C10).
        Threads, time: as batch_get.
        """

    def batch_exists(self, keys: Sequence[str]) -> int:
        """Count the leading keys whose pages are there; override where a store answers a prefix cheaper.

        Raises: StorageClosed, StorageNotOpened; BackendUnavailable or
            BackendTimeout where the first key's answer is unknown for that reason.
        """
        statuses = self.batch_contains(keys)
        for count, status in enumerate(statuses):
            if status is Status.OK:
                continue
            if not count and status in (Status.UNAVAILABLE, Status.TIMEOUT):
                kind = BackendTimeout if status is Status.TIMEOUT else BackendUnavailable
                raise kind(f"'{self.spec.name}' could not tell which pages exist")
            return count
        return len(statuses)

    @abstractmethod
    def batch_get(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        """Read each key's page into its own slot.

        Guaranteed by HiCache: keys are well formed and of this namespace; locs
            are disjoint from those of running verbs.
        Checked here: open; len(keys) == len(locs); the pool is known.
        Args:
            keys: n keys, any order, repeats allowed.
            locs: n pages of one pool, ``locs.nbytes`` each, writable until return.
        Returns: n Status in the order of keys (C1). OK: the slot holds the page
            exactly as set. Else: the slot is undefined, every other byte untouched (C2, C5).
        Raises: StorageClosed, StorageNotOpened, InvalidPages; nothing else (C10).
        Threads: any number at once on disjoint locs (C8).
        Time: timeout_s + 1 s by the declared means; no slot touched after return (C11).
        """

    @abstractmethod
    def batch_set(self, keys: Sequence[str], locs: Pages) -> list[Status]:
        """Store each slot's bytes under its key, unless a good value is there already.

        Guaranteed and checked, raises, threads, time: as batch_get; slots are only read.
        Returns: n Status (C1). OK: stored now or before (C3, C4). NO_SPACE, DENIED,
            TIMEOUT, UNAVAILABLE, ERROR: the key is absent, or whole after TIMEOUT.
        """

    def batch_remove(self, keys: Sequence[str]) -> list[Status]:
        """Remove each key's value; OK where there was one, MISS where not.

        Raises: UnsupportedOperation unless ``remove`` is declared; else as batch_contains.
        """
        self._gate.check()
        raise UnsupportedOperation(self.spec.name, "remove pages", capability="remove")

    def touch(self, keys: Sequence[str]) -> None:
        """Count as a use of each key for eviction; nothing where eviction is not lru or approx.

        Raises: StorageClosed, StorageNotOpened; nothing else.
        """
        self._gate.check()

    def clear(self) -> int:
        """Remove every page of this namespace, for every process, and nothing else (C9); return how many.

        Raises: UnsupportedOperation unless ``clear`` is declared; BackendUnavailable,
            BackendTimeout, StorageClosed, StorageNotOpened.
        """
        self._gate.check()
        raise UnsupportedOperation(self.spec.name, "clear a namespace", capability="clear")

    @abstractmethod
    def usage(self) -> Usage:
        """Tell what the namespace holds and the store takes.

        Raises: BackendUnavailable, BackendTimeout, StorageClosed, StorageNotOpened.
        """

    def namespaces(self) -> list[NamespaceUse]:
        """Tell every namespace of the store, whoever's; one without pages may be left out.

        Raises: UnsupportedOperation unless ``listing`` is declared; else as usage.
        Time: as long as it takes; for tools, not for engines.
        """
        self._gate.check()
        raise UnsupportedOperation(self.spec.name, "list namespaces", capability="listing")

    def verify(self, *, remove: bool = False) -> Iterator[Verified]:
        """Read this namespace's pages through, a piece at a time, and yield what each piece held.

        Pages that others set or remove meanwhile may be left out. With
        ``remove``, damaged pages are absent afterwards, for every process.

        Raises: UnsupportedOperation unless ``verify`` is declared, at the call; else
            as usage, between pieces too. Time: each piece within timeout_s or so.
        """
        self._gate.check()
        raise UnsupportedOperation(self.spec.name, "verify stored pages", capability="verify")

    def rebind(self, config: HiCacheStorageConfig, pools: Sequence[HostPool]) -> HiCacheStorage:
        """Close this instance and return an open one for another namespace.

        HiCache calls it with no verb running. Override to keep connections and
        registrations; the returned instance may not be this one.

        Raises: as open(); this instance is closed then too.
        """
        self.close()
        fresh = type(self)(config, self.options)
        fresh.open(pools)
        return fresh

    def close(self) -> None:
        """Refuse new verbs, wait for running ones up to timeout_s, give everything back; idempotent (C12).

        A backend calls ``self._drain()`` first, releases what it holds after.
        """
        self._drain()

    def after_fork_in_child(self) -> None:
        """Become closed in a fork's child, taking no lock; override to close lock descriptors too."""
        self._gate.abandon_in_child()

    def _drain(self) -> bool:
        """Shut the gate; False when some verb still runs after timeout_s and is abandoned."""
        drained = self._gate.close(self.config.timeout_s)
        self._pools.clear()
        return drained

    def _check(self, keys: Sequence[str], locs: Pages, *, writes_slots: bool = False) -> None:
        """Refuse misuse before anything is touched (C10).

        Raises: InvalidPages on unequal lengths, an unknown pool, loose memory
            where registration is needed, or read-only slots for a get.
        """
        if len(keys) != len(locs):
            raise InvalidPages(
                f"a batch of '{self.spec.name}' has unequal lengths",
                value=f"{len(keys)} keys, {len(locs)} pages",
                remedy="Pass one page for each key.",
            )
        pool = locs.pool
        if pool is None:
            if self.capabilities.needs_registered and len(locs):
                raise InvalidPages(
                    f"'{self.spec.name}' needs registered memory",
                    value="loose buffers",
                    remedy="Use pages of a pool that open() or add_pool() saw; HiCache copies where it must.",
                )
        elif id(pool) not in self._pools:
            raise InvalidPages(
                f"pages of a pool that '{self.spec.name}' does not know",
                value=f"component '{pool.component.name}'",
                remedy="Pass the pool to open() or add_pool() first.",
            )
        if writes_slots and locs.readonly:
            raise InvalidPages(
                "a get needs writable slots", value="read-only buffers", remedy="Pass writable memory."
            )
