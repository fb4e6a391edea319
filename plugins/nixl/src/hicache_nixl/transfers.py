"""One transfer between memory and files, from registration to the end."""

from __future__ import annotations

from hicache_nixl._native import Agent, Rows, TransferFailed
from hicache_nixl.places import Moving, Ranges


def transfer(agent: Agent, verb: str, batch: Moving, files: Rows, ranges: Ranges) -> bool:
    """Register files, move bytes, and return when nothing moves any more, whenever that is (C11: hold).

    Returns: False where it failed, of which NIXL tells no more. The agent is spent then, unless NIXL had
        refused to begin.
    """
    try:
        registered = agent.register("FILE", files)
    except TransferFailed:
        return False
    try:
        try:
            running = agent.start(verb, (batch.kind, ranges.local), ("FILE", ranges.remote))
            in_time = running.wait(batch.deadline, hold=True)
        except BaseException:  # Ctrl-C, say; the slots are the caller's again when this returns
            agent.spent = True
            agent.outlast()
            raise
        finally:
            agent.forget(registered)
    except TransferFailed:
        agent.spent = True
        return False
    if running.failed or not in_time:
        agent.spent = True
    return not running.failed
