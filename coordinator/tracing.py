"""Which requests are traced, and where their spans go.

Owns: the decision (`begin`), the last traces (`find`), who looks on (`subscribe`), what is exported. Must not know: how
spans come about (`coordinator.request_trace`), OpenTelemetry's exporter, sockets. All on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Final, Protocol

from coordinator.request_trace import RequestTrace
from coordinator.requests import Question
from coordinator.trace_generate import GenerateAttributes
from coordinator.trace_spans import SpanMaker, TraceIdentity
from specpipe.config import TelemetryConfig, TraceLevel
from specpipe.spans import KeptTrace, Process, Role, Span
from specpipe.telemetry.propagation import CallerContext, is_sampled_by_ratio, read_context
from specpipe.telemetry.resources import own_process

logger = logging.getLogger(__name__)

MAX_TRACES: Final = 64
"""The last traces that are kept."""
MAX_SPANS: Final = 30_000
"""Spans that are kept, of all traces; about 40 MB. The oldest traces go first."""
MAX_SPANS_OF_ONE: Final = 20_000
COMPLETE_AFTER_MS: Final = 2_000.0
"""After the end of a request its workers may tell as long what they did for it."""

_EXPORTED: Final = {
    "off": frozenset[str](),
    "request": frozenset({"generate", "queue", "tokenize", "prefill"}),
    "round": frozenset({"generate", "queue", "tokenize", "prefill", "round", "verify", "draft"}),
    "debug": frozenset({"generate", "queue", "tokenize", "prefill", "round", "verify", "draft", "rank"}),
}

_KEPT: Final = ("round", "debug")
"""Levels at which a request's spans are enough to look at."""

Sink = Callable[[Sequence[Span]], None]
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(slots=True)
class _Kept:
    trace_id: int
    is_complete: bool = False
    was_kept: bool = False
    spans: list[Span] = field(default_factory=list)


class Exporter(Protocol):
    """Takes spans and never blocks, until it is closed. See `specpipe.telemetry.export`."""

    @property
    def num_pending(self) -> int: ...

    @property
    def num_exported(self) -> int: ...

    @property
    def num_dropped(self) -> Mapping[str, int]: ...

    def put(self, spans: Sequence[Span]) -> None: ...

    def close(self) -> None:
        """Blocks for a few seconds at most."""
        ...


class Tracing:
    """`exporter` takes the spans of sampled requests, every sink of `subscribe` those of all that are traced.

    A request is traced only for somebody: it asks for it itself, somebody looks on, or it is sampled and its spans are
    exported, or kept because the configuration says which share to keep.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        *,
        process: Process | None = None,
        exporter: Exporter | None = None,
        now_ms: Callable[[], float] = lambda: 1000 * time.monotonic(),
        unix_nanos: Callable[[], int] = time.time_ns,
        random: Random | None = None,
    ) -> None:
        self._config = config
        self._process = process or Process(role=Role.COORDINATOR)
        self._exporter = exporter
        self._has_taker = exporter is not None or (bool(config.trace_sample) and config.trace_level in _KEPT)
        self._now_ms = now_ms
        self._unix_nanos = unix_nanos
        self._random = random or Random(secrets.randbits(128))
        self.num_open = 0
        """Traces that have begun and are not complete."""
        self.num_lost_records = 0
        """Records of steps that workers dropped before they could tell them."""
        self._sinks: dict[int, Sink] = {}
        self._next_sink = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by request id; the newest last
        self._num_spans = 0  # kept
        self._ending: list[RequestTrace] = []  # over, and not complete

    # Who looks on

    @property
    def is_watched(self) -> bool:
        return bool(self._sinks)

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        """From now on `sink` gets the spans of every request that begins, sampled or not. Returns what ends it."""
        number = self._next_sink = self._next_sink + 1
        self._sinks[number] = sink
        return partial(self._unsubscribe, number)

    # Numbers

    @property
    def num_pending(self) -> int:
        """Spans that wait to be exported."""
        return 0 if self._exporter is None else self._exporter.num_pending

    @property
    def num_exported(self) -> int:
        """Spans that the OTLP receiver took."""
        return 0 if self._exporter is None else self._exporter.num_exported

    @property
    def num_dropped(self) -> Mapping[str, int]:
        """Spans that it did not, by cause."""
        return {} if self._exporter is None else self._exporter.num_dropped

    def _unsubscribe(self, number: int) -> None:
        self._sinks.pop(number, None)

    def find(self, name: str) -> KeptTrace | None:
        """What is known of one of the last requests that were traced; None: nothing is kept of it.

        `name`: its id, or that of its trace in 32 hexadecimal digits, which finds the newest request of that trace.
        """
        kept = self._kept.get(name) or self._newest_of(name)
        if kept is None:
            return None
        spans = tuple(sorted(kept.spans, key=_place))
        return KeptTrace(trace_id=kept.trace_id, is_complete=kept.is_complete, spans=spans)

    # Requests

    def begin(self, question: Question, metadata: Metadata, *, received_ms: float) -> RequestTrace | None:
        """A request has come; None: it is not traced. Never raises for what the caller says of its trace."""
        level = self._config.trace_level
        is_kept = question.trace or self.is_watched
        is_for_samples = self._has_taker and level != "off"
        if not is_for_samples and not is_kept:
            return None
        caller = read_context(metadata)
        trace_id = caller.trace_id if caller is not None else self._random.getrandbits(128) or 1
        is_sampled = is_for_samples and self._is_sampled(trace_id, caller)
        if not is_sampled and not is_kept:
            return None
        identity = TraceIdentity(
            trace_id=trace_id,
            span_id=self._new_id(),
            parent_id=0 if caller is None else caller.span_id,
            trace_state="" if caller is None else caller.trace_state,
            is_sampled=is_sampled,
        )
        return self._create(question, identity, _at_least_round(level) if is_kept else level, received_ms)

    def tick(self, now_ms: float) -> None:
        """Time has passed: a worker that does not say its last word is not waited for."""
        if not self._ending:
            return
        for trace in self._ending:
            if trace.over_ms is not None and now_ms - trace.over_ms > COMPLETE_AFTER_MS:
                trace.complete()
        self._ending = [trace for trace in self._ending if not trace.is_complete]

    def ending(self, trace: RequestTrace) -> None:
        """Its request is over: it is complete soon, whatever workers do. May be said again."""
        if not trace.is_complete and trace not in self._ending:
            self._ending.append(trace)

    async def close(self) -> None:
        """The service has ended: what is known of every request goes out, and waits for a receiver that takes it."""
        for trace in self._ending:
            trace.complete()
        self._ending.clear()
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)

    @property
    def _sample(self) -> float:
        return 1.0 if self._config.trace_sample is None else self._config.trace_sample

    def _is_sampled(self, trace_id: int, caller: CallerContext | None) -> bool:
        return is_sampled_by_ratio(trace_id, self._sample) if caller is None else caller.is_sampled

    def _create(
        self, question: Question, identity: TraceIdentity, level: TraceLevel, received_ms: float
    ) -> RequestTrace:
        self.num_open += 1
        maker = SpanMaker(
            identity=identity,
            process=self._process,
            new_id=self._new_id,
            anchor_ms=self._now_ms(),
            anchor_unix_nanos=self._unix_nanos(),
        )
        attributes = GenerateAttributes(question, has_content=self._config.has_content)
        kept = _Kept(identity.trace_id) if level in _KEPT else None
        exported = _EXPORTED[self._config.trace_level] if identity.is_sampled else frozenset[str]()
        return RequestTrace(
            maker,
            attributes,
            partial(self._take, kept, exported),
            level=level,
            received_ms=received_ms,
            note_lost=self._note_lost,
        )

    def _note_lost(self, num_records: int) -> None:
        self.num_lost_records += num_records

    def _new_id(self) -> int:
        return self._random.getrandbits(64) or 1

    # Spans

    def _take(
        self, kept: _Kept | None, exported: frozenset[str], request_id: str, spans: Sequence[Span], is_complete: bool
    ) -> None:
        if kept is not None and request_id:
            self._keep(kept, request_id, spans)
            kept.is_complete = is_complete
        if is_complete:
            self.num_open -= 1
        if self._exporter is not None and exported:
            self._exporter.put([span for span in spans if span.name in exported])
        for sink in tuple(self._sinks.values()):
            self._show(sink, spans)

    def _show(self, sink: Sink, spans: Sequence[Span]) -> None:
        """What looks on cannot harm what it looks at."""
        try:
            sink(spans)
        except Exception:
            logger.exception("a sink of spans failed")

    def _keep(self, kept: _Kept, request_id: str, spans: Sequence[Span]) -> None:
        """The newest request with an id is the one that is found under it."""
        if not kept.was_kept:
            kept.was_kept = True
            self._forget(request_id)
            self._kept[request_id] = kept
        if self._kept.get(request_id) is not kept:
            return  # given up for newer ones
        taken = spans[: MAX_SPANS_OF_ONE - len(kept.spans)]
        kept.spans += taken
        self._num_spans += len(taken)
        while len(self._kept) > MAX_TRACES or (self._num_spans > MAX_SPANS and len(self._kept) > 1):
            self._forget(next(iter(self._kept)))

    def _newest_of(self, trace_id: str) -> _Kept | None:
        if not re.fullmatch("[0-9a-fA-F]{32}", trace_id):
            return None
        number = int(trace_id, 16)
        return next((kept for kept in reversed(self._kept.values()) if kept.trace_id == number), None)

    def _forget(self, request_id: str) -> None:
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            self._num_spans -= len(kept.spans)


def _place(span: Span) -> tuple[int, int, bool]:
    """By start; parents before their children."""
    return span.start_unix_nanos, -span.end_unix_nanos, span.name != "round"


def _at_least_round(level: TraceLevel) -> TraceLevel:
    return level if level in _KEPT else "round"


def create_tracing(config: TelemetryConfig) -> Tracing:
    """As configured. OpenTelemetry is loaded only if there is somebody to send spans to."""
    exporter: Exporter | None = None
    if config.otlp_endpoint and config.trace_level != "off":
        from specpipe.telemetry.export import SpanExport

        exporter = SpanExport(config.otlp_endpoint)
    return Tracing(config, process=own_process(Role.COORDINATOR), exporter=exporter)
