"""Between specpipe.spans and protobuf, both ways; see specpipe.codec for the rules of both directions.

A span's kind and tracestate are for exporters and do not travel: what comes back is INTERNAL, and SERVER if it is the
request's `generate`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from specpipe.errors import SpecpipeError
from specpipe.rpc.v1 import trace_pb2
from specpipe.spans import AttributeValue, KeptTrace, Process, Role, Span, SpanEvent, SpanKind

MAX_SPANS: Final = 200_000
MAX_EVENTS: Final = 4096  # of a span
MAX_LINKS: Final = 4096
MAX_ATTRIBUTES: Final = 256  # of a span or an event
MAX_LIST: Final = 65_536  # values of an attribute
MAX_NAME: Final = 1024  # characters
MAX_TEXT: Final = 4 * 2**20  # characters of a text: a prompt may be one
_MAX_INT64: Final = 2**63 - 1
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}", re.ASCII)


def trace_to_pb(trace: KeptTrace) -> trace_pb2.GetTraceResponse:
    return trace_pb2.GetTraceResponse(
        trace_id=f"{trace.trace_id:032x}", is_complete=trace.is_complete, spans=spans_to_pb(trace.spans)
    )


def spans_to_pb(spans: Iterable[Span]) -> list[trace_pb2.Span]:
    return [span_to_pb(span) for span in spans]


def span_to_pb(span: Span) -> trace_pb2.Span:
    return trace_pb2.Span(
        name=span.name,
        span_id=span.span_id,
        parent_id=span.parent_id,
        process=_process_to_pb(span.process),
        start_unix_nanos=span.start_unix_nanos,
        end_unix_nanos=span.end_unix_nanos,
        attributes=_attributes_to_pb(span.attributes),
        events=(
            trace_pb2.SpanEvent(
                name=event.name, unix_nanos=event.unix_nanos, attributes=_attributes_to_pb(event.attributes)
            )
            for event in span.events
        ),
        links=span.links,
        error=span.error,
    )


def trace_from_pb(trace_pb: trace_pb2.GetTraceResponse) -> KeptTrace:
    """Raises SpecpipeError for what is no trace. What the spans say of one another is not checked: parents and links
    may name spans that are not there."""
    if not _TRACE_ID.fullmatch(trace_pb.trace_id):
        raise _wrong("its id is not 32 hexadecimal digits")
    _check_count("spans", len(trace_pb.spans), MAX_SPANS)
    trace_id = int(trace_pb.trace_id, 16)
    spans = tuple(_span_from_pb(span_pb, trace_id) for span_pb in trace_pb.spans)
    return KeptTrace(trace_id=trace_id, is_complete=trace_pb.is_complete, spans=spans)


def _span_from_pb(span_pb: trace_pb2.Span, trace_id: int) -> Span:
    name = _text("name", span_pb.name, MAX_NAME)
    if not span_pb.span_id:
        raise _wrong("a span has no id")
    if span_pb.start_unix_nanos > span_pb.end_unix_nanos:
        raise _wrong(f"a span named {name!r} ends before it starts")
    _check_count("links of a span", len(span_pb.links), MAX_LINKS)
    _check_count("events of a span", len(span_pb.events), MAX_EVENTS)
    return Span(
        name=name,
        trace_id=trace_id,
        span_id=span_pb.span_id,
        parent_id=span_pb.parent_id,
        kind=SpanKind.SERVER if name == "generate" else SpanKind.INTERNAL,
        process=_process_from_pb(span_pb.process),
        start_unix_nanos=span_pb.start_unix_nanos,
        end_unix_nanos=span_pb.end_unix_nanos,
        attributes=_attributes_from_pb(span_pb.attributes),
        events=tuple(_event_from_pb(event_pb) for event_pb in span_pb.events),
        links=tuple(span_pb.links),
        error=_text("error", span_pb.error, MAX_TEXT),
    )


def _event_from_pb(event_pb: trace_pb2.SpanEvent) -> SpanEvent:
    return SpanEvent(
        name=_text("name", event_pb.name, MAX_NAME),
        unix_nanos=event_pb.unix_nanos,
        attributes=_attributes_from_pb(event_pb.attributes),
    )


def _process_to_pb(process: Process) -> trace_pb2.SpanProcess:
    return trace_pb2.SpanProcess(
        role=process.role.value,
        address=process.address,
        host=process.host,
        pid=process.pid,
        version=process.version,
        incarnation=process.incarnation,
    )


def _process_from_pb(process_pb: trace_pb2.SpanProcess) -> Process:
    role = _text("role", process_pb.role, MAX_NAME)
    if role not in {known.value for known in Role}:
        raise _wrong(f"a span is of a process with the role {role!r}, which this version does not know")
    return Process(
        role=Role(role),
        address=_text("address", process_pb.address, MAX_NAME),
        host=_text("host", process_pb.host, MAX_NAME),
        pid=process_pb.pid,
        version=_text("version", process_pb.version, MAX_NAME),
        incarnation=process_pb.incarnation,
    )


def _attributes_to_pb(attributes: Mapping[str, AttributeValue]) -> dict[str, trace_pb2.AttributeValue]:
    return {name: _value_to_pb(value) for name, value in attributes.items()}


def _value_to_pb(value: AttributeValue) -> trace_pb2.AttributeValue:
    if isinstance(value, bool):  # before int, which it is too
        return trace_pb2.AttributeValue(truth=value)
    if isinstance(value, str):
        return trace_pb2.AttributeValue(text=value)
    if isinstance(value, int):
        # A seed has 64 unsigned bits: what the wire cannot hold is told as a text.
        fits = -_MAX_INT64 - 1 <= value <= _MAX_INT64
        return trace_pb2.AttributeValue(number=value) if fits else trace_pb2.AttributeValue(text=str(value))
    if isinstance(value, float):
        return trace_pb2.AttributeValue(real=value)
    return _list_to_pb(value)


def _list_to_pb(values: tuple[Any, ...]) -> trace_pb2.AttributeValue:
    if any(isinstance(value, float) for value in values):
        return trace_pb2.AttributeValue(reals=trace_pb2.RealList(values=values))
    if values and all(isinstance(value, int) for value in values):
        return trace_pb2.AttributeValue(numbers=trace_pb2.NumberList(values=values))
    return trace_pb2.AttributeValue(texts=trace_pb2.TextList(values=values))


def _attributes_from_pb(attributes_pb: Mapping[str, trace_pb2.AttributeValue]) -> dict[str, AttributeValue]:
    """A value of a kind that this version does not know is left out."""
    _check_count("attributes of a span", len(attributes_pb), MAX_ATTRIBUTES)
    values: dict[str, AttributeValue] = {}
    for name, value_pb in attributes_pb.items():
        if kind := value_pb.WhichOneof("kind"):
            values[_text("attribute", name, MAX_NAME)] = _value_from_pb(kind, getattr(value_pb, kind))
    return values


def _value_from_pb(kind: str, value_pb: Any) -> AttributeValue:
    if kind in ("texts", "numbers", "reals"):
        _check_count("values of an attribute", len(value_pb.values), MAX_LIST)
        return tuple(value_pb.values)
    return _text("attribute", value_pb, MAX_TEXT) if kind == "text" else value_pb


def _text(what: str, text: str, max_length: int) -> str:
    _check_count(f"characters of a span's {what}", len(text), max_length)
    return text


def _check_count(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise _wrong(f"{count} {what}, more than {limit}")


def _wrong(reason: str) -> SpecpipeError:
    return SpecpipeError(f"the service sent a trace that cannot be read: {reason}")
