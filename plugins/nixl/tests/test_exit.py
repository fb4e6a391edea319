"""A process that ends while agents are made and closed ends well."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hicache_core.errors import BackendUnavailable
from hicache_nixl import _native
from hicache_nixl._native import Agent

PROGRAM = """
import json, sys, threading, time
sys.path.insert(0, sys.argv[1])
from nixl_builders import a_config, a_storage, an_arena
from hicache_core.errors import BackendUnavailable
from hicache_nixl._native import Agent

arena, closing, honest = an_arena(1), threading.Event(), Agent.close

def close(agent):
    closing.set()
    honest(agent)

def replace_agents():
    try:
        while True:
            agent = agents.take(time.monotonic() + 5.0)
            agent.spent = True  # as after a failed transfer
            agents.give(agent)
    except BackendUnavailable:
        pass  # the interpreter ends

Agent.close = close
storage = a_storage(a_config(5.0), **json.loads(sys.argv[2]))
storage.open([arena.pool])
agents = storage._store._agents
threading.Thread(target=replace_agents, daemon=True).start()
closing.wait()
"""


@pytest.mark.slow
def test_a_process_that_ends_while_agents_are_made_and_closed_is_not_aborted(nixl, seaweed):
    """nixl 1.5.1, OBJ: SIGABRT, "terminate called without an active exception"."""
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), json.dumps(seaweed.options())]
    for _ in range(5):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "terminate called" in done.stderr) == (0, False), done.stderr


class _Slow(dict[str, object]):
    """What an agent has registered, given back when the test says so."""

    def __init__(self, begun: threading.Event, goes_on: threading.Event) -> None:
        super().__init__(DRAM={})
        self._begun, self._goes_on = begun, goes_on

    def __iter__(self):
        self._begun.set()
        assert self._goes_on.wait(10)
        return iter(())


class _NoNixl:
    """A NIXL that must not be asked for anything."""

    nixl_thread_sync_t = type("Sync", (), {"NIXL_THREAD_SYNC_RW": 0})
    __name__ = "no_nixl"


def an_agent(regions: dict[str, object]) -> Agent:
    agent = Agent.__new__(Agent)
    agent._regions, agent._scratch, agent._latest, agent._agent = regions, None, None, object()
    return agent


def test_the_end_waits_for_a_closing_and_lets_none_begin(monkeypatch):
    monkeypatch.setattr(_native, "_ending", threading.Event())
    begun, goes_on = threading.Event(), threading.Event()
    closed, late = an_agent(_Slow(begun, goes_on)), an_agent({})
    closer = threading.Thread(target=closed.close)
    end = threading.Thread(target=_native._wait_for_others)
    closer.start()
    assert begun.wait(10)
    end.start()
    assert _native._ending.wait(10)
    late.close()
    assert "_agent" in vars(late), "an agent was closed beside the end of the interpreter"
    assert end.is_alive(), "the end did not wait"
    with pytest.raises(BackendUnavailable, match="The interpreter ends"):
        Agent(_NoNixl(), "POSIX", {})
    goes_on.set()
    end.join(10)
    closer.join(10)
    assert (end.is_alive(), "_agent" in vars(closed), _native._at_work) == (False, False, set())
