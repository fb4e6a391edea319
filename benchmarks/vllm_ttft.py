"""Time to first token of a vLLM that finds its prompts in a hicache store, beside one that computes them.

    .ci/env/vllm bench [--backend file|mooncake] [--rounds 3]

One job: a model of 51 million random weights, three prompts of about 3,000 tokens that
share no block, prefix caching off. Each column is a fresh process on both cores: ``plain``
has no tier, ``cold`` a tier over an empty store, ``warm`` the same store as ``cold`` left
it. Best of three prompts for each column; ids must be equal in all. The goal: warm is at
least 4 times shorter than cold. What limits it is vLLM's own: reading a page needs two
steps of the scheduler (look up, promote), and copying it to the KV cache one more; the
last, partial block is always computed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "packages/hicache-vllm/tests"
sys.path[:0] = [str(TESTS), str(TESTS / "cpu")]

from vllm_model import make_model  # noqa: E402

FLOOR = 4.0
#: Idle OpenMP threads sleep, in every column; awake, they keep both cores from the store and its server.
WAITING = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}
WORDS = ("value", "price", "count", "depth", "width", "speed")


def prompt(word: str) -> str:
    """Give about 3,000 tokens, one a byte."""
    text = "".join(f"[{i}] the {word} of item {i * i % 97} is {i * 7919 % 1000}. " for i in range(90))
    return f"{text}What is the {word}?"


def run(model: str, tier: dict[str, Any] | None, rounds: int, warm_up: str) -> list[dict[str, Any]]:
    """Answer the prompts in a fresh process, one token each, after an unrelated one of the same length."""
    steps = [
        {"prompts": [prompt(warm_up)], "tokens": 1},
        {"prompts": [prompt(word) for word in WORDS[:rounds]], "tokens": 1},
    ]
    wanted = {"model": model, "tier": tier, "steps": steps, "cpu_bytes": 256 << 20}
    path = [str(TESTS / "cpu"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": str(os.cpu_count())}
    variables |= WAITING
    command = [sys.executable, str(TESTS / "cpu" / "vllm_engine.py"), json.dumps(wanted)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    answers: list[dict[str, Any]] = json.loads(lines[-1].removeprefix("RESULT "))["steps"][1]
    return answers


@contextlib.contextmanager
def store(backend: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Give the options of a store that is empty."""
    if backend == "file":
        yield {"root": str(folder / "kv")}
        return
    from hicache_mooncake.harness import MooncakeHarness

    harness = MooncakeHarness({"checksum": True})
    harness.start()
    try:
        yield harness.options()
    finally:
        harness.stop()


def main() -> int:
    """Print the table; give 1 below the floor."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--backend", default="file", choices=["file", "mooncake"])
    arguments.add_argument("--rounds", type=int, default=3)
    chosen = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name, store(chosen.backend, Path(name)) as options:
        model = make_model(Path(name) / "model", "small")
        tier = {"type": "hicache", "backend": chosen.backend, "options": options}
        columns = {
            "plain": run(model, None, chosen.rounds, "wealth"),
            "cold": run(model, tier, chosen.rounds, "health"),
            "warm": run(model, tier, chosen.rounds, "stealth"),
        }
    ids = [[answer["ids"] for answer in answers] for answers in columns.values()]
    assert ids[0] == ids[1] == ids[2], "answers differ"
    best = {name: min(answer["seconds"] for answer in answers) for name, answers in columns.items()}
    for name, answers in columns.items():
        every = ", ".join(f"{answer['seconds']:.3f}" for answer in answers)
        cached, tokens = (sum(answer[key] for answer in answers) for key in ("cached", "prompt"))
        sys.stdout.write(f"{name:6} {best[name]:.3f} s, best of {every}; {cached} of {tokens} tokens found\n")
    ratio = best["cold"] / best["warm"]
    tax = best["cold"] / best["plain"] - 1
    sys.stdout.write(
        f"{chosen.backend}: warm {ratio:.1f} times shorter (floor {FLOOR}); cold {tax:+.0%} of plain\n"
    )
    return int(ratio < FLOOR)


if __name__ == "__main__":
    sys.exit(main())
