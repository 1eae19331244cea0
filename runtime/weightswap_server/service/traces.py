"""Spans of requests and of swaps, for OpenTelemetry. They are made once all is over, so that nothing waits for them.

MODEL              kind server, from a request's arrival to its answer; its event `call` is when the model was called.
                   weightswap.weights_id, .generation or .canary, .batch_calls; error.type and a status if refused
weightswap.swap    as long as it was staged, verified and committed, or until it was refused; weightswap.model,
                   .outcome, .source, .by, .weights_id, .generation
"""

from __future__ import annotations

import time
from typing import Any

from weightswap_runtime import __version__
from weightswap_runtime.errors import MissingExtra, text_of
from weightswap_runtime.live.events import Event

try:
    from opentelemetry import trace
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ImportError as error:
    raise MissingExtra("traces", "traces") from error

from weightswap_server.protocol.documents import Answered
from weightswap_server.protocol.tensors_on_the_wire import Answer

from .batching import Call

_ENDS = {"committed", "rolled back", "refused", "failed"}


def export_spans() -> None:
    """Send spans where OTEL_EXPORTER_OTLP_ENDPOINT and its like say, unless the process sends them already.

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
    """Spans of one server, by the process's tracer provider."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("weightswap.server", __version__)

    def answered(self, model: str, call: Call, answer: Answer, began: float, together: int) -> None:
        """A request that was answered; it is a child of the span that its `traceparent` names."""
        span = self._request(
            model, call.arrived, call.traceparent, _weights(answer) | {"weightswap.batch_calls": together}
        )
        span.add_event("call", timestamp=_epoch(began))
        span.end()

    def generated(self, model: str, said: Answered, arrived: float, traceparent: str) -> None:
        """A generation that has ended."""
        self._request(model, arrived, traceparent, _weights(said)).end()

    def refused(self, model: str, error: BaseException, arrived: float, traceparent: str) -> None:
        """A request that was not answered."""
        span = self._request(model, arrived, traceparent, {"error.type": type(error).__name__})
        span.set_status(Status(StatusCode.ERROR, text_of(error)))
        span.end()

    def changed(self, model: str, event: Event) -> None:
        """What became of a staging, or of a rollback."""
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
        within = extract({"traceparent": traceparent}) if traceparent else None
        start = _epoch(arrived)
        return self._tracer.start_span(
            model or "unknown model", within, kind=SpanKind.SERVER, start_time=start, attributes=attributes
        )


def _weights(answer: Answer | Answered) -> dict[str, Any]:
    """Which weights have answered; a canary's have no generation."""
    found: dict[str, Any] = {"weightswap.weights_id": answer.weights_id}
    if answer.generation is None:
        return found | {"weightswap.canary": True}
    return found | {"weightswap.generation": answer.generation}


def _epoch(moment: float) -> int:
    """Nanoseconds since the epoch of a moment of `perf_counter`."""
    return time.time_ns() - int((time.perf_counter() - moment) * 1e9)
