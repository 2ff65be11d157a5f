"""Spans on their way to an OTLP receiver, through the OpenTelemetry SDK.

Owns: the queue, its bound and its end, what was exported and what was not, how our spans look to the SDK. Must not
know: how spans come about. Loaded only where an endpoint is configured, as it loads OpenTelemetry.

The SDK's own parts do the work: BatchSpanProcessor queues and batches on a thread of its own, OTLPSpanExporter encodes,
sends and tries again. What they lack is here: spans are counted, the SDK's queue never overflows unseen, and the end is
bounded (the processor alone would wait 30 s for a receiver that says nothing). Whoever puts spans in does no more than
append to a queue: our spans become the SDK's on the export thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, cast

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

import specpipe
from specpipe import spans as ours
from specpipe.telemetry.resources import resource_of

logger = logging.getLogger(__name__)

MAX_QUEUE: Final = 16_384
"""Spans that wait; what comes beyond is dropped and counted."""
MAX_BATCH: Final = 128
"""Encoding a batch keeps other threads waiting now and then: small ones for shorter."""
EXPORT_INTERVAL_S: Final = 1.0
EXPORT_TIMEOUT_S: Final = 10.0
"""Of one batch, its retries included."""
CLOSE_S: Final = 2.0
"""At the end of the process: without progress for so long what is left is given up, and after twice that anyway."""

_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_SCOPE: Final = InstrumentationScope("specpipe", specpipe.__version__)
_KINDS: Final = {
    ours.SpanKind.INTERNAL: SpanKind.INTERNAL,
    ours.SpanKind.SERVER: SpanKind.SERVER,
    ours.SpanKind.CLIENT: SpanKind.CLIENT,
}
_OK: Final = Status(StatusCode.UNSET)


class SpanExport:
    """Takes spans from one thread; `close` ends it. The properties may be read from anywhere."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: HOST:PORT of an OTLP/gRPC receiver, without TLS."""
        self._endpoint = endpoint
        self._exporter = _CountingExporter(endpoint)
        self._processor = BatchSpanProcessor(
            cast(SpanExporter, self._exporter),
            max_queue_size=MAX_QUEUE,
            schedule_delay_millis=1000 * EXPORT_INTERVAL_S,
            max_export_batch_size=MAX_BATCH,
            export_timeout_millis=1000 * EXPORT_TIMEOUT_S,
        )
        self._num_put = 0
        self._num_refused = 0
        self._is_full = False

    @property
    def num_pending(self) -> int:
        """Spans of which it is not known yet."""
        return self._num_put - self.num_exported - self._exporter.num_failed

    @property
    def num_exported(self) -> int:
        """Spans that the receiver took."""
        return self._exporter.num_taken

    @property
    def num_dropped(self) -> Mapping[str, int]:
        """Spans that are lost, by cause."""
        return {"queue full": self._num_refused, "export failed": self._exporter.num_failed}

    def put(self, spans: Iterable[ours.Span]) -> None:
        """Never blocks and never raises."""
        for span in spans:
            is_full = self._num_put - self._exporter.num_tried >= MAX_QUEUE
            if is_full and not self._is_full:
                logger.warning("%s takes spans too slowly: %d wait, more are dropped", self._endpoint, MAX_QUEUE)
            self._is_full = is_full
            if is_full:
                self._num_refused += 1
            else:
                self._num_put += 1
                self._processor.on_end(cast(ReadableSpan, _Queued(span)))

    def close(self) -> None:
        """Send what waits, for a few seconds at most; blocks. Nothing may be put after that."""
        ending = threading.Thread(target=self._processor.shutdown, name="end of span export", daemon=True)
        ending.start()
        num_taken = self.num_exported
        ending.join(CLOSE_S)
        if ending.is_alive() and self.num_exported > num_taken:
            ending.join(CLOSE_S)
        self._exporter.give_up()
        ending.join(CLOSE_S)
        if num_lost := sum(self.num_dropped.values()):
            logger.warning("%d spans were not exported to %s: %s", num_lost, self._endpoint, dict(self.num_dropped))


class _Queued:
    """What the SDK's queue holds: a span of ours, sampled."""

    __slots__ = ("span",)
    context = SpanContext(trace_id=1, span_id=1, is_remote=False, trace_flags=_SAMPLED)

    def __init__(self, span: ours.Span) -> None:
        self.span = span


class _CountingExporter:
    """A SpanExporter of `_Queued`. Says once that spans do not arrive, and once that they do again."""

    def __init__(self, endpoint: str) -> None:
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)  # it would say so with each batch
        self.num_tried = self.num_taken = self.num_failed = 0
        self._endpoint = endpoint
        self._is_heard = True
        self._otlp = OTLPSpanExporter(
            endpoint=f"http://{endpoint}",
            insecure=True,
            timeout=EXPORT_TIMEOUT_S,
            channel_options=(("grpc.enable_http_proxy", 0),),  # type: ignore[arg-type]
        )

    def export(self, batch: Sequence[_Queued]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        self.num_tried += len(batch)
        try:
            result = self._otlp.export([readable(queued.span) for queued in batch])
        finally:
            self._note(len(batch), is_taken=result is SpanExportResult.SUCCESS)
        return result

    def give_up(self) -> None:
        """Whatever is under way fails, and so does all that follows, at once."""
        self._otlp.shutdown()

    def shutdown(self) -> None:
        """Of the SDK, when its queue is empty. `give_up` ends the exporter."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002
        """Nothing waits here."""
        return True

    def _note(self, num_spans: int, *, is_taken: bool) -> None:
        if is_taken:
            self.num_taken += num_spans
        else:
            self.num_failed += num_spans
        if is_taken != self._is_heard:
            self._is_heard = is_taken
            how = "spans reach %s again" if is_taken else "spans do not reach %s"
            logger.log(logging.INFO if is_taken else logging.WARNING, how, self._endpoint)


def readable(span: ours.Span) -> ReadableSpan:
    """As the SDK knows spans."""
    state = _trace_state(span.trace_state)
    context = SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=_SAMPLED, trace_state=state)
    return ReadableSpan(
        name=span.name,
        context=context,
        parent=_context(span.trace_id, span.parent_id, is_remote=span.kind is ours.SpanKind.SERVER),
        resource=_resource(span.process),
        attributes=span.attributes,
        events=[Event(event.name, event.attributes, event.unix_nanos) for event in span.events],
        links=[Link(cast(SpanContext, _context(span.trace_id, link))) for link in span.links],
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.error) if span.error else _OK,
        start_time=span.start_unix_nanos,
        end_time=span.end_unix_nanos,
        instrumentation_scope=_SCOPE,
    )


def _context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext | None:
    return SpanContext(trace_id, span_id, is_remote=is_remote, trace_flags=_SAMPLED) if span_id else None


@lru_cache(256)
def _resource(process: ours.Process) -> Resource:
    return Resource(resource_of(process))


@lru_cache(256)
def _trace_state(header: str) -> TraceState | None:
    return TraceState.from_header([header]) if header else None
