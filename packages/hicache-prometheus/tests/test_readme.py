"""The README's commands and lines are run as they stand, with the folder moved."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

import hicache_prometheus
from hicache_prometheus.serving import Collector

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_lines_to_mount_run(monkeypatch):
    monkeypatch.setattr(hicache_prometheus.serving, "start_http_server", lambda port, *_, **__: (port, None))
    source = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    scope: dict = {}
    try:
        exec(compile(source, "README.md", "exec"), scope)
        assert callable(scope["app"])
        mounted = [each for each in REGISTRY._collector_to_names if isinstance(each, Collector)]
        assert len(mounted) == 1
    finally:
        for each in [each for each in REGISTRY._collector_to_names if isinstance(each, Collector)]:
            REGISTRY.unregister(each)


@pytest.mark.slow
def test_the_commands_run(tmp_path):
    block = re.search(r"<!-- commands -->\n```sh\n(.*?)```", README, re.DOTALL)[1]
    block = block.replace("/run/hicache", str(tmp_path / "run"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        env=os.environ | {"PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert 'hicache_operations_total{backend="file",component="kv"' in done.stdout
    assert (tmp_path / "hicache-grafana.json").read_text().startswith("{")


def test_the_metrics_of_the_table_are_those_of_a_scrape(recorder, open_cache, pool):
    open_cache().set(["a"], pool.pages([0]))
    offered = {family.name for family in Collector(recorder).collect()}
    table = README[README.index("| metric |") : README.index("The last two lines")]
    named = {name.removesuffix("_total") for name in re.findall(r"`(hicache_\w+)`", table)}
    assert named == offered
