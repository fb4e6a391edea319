"""Keeps a report of the suite for the table of levels: `python docs/tools/report.py NAME REPORT.json`.

Kept is what a table needs and what does not change from run to run: versions
and verdicts, no seconds, no seed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REPORTS = Path(__file__).resolve().parent.parent / "conformance"


def kept(report: dict[str, Any]) -> dict[str, Any]:
    """Give the part of a report that is kept."""
    backend, versions = report["backend"], report["versions"]
    native = [f"{name} {version}" for name, version in sorted(backend["native"].items()) if version]
    return {
        "backend": backend["name"],
        "distribution": backend["distribution"],
        "native": native,
        "python": ".".join(versions["python"].split(".")[:2]),
        "core": versions["core"],
        "suite": versions["suite"],
        "levels": {name: level["verdict"] for name, level in report["levels"].items()},
    }


def main(name: str, file: str) -> None:
    """Write docs/conformance/NAME.json."""
    REPORTS.mkdir(exist_ok=True)
    report = json.loads(Path(file).read_text(encoding="utf-8"))
    text = json.dumps(kept(report), indent=1)
    (REPORTS / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
