"""SGLang's own HiCacheNixl under the suite: `hicache check --sglang-class` with NIXL beside SGLang.

Run by an interpreter that has SGLang and hicache::

    python sglang_nixl.py SITE [ARGUMENTS OF hicache check]

SITE is a site-packages folder with nixl_cu12 and xxhash, which come from there alone: SGLang's own
dependencies stay as they are. Their class runs unchanged, over NIXL's POSIX plugin and real files. The
variable HICACHE_TEST_NIXL_EXTRA holds JSON that is merged into its extra_config; with
HICACHE_TEST_NIXL_SINGLY=1 its gets are cut into one a page, so that one missing page hides nothing else.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CLASS = "sglang.srt.mem_cache.storage.nixl.hicache_nixl:HiCacheNixl"
EXTRA_VARIABLE = "HICACHE_TEST_NIXL_EXTRA"
SINGLY_VARIABLE = "HICACHE_TEST_NIXL_SINGLY"
#: Their names in a site-packages folder -> as SGLang imports them.
_WANTED = {"nixl_cu12": "nixl", "xxhash": "xxhash", "numpy.libs": "numpy.libs"}


def __getattr__(name: str) -> Any:
    """Make ``Singly`` on demand: only the suite's process has SGLang and NIXL at hand."""
    if name != "Singly":
        raise AttributeError(name)
    theirs = importlib.import_module(CLASS.partition(":")[0]).HiCacheNixl

    class Singly(theirs):  # type: ignore[misc]
        def __init__(self, config: Any, _extra: Any, *, file_path: str) -> None:  # as SGLang's dynamic ones
            super().__init__(config, file_path)

        def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
            each = len(host_indices) // max(1, len(keys))
            found = []
            for at, key in enumerate(keys):
                indices = host_indices[at * each : (at + 1) * each]
                found += super().batch_get_v1([key], indices, extra_info)
            return found

    return Singly


def beside(site: Path, folder: Path) -> None:
    """Link what NIXL consists of, and nothing else, into a folder."""
    for found in (*site.glob("nixl_cu12*"), *site.glob(".nixl_cu12*")):
        (folder / found.name).symlink_to(found)
    for name, alias in _WANTED.items():
        if (site / name).exists():
            (folder / alias).symlink_to(site / name)


def main() -> int:
    site, *arguments = sys.argv[1:]
    extra = {"plugin": {"posix": {"active": "true"}}, "use_direct_io": False}
    extra |= json.loads(os.environ.get(EXTRA_VARIABLE, "{}"))
    with tempfile.TemporaryDirectory(prefix="hicache-sglang-nixl-") as folder:
        beside(Path(site).resolve(), Path(folder))
        here = str(Path(__file__).parent)
        paths = [path for path in (os.environ.get("PYTHONPATH"), folder, here) if path]
        target = "sglang_nixl:Singly" if os.environ.get(SINGLY_VARIABLE) else CLASS
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "hicache_cli.main", "check", "--sglang-class", target]
        command += ["-o", "calls=v1", "-o", f"extra_config={json.dumps(extra)}"]
        command += ["-o", f"arguments={json.dumps({'file_path': '{tmp}'})}"]
        return subprocess.run([*command, *arguments], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
