"""`hicache replay` with two workers: each finds what the other stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache_mooncake._servers import Master

pytest.importorskip("hicache_cli")

#: An odd number, so that with two workers taking turns a conversation changes hands at every turn.
CONVERSATIONS, TURNS, BLOCKS = 41, 5, 4
TRACE_REQUESTS = 2000


@pytest.fixture
def conversation_trace() -> Path:
    """The published hour of conversations; test data kept beside the project."""
    named = os.environ.get("HICACHE_TRACE")
    shared = Path(__file__).parents[4] / "shared" / "traces" / "conversation_trace.jsonl"
    path = Path(named) if named else shared
    if not path.is_file():
        pytest.skip("no conversation_trace.jsonl; name one in HICACHE_TRACE")
    return path


def replay(master: Master, trace: Path, segment_size: str, *arguments: str) -> dict[str, Any]:
    """Run the command with two workers, and give its report."""
    command = [sys.executable, "-c", "from hicache_cli.main import main; main()"]
    command += [
        "replay",
        "--backend",
        "mooncake",
        "--workers",
        "2",
        "--trace",
        str(trace),
        "--json",
        *arguments,
    ]
    options = {"master": master.address, "metrics": master.metrics, "segment_size": segment_size}
    for name, value in options.items():
        command += ["--option", f"{name}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def hits(requests: Sequence[Sequence[Any]], stores: int) -> int:
    """Count leading blocks that were brought before, where requests are dealt to this many stores in turn."""
    seen: list[set[Any]] = [set() for _ in range(stores)]
    count = 0
    for number, blocks in enumerate(requests):
        mine = seen[number % stores]
        count += next((run for run, block in enumerate(blocks) if block not in mine), len(blocks))
        mine.update(blocks)
    return count


def test_two_workers_find_each_others_pages(own_master, tmp_path):
    trace = tmp_path / "trace.jsonl"
    requests = []
    with trace.open("w") as file:
        for turn in range(TURNS):
            for conversation in range(CONVERSATIONS):
                blocks = [conversation * 1000 + i for i in range((turn + 1) * BLOCKS)]
                requests.append(blocks)
                line = {"timestamp": turn * 1000 + conversation, "hash_ids": blocks}
                file.write(json.dumps(line | {"input_length": len(blocks) * 512, "output_length": 1}) + "\n")
    report = replay(own_master, trace, "64mib")
    most = hits(requests, 1)
    assert (report["workers"], report["requests"], report["wrong_pages"]) == (2, CONVERSATIONS * TURNS, 0)
    assert 0.9 * most <= report["hit_blocks"] <= most
    assert own_master.admin.usage("").pages == 0


@pytest.mark.timeout(300)
def test_two_workers_find_each_others_pages_of_the_conversation_trace(own_master, conversation_trace):
    with conversation_trace.open() as file:
        requests = [
            json.loads(line)["hash_ids"] for line, _ in zip(file, range(TRACE_REQUESTS), strict=False)
        ]
    most, alone = hits(requests, 1), hits(requests, 2)
    report = replay(own_master, conversation_trace, "768mib", "--limit", str(TRACE_REQUESTS))
    assert (report["workers"], report["requests"], report["wrong_pages"]) == (2, TRACE_REQUESTS, 0)
    # Workers that found only their own pages would have two thirds of the hits.
    assert alone < 0.7 * most
    assert 0.99 * most <= report["hit_blocks"] <= most
    assert report["verified_pages"] == report["hit_blocks"]
    assert report["trouble"] == []
