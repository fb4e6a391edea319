"""Client: one native client of the store, safe to call.

The library crashes the process when any call is made before setup() or after
close(), and close() while a call runs does the same. So every call is made by a
verb inside its storage's gate, and close() waits until that is empty. It also
hangs: setup() for minutes on a dead master, close() for 12 s. Both run apart,
under a deadline, and what is left behind ends by itself.

A client outlives a storage that is rebound to another namespace: its segment
holds pages of others, which closing it would lose.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hicache_core import BackendTimeout, BackendUnavailable, HostPool, Pages
from hicache_core.bounce import run_apart
from hicache_core.buffers import address_of, flat_view
from hicache_core.errors import InvalidPages, StorageNotOpened
from hicache_core.lifecycle import VerbGate
from hicache_mooncake import _hostmem, _preflight
from hicache_mooncake._environment import LASTING
from hicache_mooncake._lifeline import Lifeline
from hicache_mooncake._native import (
    BACKEND,
    INVALID_PARAMS,
    NO_ANSWER,
    OBJECT_HAS_LEASE,
    RPC_FAIL,
    RPC_TIMEOUT,
    code_text,
    load,
)
from hicache_mooncake._regions import Regions
from hicache_mooncake._setup import READ_LATE, replication, set_up, variables_for
from hicache_mooncake.options import MooncakeOptions

#: Longest that a close() left behind waits for the calls inside, on a thread of its own.
_LATE_CLOSE_S = 3600.0
#: Buffers a native call, so that several threads' calls fit the queue.
MAX_BUFFERS = 16_384
#: A page of memory, of which tombstones are made.
_ZEROS_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Names:
    """How the keys of one namespace are called in the store."""

    prefix: str
    suffix: str

    def of(self, keys: Sequence[str]) -> list[str]:
        """Give the names of keys."""
        prefix, suffix = self.prefix, self.suffix
        if suffix:
            return [prefix + key + suffix for key in keys]
        return [prefix + key for key in keys]


class Client:
    """A set-up native client and the memory registered with it; thread-safe."""

    def __init__(self, options: MooncakeOptions, timeout_s: float) -> None:
        self.options = options
        self._timeout_s = timeout_s
        self._module: Any = None
        self._native: Any = None
        self._lifeline: Lifeline | None = None
        #: How new objects are kept, as the library wants it.
        self.replication: Any = None
        self._regions = Regions()
        self._registering = threading.Lock()
        self._zero_memory: Any = None

    # The beginning.

    def connect(self) -> None:
        """Import, check what can be checked without the library, and set the native client up.

        Raises: BackendDependencyMissing, BackendIncompatible, InvalidOptions,
            BackendUnavailable, BackendTimeout.
        """
        deadline = time.monotonic() + self._timeout_s
        variables = variables_for(self.options, self._timeout_s)
        module = self._module = load(variables)
        _preflight.check_device(self.options)
        connection, hostname = _preflight.check_servers(self.options, deadline)
        self._lifeline = Lifeline(connection)
        LASTING.hold({name: value for name, value in variables.items() if name == READ_LATE})
        try:
            native = self._set_up_apart(module, hostname, variables, deadline)
            self.replication = replication(module, self.options, native)
        except BaseException:
            self._let_go()
            raise
        self._native = native

    def _let_go(self) -> None:
        LASTING.release()
        if self._lifeline is not None:
            self._lifeline.close()

    def _set_up_apart(self, module: Any, hostname: str, variables: dict[str, str], deadline: float) -> Any:
        left = max(deadline - time.monotonic(), 0.1)
        try:
            return run_apart(
                lambda: set_up(module, self.options, hostname, variables),
                left,
                what=f"setting up a client of master {self.options.master}",
                late=lambda late: late.close(),
            )
        except BackendTimeout as error:
            raise BackendTimeout(
                f"opening 'mooncake': master {self.options.master} took the connection and gave no answer",
                value=f"within {self._timeout_s:g} s",
                remedy="Look at its log (it may be stopped or hung), or raise timeout_s.",
            ) from error

    # Memory.

    def register(self, pools: Iterable[HostPool]) -> None:
        """Register the pools' memory, as far as it is not yet; all or none.

        Raises: InvalidPages (memory that Mooncake refuses).
        """
        with self._registering:
            fresh = [pool for pool in pools if pool not in self._regions]
            added: list[tuple[int, int]] = []
            try:
                for start, end in self._regions.missing(fresh):
                    self._register_range(start, end - start)
                    added.append((start, end))
            except InvalidPages:
                for start, _ in added:
                    self._native.unregister_buffer(start)
                raise
            for pool in fresh:
                self._regions.add(pool, added)
            self._refuse_straddling(fresh)

    def unregister(self, pool: HostPool) -> None:
        """Give back what only this pool used; an unknown one is ignored."""
        with self._registering:
            self._forget(pool)

    def _forget(self, pool: HostPool) -> None:
        for start, _ in self._regions.drop(pool):
            self._native.unregister_buffer(start)

    def private_memory(self, nbytes: int) -> Any:
        """Give writable memory that can be registered: a daemon maps none but Mooncake's own."""
        if self.options.daemon:
            return _hostmem.allocate(self._module.MooncakeHostMemAllocator(), nbytes)
        return mmap.mmap(-1, nbytes)

    def _register_range(self, start: int, nbytes: int) -> None:
        code = self._native.register_buffer(start, nbytes)
        if code == 0:
            return
        if self.options.daemon:
            remedy = "With 'daemon', make pools of tensors from MooncakeHostTensorAllocator."
        elif self.options.protocol == "rdma":
            remedy = (
                "Raise the limit of locked memory (ulimit -l unlimited), or use a smaller pool: some devices "
                "refuse registrations above about 64 GiB."
            )
        else:
            remedy = "Another client in this process may have registered an overlapping range."
        raise InvalidPages(
            "Mooncake refuses to register the memory of a pool",
            value=f"{nbytes} bytes at {start:#x}: {code_text(code)}",
            remedy=remedy,
        )

    def _refuse_straddling(self, pools: Iterable[HostPool]) -> None:
        if self.options.protocol != "rdma":
            return
        for pool in pools:
            boundary = self._regions.straddled(pool)
            if boundary is not None:
                self._forget(pool)
                raise InvalidPages(
                    f"pages of component '{pool.component.name}' lie across two registered ranges",
                    value=f"at {boundary:#x}",
                    remedy="Pass all pools over one piece of memory to open(), to have it registered whole.",
                )

    # Calls: one code a name, whatever happens. The caller is inside its gate.

    def exist(self, names: Sequence[str]) -> list[int]:
        """Ask for each object: 1, 0, or a negative code. Grants a lease, which counts as a use."""
        return self._ask(lambda: self._native.batch_is_exist(names), len(names))

    def get(self, names: Sequence[str], locs: Pages, trailers: Pages | None) -> list[int]:
        """Read objects into slots: the object's size, or a negative code."""
        return self._in_parts(self._get, names, *_buffers(locs, trailers))

    def put(self, names: Sequence[str], locs: Pages, trailers: Pages | None) -> list[int]:
        """Write objects from slots: 0 (also where the name exists, whatever it holds), or a negative code."""
        return self._in_parts(self._put, names, *_buffers(locs, trailers))

    @property
    def native(self) -> Any:
        """The native client, for the shortest way to a call; its user asks the lifeline first."""
        return self._native

    @property
    def lifeline(self) -> Lifeline:
        """What tells whether the master is there."""
        if self._lifeline is None:
            raise StorageNotOpened(BACKEND)
        return self._lifeline

    def _get(self, names: Sequence[str], addresses: list[int], sizes: list[int], width: int) -> Any:
        if width == 1:
            return self._native.batch_get_into(names, addresses, sizes)
        return self._native.batch_get_into_multi_buffers(
            names, _nested(addresses, width), _nested(sizes, width)
        )

    def _put(self, names: Sequence[str], addresses: list[int], sizes: list[int], width: int) -> Any:
        how = self.replication
        if width == 1:
            return self._native.batch_put_from(names, addresses, sizes, how)
        return self._native.batch_put_from_multi_buffers(
            names, _nested(addresses, width), _nested(sizes, width), how
        )

    def _in_parts(
        self,
        call: Callable[..., Any],
        names: Sequence[str],
        addresses: list[int],
        sizes: list[int],
        width: int,
    ) -> list[int]:
        """Call natively as often as it takes for each call's buffers to fit the library's queues."""
        if not width:  # a page without bytes, which the library takes with 0 and does not store
            return [INVALID_PARAMS] * len(names)
        pages = max(1, MAX_BUFFERS // width)
        codes: list[int] = []
        for start in range(0, len(names), pages):
            part = names[start : start + pages]
            part_of = slice(start * width, (start + len(part)) * width)
            codes += self._ask(partial(call, part, addresses[part_of], sizes[part_of], width), len(part))
            if codes[-1] in NO_ANSWER:
                return codes + [codes[-1]] * (len(names) - len(codes))
        return codes

    def overwrite(self, names: Sequence[str], nbytes: int) -> list[int]:
        """Put a few zeros in the place of whatever there is, a put under way included: 0, or a negative code.

        Memory of an object of another size stays out of use for a while; see _remover.
        """
        address = self._zeros()
        count = len(names)
        return self._ask(
            lambda: self._native.batch_upsert_from(
                names, [address] * count, [nbytes] * count, self.replication
            ),
            count,
        )

    def _zeros(self) -> int:
        with self._registering:
            if self._zero_memory is None:
                memory = self.private_memory(_ZEROS_NBYTES)
                self._register_range(address_of(flat_view(memory)), _ZEROS_NBYTES)
                self._zero_memory = memory
            return address_of(flat_view(self._zero_memory))

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove objects that nobody has a lease on: 0, or a negative code."""
        return self._ask(lambda: self._native.batch_remove(names), len(names))

    def remove_matching(self, pattern: str) -> int:
        """Remove objects whose names match and that nobody has a lease on; the count or a negative code."""
        return self._ask(lambda: [int(self._native.remove_by_regex(pattern))], 1)[0]

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Give each object's size; 0 where there is none that can be read, None where nobody can tell."""
        if self.options.daemon or not self.holds():  # a daemon tells no sizes
            return [None] * len(names)
        found = self._native.batch_get_replica_desc(names)
        return [_object_size(found.get(name, ())) for name in names]

    def _ask(self, call: Callable[[], Any], count: int) -> list[int]:
        """Call natively if the master is there, and hold the library to one code a name."""
        return whole(call(), count) if self.holds() else [RPC_FAIL] * count

    def holds(self) -> bool:
        """Tell whether the master is there."""
        return self.lifeline.holds()

    # The end.

    def close(self, gate: VerbGate, timeout_s: float) -> None:
        """Unmount the segment and give everything back, within this time; idempotent.

        Calls still inside the (closed) gate are waited for, if need be beyond this time.
        """
        if self._native is None:
            return
        try:
            run_apart(lambda: self._close_native(gate), timeout_s, what="closing a client of Mooncake")
        except BackendTimeout:
            pass  # a call still runs, or the master does not answer; the thread goes on and ends with it

    def _close_native(self, gate: VerbGate) -> None:
        gate.close(_LATE_CLOSE_S)
        native, self._native = self._native, None
        if native is not None:
            native.close()
            self._let_go()
        self._regions = Regions()

    def abandon_in_child(self) -> None:
        """Become closed in a fork's child, and never let the native destructor run there: it crashes."""
        native, self._native = self._native, None
        if native is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


def _buffers(locs: Pages, trailers: Pages | None) -> tuple[list[int], list[int], int]:
    """Give a call's buffers as flat lists, and how many belong to each page."""
    addresses, sizes = locs.addresses()
    width = len(addresses) // len(locs)
    if trailers is None:
        return addresses, sizes, width
    tails, tail_sizes = trailers.addresses()
    with_tails: list[int] = []
    for position, tail in enumerate(tails):
        with_tails += addresses[position * width : (position + 1) * width]
        with_tails.append(tail)
    return with_tails, (sizes[:width] + tail_sizes[:1]) * len(tails), width + 1


def whole(codes: list[int], count: int) -> list[int]:
    """A short answer tells nothing about any page."""
    return codes if len(codes) == count else [-1] * count


def _nested(flat: Sequence[int], width: int) -> list[Sequence[int]]:
    return [flat[start : start + width] for start in range(0, len(flat), width)]


def _object_size(replicas: Iterable[Any]) -> int:
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
        if replica.is_disk_replica():
            return int(replica.get_disk_descriptor().object_size)
    return 0


def unavailable(code: int, verb: str, master: str) -> BackendUnavailable:
    """Make the error of an operator's verb that met no answer, or readers that do not let go."""
    if code == OBJECT_HAS_LEASE:
        remedy = "Do it again when fewer engines run."
    else:
        remedy = "Start mooncake_master there, or run: hicache doctor mooncake"
    kind = BackendTimeout if code in (RPC_TIMEOUT, OBJECT_HAS_LEASE) else BackendUnavailable
    return kind(f"'mooncake' could not {verb}", value=f"master {master}: {code_text(code)}", remedy=remedy)
