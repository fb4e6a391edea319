"""Writes the tables in docs/ from what the tests see: releases, pools, and SGLang's own file backend.

.ci/env/sglang docs
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs"
WHEELS, ENGINE = os.environ["HICACHE_CI_SGLANG_WHEELS"], os.environ["HICACHE_CI_SGLANG_ENGINE"]
CLASS = "sglang.srt.mem_cache.hicache_storage:HiCacheFile"

sys.path[:0] = [str(HERE), str(HERE / "cpu")]
from conftest import STAND_INS  # noqa: E402

from hicache_sglang.versions import CHANGES, RELEASES  # noqa: E402

RELEASES_TEXT = """Each release is its real wheel; its factory constructs the adapter, its controller's own
methods and its host pools' own accessors drive it, over a store in memory. `generic` and `zero-copy` are
the two sets of calls for KV pages; a cell is `ok` where every page came back byte for byte and no other
page was touched.
"""
POOLS_TEXT = """SGLang 0.5.23, its real UnifiedRadixCache and HybridCacheController on a CPU: a prefix is
inserted, backed up to storage, thrown away with its tree and pools, prefetched by fresh ones, loaded back,
and compared byte for byte. `generic` and `zero-copy`: `dynamic` without and with `interface_v1`; `plugin`:
by name.
"""
_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
SIDECARS = (
    "nvfp4 page_first",
    "nvfp4 layer_first",
    "mamba",
    "mamba side states",
    *(f"k only {layout}" for layout in _LAYOUTS),
    *(f"qsa {layout}" for layout in _LAYOUTS),
)
SPLIT = (
    "kv_split",
    "kv_split, index keys",
    "kv_split, index keys, scales",
    "kv_split, packed fp8",
)
REFUSED = ("envelope", "interleaved", "mxfp8", "page_unified")
NOTE = "Written by `.ci/env/sglang docs` from what its run saw; not by hand.\n"


def releases() -> str:
    """One column a release: every row is an outcome of sgl_matrix.py on that wheel."""
    found = {}
    for release in RELEASES:
        path = os.pathsep.join([f"{WHEELS}/{release.version}", os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, str(HERE / "sgl_matrix.py")],
            env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found[release.version] = json.loads(done.stdout.splitlines()[-1])
    names = [name for name in found[RELEASES[-1].version] if name not in ("version", "zero_copy")]
    lines = ["# SGLang releases\n", NOTE]
    lines += [
        RELEASES_TEXT,
        table(["", *found], [[name, *(cell(found[version][name]) for version in found)] for name in names]),
        "\n## What each release changed\n",
        table(["from", "change", "the adapter"], [list(change) for change in CHANGES]),
        "",
    ]
    return "\n".join(lines)


def cell(outcome: str) -> str:
    return {"not in this release": "–", "generic ok; zero-copy ok": "both ok"}.get(outcome, outcome)


def pools() -> str:
    """One row a kind of pool and layout, one column a way in: outcomes of tree_cases.py and pool_cases.py."""
    cases = json.loads(engine("tree_cases.py"))
    others = json.loads(engine("pool_cases.py"))
    ways = ["generic", "zero-copy", "plugin"]
    rows: dict[str, dict[str, str]] = {}
    for name, outcome in cases.items():
        if name.startswith("others"):
            continue
        case, _, way = name.rpartition(" ")
        rows.setdefault(case, {})[way] = (
            "refused: no flat pages" if "no flat pages" in outcome else outcome.split(" (")[0]
        )
    lines = ["# SGLang's host pools\n", NOTE]
    lines += [
        POOLS_TEXT,
        table(
            ["pool and layout", *ways], [[case, *(row[way] for way in ways)] for case, row in rows.items()]
        ),
        "\nSidecar pools of other models, through the adapter alone (`direct`: in place; `flat`: copied):\n",
        table(["pool", "outcome"], [[name, others[name]] for name in SIDECARS]),
        "\nAn NPU's MLA pools in page_first_kv_split, as the KV pool, with interface_v1 (they have no flat\n"
        "pages); every part compared:\n",
        table(["pool", "outcome"], [[name, others[name]] for name in SPLIT]),
        "\nRefused at attach, with the reason:\n",
        table(["pool", "reason"], [[name, others[name]] for name in REFUSED]),
        "\nDeepSeek V4, whose KV pool is a logical anchor without bytes, over its real page-row pools: "
        + ", ".join(f"{layout} {others[f'anchor {layout}']}" for layout in _LAYOUTS)
        + ".",
        "",
    ]
    return "\n".join(lines)


def engine(script: str) -> str:
    path = os.pathsep.join([str(HERE / "cpu"), str(HERE), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {
        "PYTHONPATH": path,
        "HICACHE_CPU_STAND_INS": STAND_INS,
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    done = subprocess.run([ENGINE, str(HERE / "cpu" / script)], env=variables, capture_output=True, text=True)
    return next(line for line in done.stdout.splitlines() if line.startswith("RESULT ")).removeprefix(
        "RESULT "
    )


def report_on_their_file() -> str:
    """Run the suite on SGLang's HiCacheFile, through both sets of calls that it has."""
    reports = {calls: check(calls) for calls in ("generic", "v2")}
    lines = ["# SGLang's HiCacheFile under the suite\n", NOTE, (HERE / "hicachefile.md").read_text()]
    for calls, report in reports.items():
        cases = report["cases"]
        levels = dict.fromkeys(case["level"] for case in cases)
        rows = []
        for level in levels:
            counts = Counter(case["outcome"] for case in cases if case["level"] == level)
            rows.append(
                [
                    level,
                    *(str(counts.get(outcome, 0)) for outcome in ("pass", "fail", "unsupported", "not-run")),
                ]
            )
        lines += [
            f"## Through its {calls} calls\n",
            table(["level", "pass", "fail", "unsupported", "not run"], rows),
            "",
        ]
        failed = [case for case in cases if case["outcome"] == "fail"]
        lines += [table(["failed case", "clauses", "what was seen"], [failure(case) for case in failed]), ""]
    lines.append(f"SGLang 0.5.23, seed {reports['generic']['seed']}.\n")
    return "\n".join(lines)


def check(calls: str) -> dict[str, Any]:
    path = os.pathsep.join(
        [str(HERE / "light"), str(HERE / "cpu"), str(HERE), os.environ.get("PYTHONPATH", "")]
    )
    variables = os.environ | {
        "PYTHONPATH": path,
        "HICACHE_CPU_STAND_INS": STAND_INS,
        "PYTHONWARNINGS": "ignore",
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = "from hicache_cli.main import main; main()"
        subprocess.run(
            [ENGINE, "-c", command, "check", "--sglang-class", CLASS, "-o", f"calls={calls}", "--seed", "1",
             "-o", 'extra_config={"file_storage_path": "{tmp}"}', "--json", str(report), "--budget", "900"],
            env=variables, capture_output=True, text=True,
        )  # fmt: skip
        return json.loads(report.read_text())


def failure(case: dict[str, Any]) -> list[str]:
    seen = next((line[4:] for line in case["detail"].splitlines() if line.startswith("E   ")), "")
    return [f"`{case['id']}`", ", ".join(case["clauses"]), f"`{seen[:110]}`" if seen else ""]


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(text).replace("|", "\\|") for text in line) + " |" for line in lines
    )


def main() -> None:
    wanted = sys.argv[1:] or ["releases", "pools", "hicachefile"]
    makers = {"releases": releases, "pools": pools, "hicachefile": report_on_their_file}
    for name in wanted:
        (DOCS / f"sglang-{name}.md").write_text(makers[name]())


if __name__ == "__main__":
    main()
