"""What a scraper reads, by prometheus_client's own parser, while calls come in."""

from __future__ import annotations

import json
import threading
import urllib.request
from itertools import pairwise

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hicache_core import BackendUnavailable, Identity, Namespace, Status, observers
from hicache_prometheus import asgi_app, mount, serve, serving
from hicache_prometheus.exporter import exporter
from hicache_prometheus.recorder import Recorder
from hicache_prometheus.serving import Collector

NAMESPACE = Namespace.of(Identity.for_tests()).id


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def value(found, name: str, **labels: str) -> float:
    return found[(name, frozenset({"backend": "toy", "namespace": NAMESPACE, **labels}.items()))]


def scraped(recorder) -> dict:
    registry = CollectorRegistry()
    registry.register(Collector(recorder))
    return samples(generate_latest(registry).decode())


def test_a_scrape_tells_all(recorder, open_cache, pool, script):
    cache = open_cache(model='a "quoted"\nname\\')
    script["set"] = lambda keys: [Status.OK, Status.NO_SPACE]
    cache.set(["a", "b"], pool.pages([0, 1]))
    found = scraped(recorder)
    labels = {"namespace": cache.namespace.id, "component": "kv", "verb": "set"}
    assert value(found, "hicache_operations_total", **labels) == 1
    assert value(found, "hicache_bytes_total", **labels) == 4096
    assert value(found, "hicache_pages_total", status="ok", **labels) == 1
    assert value(found, "hicache_pages_total", status="no_space", **labels) == 1
    assert value(found, "hicache_operation_seconds_count", **labels) == 1
    assert value(found, "hicache_operation_seconds_bucket", le="+Inf", **labels) == 1
    assert 0 < value(found, "hicache_operation_seconds_sum", **labels) < 10
    here = {"namespace": cache.namespace.id}
    assert [value(found, "hicache_breakers", state=s, **here) for s in ("closed", "half-open", "open")] == [
        1,
        0,
        0,
    ]
    assert value(found, "hicache_namespace_pages", **here) == 0
    assert value(found, "hicache_store_bytes", **here) == 123_456
    assert value(found, "hicache_store_capacity_bytes", **here) == 1_000_000
    info = [dict(labels) for name, labels in found if name == "hicache_namespace_info"]
    assert [row["model"] for row in info] == ['a "quoted"\nname\\']


def test_a_store_that_cannot_tell_its_use_is_absent_and_the_rest_is_there(recorder, open_cache, script):
    def broken(keys):
        raise BackendUnavailable("gone")

    script["usage"] = broken
    open_cache().exists(["a"])
    found = scraped(recorder)
    assert value(found, "hicache_operations_total", component="kv", verb="exists") == 1
    assert not [name for name, _ in found if name.startswith("hicache_store")]


def test_a_store_that_hangs_does_not_hang_the_scrape_and_is_asked_once(
    recorder, open_cache, script, monkeypatch
):
    asked, go = [], threading.Event()

    def hang(keys):
        asked.append(1)
        go.wait(30)

    script["usage"] = hang
    monkeypatch.setattr(serving, "PATIENCE_S", 0.01)
    monkeypatch.setattr(serving, "USAGE_S", 0.0)
    open_cache().exists(["a"])
    collector = Collector(recorder)
    for _ in range(3):
        names = {family.name for family in collector.collect() if family.samples}
        assert "hicache_operations" in names
        assert "hicache_store_bytes" not in names
    assert asked == [1]
    go.set()
    collector._asking.join(30)


def test_use_is_asked_again_only_after_a_while(recorder, open_cache, script, monkeypatch):
    asked = []
    script["usage"] = lambda keys: asked.append(1)
    open_cache()
    collector = Collector(recorder)
    for _ in range(3):
        list(collector.collect())
    assert asked == [1]
    monkeypatch.setattr(serving, "USAGE_S", 0.0)
    list(collector.collect())
    assert asked == [1, 1]


def test_mounting_twice_is_refused():
    registry = CollectorRegistry()
    mount(registry)
    with pytest.raises(ValueError, match="in this registry already"):
        mount(registry)


def test_a_server_of_its_own_and_an_asgi_application_serve_the_process_s_counts(open_cache):
    open_cache(tenant="served").exists(["a"])
    namespace = Namespace.of(Identity.for_tests(tenant="served")).id
    server, thread = serve()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
    labels = {"namespace": namespace, "component": "kv", "verb": "exists"}
    assert value(samples(text), "hicache_operations_total", **labels) >= 1
    assert callable(asgi_app())


def test_scrapes_under_load_parse_and_never_fall(recorder, open_cache, pool):
    cache = open_cache()
    done, rounds, threads = threading.Event(), 300, 4

    def load(first: int) -> None:
        for number in range(rounds):
            name = f"{first}-{number}"
            cache.set([name], pool.pages([first]))
            cache.get([name, "missing"], pool.pages([first, first + 1]))

    workers = [threading.Thread(target=load, args=(2 * at,)) for at in range(threads)]
    scrapes: list[dict] = []
    watcher = threading.Thread(target=lambda: watch(recorder, scrapes, done))
    for each in (watcher, *workers):
        each.start()
    for worker in workers:
        worker.join(60)
    done.set()
    watcher.join(60)
    scrapes.append(scraped(recorder))
    assert len(scrapes) >= 3
    for earlier, later in pairwise(scrapes):
        counters = [key for key in earlier if key[0].endswith(("_total", "_count", "_bucket", "_sum"))]
        assert all(later[key] >= earlier[key] for key in counters)
    last, kv = scrapes[-1], {"component": "kv"}
    total = rounds * threads
    assert value(last, "hicache_operations_total", verb="set", **kv) == total
    assert value(last, "hicache_pages_total", verb="set", status="ok", **kv) == total
    assert value(last, "hicache_pages_total", verb="get", status="ok", **kv) == total
    assert value(last, "hicache_pages_total", verb="get", status="miss", **kv) == total
    assert value(last, "hicache_bytes_total", verb="get", **kv) == total * 4096
    stats = cache.stats().verbs
    assert value(last, "hicache_operation_seconds_sum", verb="get", **kv) == pytest.approx(
        stats["get"].seconds, rel=1e-3
    )


def watch(recorder, scrapes: list[dict], done: threading.Event) -> None:
    while not done.is_set():
        scrapes.append(scraped(recorder))


def test_the_exporter_prints_what_processes_counted(tmp_path, open_cache, pool):
    other = Recorder(tmp_path)
    observers.register(other)
    try:
        open_cache().set(["a", "b"], pool.pages([0, 1]))
    finally:
        observers.unregister(other)
    result = CliRunner().invoke(exporter, ["--dir", str(tmp_path), "--once"])
    assert result.exit_code == 0, result.output
    found = samples(result.stdout)
    assert value(found, "hicache_pages_total", component="kv", verb="set", status="ok") == 2


def test_the_exporter_without_a_folder_says_what_to_set():
    result = CliRunner().invoke(exporter, ["--once"], env={"HICACHE_PROMETHEUS_DIR": None})
    assert result.exit_code == 2
    assert "set HICACHE_PROMETHEUS_DIR for the engines and for this command, or give --dir" in result.output


def test_the_exporter_on_a_taken_port_says_so(tmp_path):
    server, thread = serve()
    try:
        port = str(server.server_port)
        result = CliRunner().invoke(exporter, ["--dir", str(tmp_path), "--port", port])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
    assert result.exit_code == 1
    assert f"127.0.0.1:{port} cannot be listened on" in result.output


def test_the_dashboard_is_printed_as_json():
    result = CliRunner().invoke(exporter, ["--dashboard"])
    assert json.loads(result.stdout)["title"] == "hicache"


def stored(root) -> str:
    """Keep three pages in a root, and give their namespace."""
    from hicache_core import Component, HiCache, HostPool, Placement

    component = Component("kv", shard="whole", byte_order="opaque", format="bytes", page_nbytes=4096)
    pages = HostPool.from_buffer(bytearray(4 * 4096), component)
    with HiCache.open(
        "file",
        identity=Identity.for_tests(model="m", tenant="t"),
        placement=Placement(),
        pools=[pages],
        options={"root": str(root), "capacity": "64mib"},
        strict=True,
    ) as cache:
        assert all(cache.set(["a", "b", "c"], pages.pages([0, 1, 2])))
        return cache.namespace.id


def test_the_exporter_shows_what_a_store_holds_and_writes_nothing(tmp_path, monkeypatch):
    pytest.importorskip("hicache_file", reason="the file backend is not installed")
    monkeypatch.setenv("HICACHE_FILE_CAPACITY", "1gib")
    namespace = stored(tmp_path / "kv")
    before = sorted(path.name for path in (tmp_path / "kv").iterdir())
    store = ["--store", "file", "--option", f"root={tmp_path}/kv"]
    result = CliRunner().invoke(exporter, [*store, "--once"], env={"HICACHE_PROMETHEUS_DIR": None})
    assert result.exit_code == 0, result.output
    found = samples(result.stdout)
    here = {"backend": "file", "namespace": namespace}
    assert value(found, "hicache_namespace_pages", **here) == 3
    assert value(found, "hicache_namespace_bytes", **here) == 3 * 4096
    assert value(found, "hicache_store_capacity_bytes", **here) == 64 << 20
    assert value(found, "hicache_store_bytes", backend="file", namespace="") > 3 * 4096
    (info,) = [dict(labels) for name, labels in found if name == "hicache_namespace_info"]
    assert (info["model"], info["tenant"], info["namespace"]) == ("m", "t", namespace)
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == before


def test_the_exporter_goes_on_while_a_store_is_away(tmp_path, caplog):
    pytest.importorskip("hicache_file", reason="the file backend is not installed")
    from hicache_prometheus.stores import Store

    store = Store("file", {"root": str(tmp_path / "missing")})
    assert store.look() == ({}, {})
    assert "hicache exporter: 'file'" in caplog.text


def test_the_exporter_refuses_a_store_that_it_cannot_load():
    result = CliRunner().invoke(exporter, ["--store", "nobody", "--once"])
    assert result.exit_code == 1
    assert "no backend named 'nobody'" in result.output
