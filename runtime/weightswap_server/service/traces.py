"""OpenTelemetry spans of requests and swaps. They are made afterwards, so that no request waits for them.

MODEL              kind server, from a request's arrival to its answer; the event `call` is the start of the call.
                   weightswap.weights_id, .generation or .canary, .batch_calls; error.type and a status if refused
weightswap.swap    from the start of staging to the commit or the refusal; weightswap.model, .outcome, .source, .by,
                   .weights_id, .generation
"""

from __future__ import annotations

from weightswap_runtime.errors import MissingExtra

try:
    from opentelemetry import trace
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ImportError as error:
    raise MissingExtra("traces", "traces") from error

import time
from typing import Any

from weightswap_runtime import __version__
from weightswap_runtime.errors import text_of
from weightswap_runtime.live.receipt import Event
from weightswap_server.protocol import Answer, Answered

from .batching import Call

_ENDS = {"committed", "rolled back", "refused", "failed"}


def export_spans() -> None:
    """Export spans as OTEL_EXPORTER_OTLP_ENDPOINT and its like say, unless the process has a tracer provider.

    Raises MissingExtra.
    """
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingExtra("--traces", "traces") from error
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


class Traces:
    """The spans of one server, made with the process's tracer provider."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("weightswap.server", __version__)

    def answered(self, call: Call, answer: Answer, began: float, together: int) -> None:
        """Make the span of an answered request, a child of the span in its `traceparent`."""
        attributes = _weights(answer) | {"weightswap.batch_calls": together}
        span = self._request(call.name, call.arrived, call.traceparent, attributes)
        span.add_event("call", timestamp=_epoch(began))
        span.end()

    def generated(self, model: str, answered: Answered, arrived: float, traceparent: str) -> None:
        """Make the span of a generation that has ended."""
        self._request(model, arrived, traceparent, _weights(answered)).end()

    def refused(self, model: str, error: BaseException, arrived: float, traceparent: str) -> None:
        """Make the span of a request that was not answered."""
        span = self._request(model, arrived, traceparent, {"error.type": type(error).__name__})
        span.set_status(Status(StatusCode.ERROR, text_of(error)))
        span.end()

    def changed(self, model: str, event: Event) -> None:
        """Make the span of a swap or a rollback that has ended."""
        if event.kind not in _ENDS:
            return
        receipt, seconds = event.receipt, event.seconds
        attributes: dict[str, Any] = {
            "weightswap.model": model,
            "weightswap.outcome": event.kind,
            "weightswap.source": event.source,
            "weightswap.by": event.by,
            "weightswap.weights_id": event.weights_id or "",
        }
        if receipt is not None:
            seconds = receipt.seconds_staged + receipt.seconds_verified + receipt.seconds_paused
            attributes["weightswap.generation"] = receipt.generation
        end = int(event.time * 1e9)
        start = end - int(seconds * 1e9)
        span = self._tracer.start_span("weightswap.swap", start_time=start, attributes=attributes)
        if event.error is not None:
            span.set_attribute("error.type", type(event.error).__name__)
            span.set_status(Status(StatusCode.ERROR, text_of(event.error)))
        span.end(end)

    def _request(self, model: str, arrived: float, traceparent: str, attributes: dict[str, Any]) -> Any:
        context = extract({"traceparent": traceparent}) if traceparent else None
        start = _epoch(arrived)
        return self._tracer.start_span(
            model or "unknown model", context, kind=SpanKind.SERVER, start_time=start, attributes=attributes
        )


def _weights(answer: Answer | Answered) -> dict[str, Any]:
    """Return the attributes of the answering weights; a canary has no generation."""
    attributes: dict[str, Any] = {"weightswap.weights_id": answer.weights_id}
    if answer.generation is None:
        return attributes | {"weightswap.canary": True}
    return attributes | {"weightswap.generation": answer.generation}


def _epoch(moment: float) -> int:
    """Convert a time of `perf_counter` into nanoseconds since the epoch."""
    return time.time_ns() - int((time.perf_counter() - moment) * 1e9)
