"""Runs the benchmarks of this folder: `hatch run bench [NAME ...] [-- OPTION ...]`.

Without names, every one that this environment can run: each script says in its
docstring what it compares, what the goal is, and what limits it. Ratios are
taken within one run, so a noisy machine costs precision and not truth; close
other work all the same. Exit status 1 when some script did not reach its floor.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

#: Scripts that need an environment of their own; named explicitly they run anywhere.
APART = ("mooncake_", "nixl_", "sglang_", "lmcache_", "aibrix_", "vllm_")


def main(arguments: list[str]) -> int:
    """Run the named scripts, or all; return the exit status."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    names, options = arguments[:split], arguments[split + 1 :]
    known = {file.stem: file for file in sorted(HERE.glob("[a-z]*.py"))}
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.stderr.write(f"no benchmark {', '.join(unknown)}; there are: {', '.join(known)}\n")
        return 2
    chosen = names or [name for name in known if not name.startswith(APART)]
    failed = []
    for name in chosen:
        sys.stdout.write(f"== {name}\n")
        sys.stdout.flush()
        if subprocess.run([sys.executable, str(known[name]), *options], check=False).returncode:
            failed.append(name)
    if failed:
        sys.stdout.write(f"below a floor, or broken: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
