"""`hicache replay` and the metrics count the same, in one process and in several, read meanwhile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("hicache_cli", reason="the hicache command is not installed")
pytest.importorskip("hicache_file", reason="the file backend is not installed")

#: What the report calls a lookup, a HiCache calls exists; a report counts a lookup's first missing page only.
VERBS = {"get": "get", "set": "set", "contains": "exists"}


def total(text: str, name: str, **labels: str) -> float:
    """Add up a metric's samples that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


@pytest.fixture
def url(tmp_path):
    """The exporter as a process of its own."""
    (tmp_path / "metrics").mkdir()
    command = [
        sys.executable,
        "-m",
        "hicache_cli.main",
        "exporter",
        "--port",
        "0",
        "--dir",
        f"{tmp_path}/metrics",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield re.search(r"http://\S+", server.stderr.readline())[0]
        finally:
            server.terminate()
            server.wait(10)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_metrics_are_what_the_replay_reports(url, tmp_path, workers):
    arguments = [
        "--limit",
        "400",
        "--workers",
        str(workers),
        "--page-bytes",
        "4kib",
        "--capacity-pages",
        "700",
    ]
    command = [sys.executable, "-m", "hicache_cli.main", "replay", *arguments, "--json"]
    environment = os.environ | {"HICACHE_PROMETHEUS_DIR": f"{tmp_path}/metrics"}
    texts = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as replay:
        while replay.poll() is None:
            texts.append(scrape(url))
        report = json.loads(replay.stdout.read())
    assert replay.returncode == 0
    assert len(texts) >= 3

    text = scrape(url)
    for name, verb in VERBS.items():
        reported = report["verbs"][name]
        assert reported["batches"] == total(text, "hicache_operations_total", verb=verb)
        assert reported["nbytes"] == (
            0 if verb == "exists" else total(text, "hicache_bytes_total", verb=verb)
        )
        for status, pages in reported["statuses"].items():
            if (verb, status) != ("exists", "MISS"):
                counted = total(text, "hicache_pages_total", verb=verb, status=status.lower())
                assert pages == counted, (verb, status)
        asked = total(text, "hicache_pages_total", verb=verb)
        assert verb == "exists" or asked == sum(reported["statuses"].values())
        assert total(text, "hicache_operation_seconds_count", verb=verb) == reported["batches"]
    assert report["verbs"]["set"]["nbytes"] > 700 * 4096, "the load must not fit, so that there are misses"
    # Scrapes during the load only ever grew, up to the last one.
    series = [total(each, "hicache_operations_total") for each in [*texts, text]]
    assert series == sorted(series)
