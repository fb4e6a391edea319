"""Start-up, as whole processes: what a program pays for hicache before it does anything.

    python benchmarks/startup.py [--rounds 20] [--json]

Each pair is ours against a thing that everybody has; both run in every round,
the order rotates, and the ratio is taken round by round. Bytecode is written by
one run of each before the first round. The goal is in PAIRS: the floor must
hold, the stretch is wanted; below the floor the exit status is 1.

What limits each, on CPython 3.11 and two cores: `import hicache_core` takes 0.7 times
pluggy's time, since names load on first use and importlib.metadata on the first scan.
`hicache backends` takes 1.9 times with two backends and 2.1 with eight. Beyond
click and rich (its opponent, 62 ms) it pays 19 ms for importlib.metadata, 5 ms for
the metadata of the installed distributions, 14 ms for the loader and what it
imports of the contract, under 1 ms for each backend's spec, and 10 ms for drawing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True)
class Pair:
    """Ours, theirs, and at most how many times theirs ours may take."""

    name: str
    ours: tuple[str, ...]
    against: tuple[str, ...]
    floor: float
    stretch: float


PAIRS = (
    Pair("import hicache_core", ("-c", "import hicache_core"), ("-c", "import pluggy"), 3.0, 2.0),
    Pair(
        "hicache backends",
        ("-c", "import sys; sys.argv[1:] = ['backends']; from hicache_cli.main import main; main()"),
        ("-c", "import click, rich.table"),
        3.0,
        2.0,
    ),
)


def seconds(arguments: tuple[str, ...]) -> float:
    """Run one interpreter and give the wall-clock seconds from its start to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


@dataclass(frozen=True)
class Row:
    """One pair's result: medians, and the ratio with its ends."""

    what: str
    against: str
    ours_ms: float
    against_ms: float
    ratio: float
    low: float
    high: float
    floor: float
    stretch: float


def measure(rounds: int) -> list[Row]:
    """Run all pairs and give a row for each."""
    sides = [(pair, side) for pair in PAIRS for side in ("ours", "against")]
    taken: dict[tuple[str, str], list[float]] = {(pair.name, side): [] for pair, side in sides}
    for pair, side in sides:
        seconds(getattr(pair, side))
    for number in range(rounds):
        turn = number % len(sides)
        for pair, side in sides[turn:] + sides[:turn]:
            taken[pair.name, side].append(seconds(getattr(pair, side)))
    rows = []
    for pair in PAIRS:
        ours, against = taken[pair.name, "ours"], taken[pair.name, "against"]
        ratios = sorted(a / b for a, b in zip(ours, against, strict=True))
        rows.append(
            Row(
                what=pair.name,
                against=" ".join(pair.against[1:]),
                ours_ms=median(ours) * 1e3,
                against_ms=median(against) * 1e3,
                ratio=median(ratios),
                low=ratios[0],
                high=ratios[-1],
                floor=pair.floor,
                stretch=pair.stretch,
            )
        )
    return rows


def main() -> int:
    """Measure, print, and say by the exit status whether every floor holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.rounds)
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    else:
        for row in rows:
            sys.stdout.write(
                f"{row.what}: {row.ours_ms:.1f} ms, {row.ratio:.2f} times ({row.low:.2f}-{row.high:.2f}) "
                f"'{row.against}' ({row.against_ms:.1f} ms); floor {row.floor:g}, stretch {row.stretch:g}\n"
            )
    return int(any(row.ratio > row.floor for row in rows))


if __name__ == "__main__":
    sys.exit(main())
