"""`hicache replay` with two workers: each finds what the other stored."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("hicache_cli")

#: An odd number, so that with two workers taking turns a conversation changes hands at every turn.
CONVERSATIONS, TURNS, BLOCKS = 41, 5, 4


def test_two_workers_find_each_others_pages(own_master, tmp_path):
    trace = tmp_path / "trace.jsonl"
    with trace.open("w") as file:
        for turn in range(TURNS):
            for conversation in range(CONVERSATIONS):
                blocks = [conversation * 1000 + i for i in range((turn + 1) * BLOCKS)]
                line = {"timestamp": turn * 1000 + conversation, "hash_ids": blocks}
                file.write(json.dumps(line | {"input_length": len(blocks) * 512, "output_length": 1}) + "\n")
    command = [sys.executable, "-c", "from hicache_cli.main import main; main()"]
    command += ["replay", "--backend", "mooncake", "--workers", "2", "--trace", str(trace), "--json"]
    options = {"master": own_master.address, "metrics": own_master.metrics, "segment_size": "64mib"}
    for name, value in options.items():
        command += ["--option", f"{name}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    most = CONVERSATIONS * BLOCKS * sum(range(TURNS))
    assert (report["workers"], report["requests"], report["wrong_pages"]) == (2, CONVERSATIONS * TURNS, 0)
    assert 0.9 * most <= report["hit_blocks"] <= most
    assert own_master.admin.usage("").pages == 0
