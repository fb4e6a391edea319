from __future__ import annotations

import pytest

from hicache_core import Status, observers

pytest.importorskip("opentelemetry.sdk", reason="the extra 'otel' and its SDK are not installed")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from hicache_prometheus import trace


@pytest.fixture
def spans():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = trace(provider)
    yield provider, exporter
    observers.unregister(tracer)


def test_a_call_is_a_span_inside_the_caller_s(spans, open_cache, pool):
    provider, exporter = spans
    cache = open_cache()
    with provider.get_tracer("engine").start_as_current_span("request"):
        cache.set(["a", "b"], pool.pages([0, 1]))
        cache.get(["a", "x"], pool.pages([0, 1]))
    first, second, request = exporter.get_finished_spans()
    assert [first.name, second.name] == ["hicache set", "hicache get"]
    assert {first.parent.span_id, second.parent.span_id} == {request.context.span_id}
    assert dict(second.attributes) == {
        "hicache.backend": "toy",
        "hicache.namespace": cache.namespace.id,
        "hicache.component": "kv",
        "hicache.pages": 2,
        "hicache.bytes": 4096,
        "hicache.pages.ok": 1,
        "hicache.pages.miss": 1,
    }
    assert request.start_time <= first.start_time < first.end_time <= second.end_time <= request.end_time
    assert second.status.status_code is StatusCode.UNSET


def test_pages_in_trouble_make_an_error(spans, open_cache, pool, script):
    script["get"] = lambda keys: [Status.CORRUPT, Status.TIMEOUT]
    open_cache().get(["a", "b"], pool.pages([0, 1]))
    (span,) = spans[1].get_finished_spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "CORRUPT, TIMEOUT")
