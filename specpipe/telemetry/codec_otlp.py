"""Our spans as OTLP says them.

Owns: protobuf of a trace export. Must not know: queues, connections. The SDK's own encoder would want each span as a
ReadableSpan first and takes three times as long, which is most of what tracing costs (benchmarks/tracing.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

import specpipe
from specpipe.spans import AttributeValue, Process, Span, SpanEvent, SpanKind
from specpipe.telemetry.resources import resource_of

SCOPE: Final = "specpipe"
_KINDS: Final = {
    SpanKind.INTERNAL: trace_pb2.Span.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: trace_pb2.Span.SPAN_KIND_SERVER,
    SpanKind.CLIENT: trace_pb2.Span.SPAN_KIND_CLIENT,
}
_FLAGS: Final = 0x101  # sampled; whether the parent is remote is known: it is not
_REMOTE: Final = 0x200
_ERROR: Final = trace_pb2.Status.STATUS_CODE_ERROR


def export_request(spans: Iterable[Span]) -> ExportTraceServiceRequest:
    """One message with all spans, by process."""
    request = ExportTraceServiceRequest()
    scopes: dict[Process, Any] = {}
    for span in spans:
        scope = scopes.get(span.process)
        if scope is None:
            scope = scopes[span.process] = _add_scope(request, span.process)
        _add_span(scope, span)
    return request


def _add_scope(request: ExportTraceServiceRequest, process: Process) -> Any:
    of_process = request.resource_spans.add()
    _add_attributes(of_process.resource.attributes, resource_of(process))
    scope = of_process.scope_spans.add()
    scope.scope.name, scope.scope.version = SCOPE, specpipe.__version__
    return scope


def _add_span(scope: Any, span: Span) -> None:
    trace_id = span.trace_id.to_bytes(16, "big")
    is_remote = span.kind is SpanKind.SERVER and span.parent_id
    span_pb = scope.spans.add(
        trace_id=trace_id,
        span_id=span.span_id.to_bytes(8, "big"),
        parent_span_id=span.parent_id.to_bytes(8, "big") if span.parent_id else b"",
        trace_state=span.trace_state,
        name=span.name,
        kind=_KINDS[span.kind],
        start_time_unix_nano=span.start_unix_nanos,
        end_time_unix_nano=span.end_unix_nanos,
        flags=_FLAGS | _REMOTE if is_remote else _FLAGS,
    )
    _add_attributes(span_pb.attributes, span.attributes)
    for event in span.events:
        _add_event(span_pb, event)
    for link in span.links:
        span_pb.links.add(trace_id=trace_id, span_id=link.to_bytes(8, "big"), flags=_FLAGS)
    if span.error:
        span_pb.status.code, span_pb.status.message = _ERROR, span.error


def _add_event(span_pb: Any, event: SpanEvent) -> None:
    event_pb = span_pb.events.add(name=event.name, time_unix_nano=event.unix_nanos)
    _add_attributes(event_pb.attributes, event.attributes)


def _add_attributes(attributes_pb: Any, attributes: Mapping[str, Any]) -> None:
    for key, value in attributes.items():
        _set_value(attributes_pb.add(key=key).value, value)


def _set_value(value_pb: Any, value: AttributeValue) -> None:
    """What OTLP cannot carry, such as an integer beyond 63 bits, goes as a text."""
    try:
        _set(value_pb, value)
    except ValueError:
        value_pb.string_value = ascii(value)


def _set(value_pb: Any, value: AttributeValue) -> None:
    kind = type(value)
    if kind is float:
        value_pb.double_value = value
    elif kind is int:
        value_pb.int_value = value
    elif kind is str:
        value_pb.string_value = value
    elif kind is bool:
        value_pb.bool_value = value
    elif isinstance(value, tuple):
        for one in value:
            _set_value(value_pb.array_value.values.add(), one)
