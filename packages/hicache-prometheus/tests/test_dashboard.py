"""Every query of the dashboard asks for names and labels that a real scrape has."""

from __future__ import annotations

import json
import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hicache_core import Status
from hicache_prometheus.exporter import dashboard
from hicache_prometheus.serving import Collector

FUNCTIONS = {"sum", "max", "rate", "increase", "histogram_quantile", "by", "label_values"}


def queries() -> list[str]:
    page = json.loads(dashboard())
    found = [target["expr"] for panel in page["panels"] for target in panel["targets"]]
    return found + [v["query"] for v in page["templating"]["list"] if v["type"] == "query"]


@pytest.fixture
def offered(recorder, open_cache, pool, script) -> dict[str, set[str]]:
    """Sample name -> labels, from a scrape of a cache that did everything."""
    script["get"] = lambda keys: [Status.CORRUPT] * len(keys)
    cache = open_cache()
    cache.set(["a"], pool.pages([0]))
    cache.get(["a"], pool.pages([0]))
    cache.exists(["a"])
    registry = CollectorRegistry()
    registry.register(Collector(recorder))
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


def wrong(query: str, offered: dict[str, set[str]]) -> list[str]:
    """Name what a query asks for in vain."""
    bare = re.sub(r'"[^"]*"', '""', query)
    found: list[str] = []
    metrics = set(re.findall(r"\bhicache_\w+", bare))
    found += sorted(metrics - set(offered))
    known = set().union(*(offered.get(name, set()) for name in metrics))
    for name, selector in re.findall(r"\b(hicache_\w+)\{([^}]*)\}", bare):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        found += sorted(f"{name}{{{label}}}" for label in labels - offered.get(name, set()))
    for labels in re.findall(r"\bby \(([^)]*)\)", bare):
        found += sorted(set(re.split(r",\s*", labels)) - known)
    words = set(re.findall(r"\b([a-z_]+)\s*\(", bare))
    return found + sorted(words - FUNCTIONS)


def test_every_query_asks_for_what_is_there(offered):
    asked = queries()
    assert len(asked) > 15
    assert [(query, bad) for query in asked if (bad := wrong(query, offered))] == []


def test_every_metric_is_on_the_dashboard(offered):
    asked = " ".join(queries())
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in offered}
    assert sorted(name for name in families if name not in asked) == []


@pytest.mark.parametrize(
    ("query", "bad"),
    [
        ("sum by (backend) (rate(hicache_page_total[5m]))", ["hicache_page_total", "backend"]),
        ('sum by (model) (hicache_breakers{state="open"})', ["model"]),
        ('hicache_breakers{status="open"}', ["hicache_breakers{status}"]),
        ("average(hicache_breakers)", ["average"]),
    ],
)
def test_the_check_finds_what_is_wrong(offered, query, bad):
    assert wrong(query, offered) == bad


def test_statuses_that_the_dashboard_leaves_out_as_good_exist():
    named = {
        word
        for query in queries()
        for words in re.findall(r'status!?=~?"([^"]+)"', query)
        for word in words.split("|")
    }
    assert named <= {status.name.lower() for status in Status}
    assert "ok" in named
