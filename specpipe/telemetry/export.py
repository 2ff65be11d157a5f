"""Spans on their way to an OTLP receiver, through the OpenTelemetry SDK.

Owns: the queue, its bound and its end, what was exported and what was not, how our spans look to the SDK. Must not
know: how spans come about. Loaded only where an endpoint is configured, as it loads OpenTelemetry.

The SDK's own parts do the work: BatchSpanProcessor queues and batches on a thread of its own, OTLPSpanExporter sends
and tries again. What they lack is here: spans are counted, the SDK's queue never overflows unseen, and the end is
bounded (the processor alone would wait 30 s for a receiver that says nothing). Whoever puts spans in does no more than
append to a queue; `specpipe.telemetry.codec_otlp` encodes them on the export thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from grpc import Compression
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from specpipe.spans import Span
from specpipe.telemetry.codec_otlp import export_request

logger = logging.getLogger(__name__)

MAX_QUEUE: Final = 16_384
"""Spans that wait; what comes beyond is dropped and counted."""
MAX_BATCH: Final = 128
"""Encoding a batch keeps other threads waiting now and then: small ones for shorter."""
WARNING_INTERVAL_S: Final = 60.0
"""That spans are dropped is said so often at most."""
EXPORT_INTERVAL_S: Final = 1.0
EXPORT_TIMEOUT_S: Final = 10.0
"""Of one batch, its retries included."""
CLOSE_S: Final = 1.5
"""At the end of the process: without progress for so long what is left is given up, and after twice that anyway."""


class SpanExport:
    """Takes spans from one thread; `close` ends it. The properties may be read from anywhere."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: HOST:PORT of an OTLP/gRPC receiver, without TLS."""
        self._endpoint = endpoint
        self._exporter = _CountingExporter(endpoint)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=MAX_QUEUE,
            schedule_delay_millis=1000 * EXPORT_INTERVAL_S,
            max_export_batch_size=MAX_BATCH,
            export_timeout_millis=1000 * EXPORT_TIMEOUT_S,
        )
        self._num_put = 0
        self._num_refused = 0
        self._warned_s = -WARNING_INTERVAL_S

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

    def put(self, spans: Iterable[Span]) -> None:
        """Never blocks and never raises."""
        for span in spans:
            if self._num_put - self._exporter.num_tried >= MAX_QUEUE:
                self._refuse()
            else:
                self._num_put += 1
                self._processor.on_end(cast(ReadableSpan, _Queued(span)))

    def _refuse(self) -> None:
        self._num_refused += 1
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARNING_INTERVAL_S:
            self._warned_s = now_s
            logger.warning("%s takes spans too slowly: %d wait, more are dropped", self._endpoint, MAX_QUEUE)

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
    context = SpanContext(trace_id=1, span_id=1, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def __init__(self, span: Span) -> None:
        self.span = span


class _CountingExporter(OTLPSpanExporter):
    """Of `_Queued`. Says once that spans do not arrive, and once that they do again; the library says it each time."""

    def __init__(self, endpoint: str) -> None:
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        super().__init__(
            endpoint=f"http://{endpoint}",
            insecure=True,
            timeout=EXPORT_TIMEOUT_S,
            compression=Compression.NoCompression,
            channel_options=(("grpc.enable_http_proxy", 0),),  # type: ignore[arg-type]
        )
        self.num_tried = self.num_taken = self.num_failed = 0
        self._is_heard = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        self.num_tried += len(spans)
        try:
            result = super().export(spans)
        finally:
            self._note(len(spans), is_taken=result is SpanExportResult.SUCCESS)
        return result

    def give_up(self) -> None:
        """Whatever is under way fails, and so does all that follows, at once."""
        super().shutdown()

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """Said by the SDK when its queue is empty. `give_up` ends the exporter."""

    def _translate_data(self, data: Sequence[Any]) -> Any:
        return export_request(queued.span for queued in data)

    def _note(self, num_spans: int, *, is_taken: bool) -> None:
        if is_taken:
            self.num_taken += num_spans
        else:
            self.num_failed += num_spans
        if is_taken != self._is_heard:
            self._is_heard = is_taken
            how = "spans reach %s again" if is_taken else "spans do not reach %s"
            logger.log(logging.INFO if is_taken else logging.WARNING, how, self._endpoint)
