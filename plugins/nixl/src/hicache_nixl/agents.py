"""The agents of one storage: lent to one thread at a time, made anew when spent, left behind when stuck.

One agent a running transfer, for two reasons. NIXL's POSIX queue is locked
while it submits, and a buffered submission is the whole copy, so threads on one
agent would take turns. And an agent that ran over a deadline or failed is
thrown away; nobody else may be on it.

Ownership of memory (C11): an agent that is abandoned with transfers in flight
stays referenced here, with its registrations and private memory, until each
transfer has ended by itself; only then is it destroyed, since NIXL's destructor
waits for them and would hold up the interpreter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from hicache_core.errors import BackendTimeout, BackendUnavailable, StorageClosed
from hicache_core.memory import HostPool
from hicache_nixl._native import Agent, Region, Transfer

#: Agents kept for later calls; each holds a kernel queue and its list of requests.
MAX_IDLE = 4
#: Agents in use at a time; more callers wait. Linux allows 65,536 AIO slots a machine, an agent takes 256.
MAX_AGENTS = 32
#: Calls left behind at a time (C11); beyond that the store is stuck and says so at once.
MAX_ABANDONED = 4

_FIRST_LOOK_S = 0.01
_LONGEST_LOOK_S = 0.25


class Agents:
    """Thread-safe; ``take`` and ``give`` in pairs, or ``abandon`` in place of ``give``."""

    def __init__(self, make: Callable[[], Agent]) -> None:
        self._make = make
        self._changed = threading.Condition(threading.Lock())
        self._idle: list[Agent] = []
        self._busy: set[Agent] = set()
        self._abandoned: list[tuple[Agent, Sequence[Transfer]]] = []
        self._regions: dict[str, tuple[Region, ...]] = {}
        self._closed = False

    @property
    def abandoned(self) -> int:
        """How many calls were left behind and still run."""
        return len(self._abandoned)

    def know(self, pools: Iterable[HostPool]) -> None:
        """Have these pools' memory, and no other, registered with every agent that is lent from now on."""
        regions = regions_of(pools)
        with self._changed:
            self._regions = regions
            idle, self._idle = self._idle, []
            self._busy.update(idle)
        for agent in idle:
            self.give(agent)

    def take(self, deadline: float) -> Agent:
        """Lend an agent.

        Raises:
            BackendUnavailable: MAX_ABANDONED calls are left behind, or no agent can be made.
            BackendTimeout: all are in use until the deadline.
            StorageClosed: close() was called.
        """
        with self._changed:
            while True:
                if self._closed:
                    raise StorageClosed("nixl")
                if len(self._abandoned) >= MAX_ABANDONED:
                    raise _stuck(len(self._abandoned))
                if self._idle:
                    agent = self._idle.pop()
                    self._busy.add(agent)
                    return agent
                if len(self._busy) < MAX_AGENTS:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    raise BackendTimeout(
                        "all agents of 'nixl' are in use",
                        value=f"{MAX_AGENTS} calls",
                        remedy="Raise timeout_s.",
                    )
                self._changed.wait(left)
            regions = self._regions
        agent = self._make()
        try:
            _register(agent, regions)
            with self._changed:
                self._busy.add(agent)
                current = self._regions
            if current is not regions:
                _register(agent, current)
        except BaseException:
            self._discard(agent)
            raise
        return agent

    def give(self, agent: Agent) -> None:
        """Take an agent back; a spent one, or one too many, is closed."""
        while True:
            with self._changed:
                regions = self._regions
                closes = self._closed or agent.spent or len(self._idle) >= MAX_IDLE
                if closes or agent.regions is regions:
                    self._busy.discard(agent)
                    if not closes:
                        self._idle.append(agent)
                    self._changed.notify()
                    break
            try:
                _register(agent, regions)
            except BackendUnavailable:  # a new agent will meet the same trouble and report it
                agent.spent = True
            except BaseException:
                self._discard(agent)
                raise
        if closes:
            agent.close()
        return None

    def _discard(self, agent: Agent) -> None:
        """Close an agent of which nobody knows what is registered with it."""
        agent.spent = True
        self.give(agent)

    def abandon(self, agent: Agent, transfers: Sequence[Transfer]) -> None:
        """Leave an agent to its transfers; it is closed when the last of them has ended. Once is enough."""
        with self._changed:
            if agent not in self._busy:
                return
            self._busy.discard(agent)
            self._abandoned.append((agent, transfers))
            first = len(self._abandoned) == 1
            self._changed.notify()
        if first:
            threading.Thread(target=self._await_abandoned, name="hicache-nixl-abandoned", daemon=True).start()

    def close(self) -> None:
        """Close what is idle; what is in use or abandoned is closed when it comes to its end."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for agent in idle:
            agent.close()

    def leak(self) -> None:
        """Give up everything without a lock and without a destructor: for the child of a fork."""
        for agent in [*self._idle, *self._busy, *(agent for agent, _ in self._abandoned)]:
            agent.leak()
        self._changed = threading.Condition(threading.Lock())
        self._idle, self._busy, self._abandoned = [], set(), []
        self._closed = True

    def _await_abandoned(self) -> None:
        pause = _FIRST_LOOK_S
        while True:
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_LOOK_S)
            ended = [entry for entry in list(self._abandoned) if all([each.poll() for each in entry[1]])]
            for agent, _ in ended:
                agent.close()
            with self._changed:
                self._abandoned = [entry for entry in self._abandoned if entry not in ended]
                if not self._abandoned:
                    return


def regions_of(pools: Iterable[HostPool]) -> dict[str, tuple[Region, ...]]:
    """Give the disjoint regions, by kind of memory, that cover all pools.

    Pools may overlap (a head group or layer range of the same memory), regions
    must not: NIXL then finds the smaller one only.
    """
    spans: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for pool in pools:
        spans.setdefault(memory_kind(pool), []).extend((a, a + n) for a, n in pool.regions())
    regions: dict[str, list[Region]] = {"DRAM": []}
    for (kind, device), found in spans.items():
        merged: list[tuple[int, int]] = []
        for start, end in sorted(found):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        regions.setdefault(kind, []).extend((start, end - start, device) for start, end in merged)
    return {kind: tuple(found) for kind, found in regions.items()}


def memory_kind(pool: HostPool | None) -> tuple[str, int]:
    """Give NIXL's name of a pool's memory and the device's number."""
    if pool is None or pool.device == "cpu":
        return "DRAM", 0
    number = pool.device.partition(":")[2]
    return "VRAM", int(number) if number.isdigit() else 0


def _register(agent: Agent, regions: dict[str, tuple[Region, ...]]) -> None:
    for kind, wanted in regions.items():
        agent.register_pools(kind, wanted)
    agent.regions = regions


def _stuck(count: int) -> BackendUnavailable:
    return BackendUnavailable(
        "'nixl' does not answer",
        value=f"{count} calls are left behind",
        remedy="Look at the store; calls work again once it answers or these calls end.",
    )
