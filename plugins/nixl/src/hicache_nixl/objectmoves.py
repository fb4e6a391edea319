"""Moving objects between S3 and private memory: a transfer an object, and who walks away from it.

NIXL tells of one failure for all of a transfer, and at once, while the others
still write into their memory; so each object is a transfer of its own. At the
deadline the calling thread walks away (C11: bounce). The agent keeps its private
memory until the SDK has given up, after 25 s and more, and is closed then; a
server that refuses connections is found out at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hicache_core import Status
from hicache_core.errors import BackendTimeout, BackendUnavailable
from hicache_nixl._native import Agent, Scratch, Transfer, TransferFailed
from hicache_nixl.agents import Agents
from hicache_nixl.s3 import Bucket

#: How long a transfer may be silent before S3 is asked whether it is there at all.
_SUSPECT_S = 0.25
_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.002


class ObjectMover:
    """Moves objects for one storage; thread-safe, since agents carry what changes."""

    def __init__(self, agents: Agents, bucket: Bucket, probe: str) -> None:
        """Ask ``bucket`` for the key ``probe`` when a transfer is silent."""
        self._agents = agents
        self._bucket = bucket
        self._probe = probe

    def move(
        self, agent: Agent, verb: str, names: Sequence[str], memory: Scratch, stride: int, deadline: float
    ) -> tuple[set[int], dict[int, Status]]:
        """Move objects, a transfer each: give the slots that failed, and those that did not end in time.

        With such slots the agent has been left behind with them, as it has when this is interrupted. Without,
        the caller gives it back once it is done with its memory: from then on that is another's.
        """
        running: dict[int, Transfer] = {}
        try:
            return self._move(agent, verb, names, memory, stride, deadline, running)
        except BaseException:  # Ctrl-C, say
            agent.spent = True
            self._agents.abandon(agent, [*running.values(), *filter(None, [agent.latest])])
            raise

    def _move(
        self,
        agent: Agent,
        verb: str,
        names: Sequence[str],
        memory: Scratch,
        stride: int,
        deadline: float,
        running: dict[int, Transfer],
    ) -> tuple[set[int], dict[int, Status]]:
        first = agent.next_objects(len(names))
        rows = [(0, stride, first + slot, name) for slot, name in enumerate(names)]
        failed: set[int] = set()
        try:
            registration = agent.register("OBJ", rows)
        except TransferFailed:
            agent.spent = True
            return set(range(len(names))), {}
        for slot in range(len(names)):
            local = ("DRAM", [(memory.address + slot * stride, stride, 0)])
            try:
                running[slot] = agent.start(verb, local, ("OBJ", [(0, stride, first + slot)]))
            except TransferFailed:
                failed.add(slot)
        trouble = self._await(running, failed, deadline)
        if not running:
            try:
                agent.forget(registration)
            except TransferFailed:
                agent.spent = True
            return failed, {}
        self._agents.abandon(agent, list(running.values()))
        return failed, dict.fromkeys(running, trouble)

    def _await(self, running: dict[int, Transfer], failed: set[int], deadline: float) -> Status:
        """Poll transfers until all have ended or there is no point in waiting; tell what the rest met."""
        pause = _FIRST_PAUSE_S
        quiet_since = time.monotonic()
        while running:
            ended = [slot for slot, transfer in running.items() if transfer.poll()]
            failed |= {slot for slot in ended if running[slot].failed}
            for slot in ended:
                del running[slot]
            now = time.monotonic()
            if ended:
                quiet_since, pause = now, _FIRST_PAUSE_S
                continue
            if now > deadline:
                return Status.TIMEOUT
            if now - quiet_since > _SUSPECT_S:
                quiet_since = now
                if self._refuses_connections(deadline):
                    return Status.UNAVAILABLE
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_S)
        return Status.OK

    def _refuses_connections(self, deadline: float) -> bool:
        """Ask S3 anything, briefly: the SDK retries for 25 s what is refused at once."""
        try:
            self._bucket.head(self._probe, min(deadline, time.monotonic() + _SUSPECT_S))
        except BackendTimeout:
            return False
        except BackendUnavailable:
            return True
        return False
