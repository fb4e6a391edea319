"""OpenTelemetry spans, one a call of HiCache: extra ``[otel]``, and ``trace()`` once in a process."""

from __future__ import annotations

import time

from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider, get_tracer

from hicache_core import observers
from hicache_core.hooks import hookimpl
from hicache_core.observers import OperationEvent
from hicache_core.status import Status as PageStatus

#: Outcomes of a page that are no trouble.
_GOOD = frozenset({PageStatus.OK, PageStatus.MISS, PageStatus.SKIPPED})


class Tracer:
    """An observer that makes a span of each call that has ended, child of the caller's current span."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = get_tracer("hicache", tracer_provider=provider)

    @hookimpl
    def hicache_operation(self, event: OperationEvent) -> None:
        """Make the span: it ends now and began ``event.seconds`` ago."""
        end = time.time_ns()
        span = self._tracer.start_span(
            f"hicache {event.verb}",
            kind=SpanKind.CLIENT,
            start_time=end - int(event.seconds * 1e9),
            attributes=_attributes(event),
        )
        bad = [status.name for status in event.statuses if status not in _GOOD]
        if bad:
            span.set_status(Status(StatusCode.ERROR, ", ".join(sorted(bad))))
        span.end(end)


def _attributes(event: OperationEvent) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "hicache.backend": event.backend,
        "hicache.namespace": event.namespace,
        "hicache.component": event.component,
        "hicache.pages": event.pages,
        "hicache.bytes": event.nbytes,
    }
    for status, pages in event.statuses.items():
        attributes[f"hicache.pages.{status.name.lower()}"] = pages
    return attributes


def trace(provider: TracerProvider | None = None) -> Tracer:
    """Make spans of every HiCache opened from here on; the global tracer provider unless told."""
    tracer = Tracer(provider)
    observers.register(tracer)
    return tracer
