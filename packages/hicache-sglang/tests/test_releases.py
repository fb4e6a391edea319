"""Every supported SGLang release: the adapter on its own factory, controller and pools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache_sglang.versions import RELEASES

HERE = Path(__file__).parent
VERSIONS = [release.version for release in RELEASES]
MHA = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA = MHA[:3]


def expected(version: str) -> dict[str, object]:
    release = next(each for each in RELEASES if each.version == version)
    both = "generic ok; zero-copy ok" if release.zero_copy else "generic ok"
    served = "served" if release.seeded else "refused"
    rows = {f"mha {layout}": both for layout in MHA} | {f"mla {layout}": both for layout in MLA}
    if version == "0.5.5":
        rows["mha page_head"] = "not in this release"
    return {
        "version": version,
        "zero_copy": release.zero_copy,
        **rows,
        "layouts share pages": "ok",
        "hole": "ok",
        "answers": "ok",
        "v2": "ok" if "batch_get_v2" in release.verbs else "not in this release",
        "seeded": f"LoRA {served}, salts {served}",
        "plugin": "ok" if release.plugins else "not in this release",
    }


@pytest.fixture(scope="module")
def matrices(wheel):
    """Each release in a process of its own, two at a time; gives what one of them printed."""
    pytest.importorskip("torch")

    def run(version: str) -> str:
        path = os.pathsep.join([str(wheel(version)), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, str(HERE / "sgl_matrix.py")],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()[-1]

    with ThreadPoolExecutor(2) as workers:
        yield {version: workers.submit(run, version) for version in VERSIONS}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", VERSIONS)
def test_release_stores_and_gives_back_pages_through_its_own_calls(version, matrices):
    assert json.loads(matrices[version].result()) == expected(version)
