"""W3C trace context: what a caller says about its trace, and what is said to the next one.

Owns: reading and writing `traceparent` and `tracestate`, with OpenTelemetry's own propagator. Must not know: spans of
ours, gRPC. OpenTelemetry is imported when there is something to read.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerContext:
    """The span of the caller in which it asked."""

    trace_id: int
    span_id: int
    is_sampled: bool
    trace_state: str = ""  # as it came, where it is well-formed


def read_context(metadata: Iterable[tuple[str, str | bytes]]) -> CallerContext | None:
    """None: the caller says nothing, or nothing that can be read. Never raises."""
    carrier: dict[str, list[str]] = {}
    for key, value in metadata:
        if key in (TRACEPARENT, TRACESTATE) and isinstance(value, str):
            carrier.setdefault(key, []).append(value)
    if len(carrier.get(TRACEPARENT, ())) != 1:
        return None
    _keep_quiet()
    from opentelemetry.context import Context
    from opentelemetry.trace import get_current_span

    context = get_current_span(_propagator().extract(carrier, Context())).get_span_context()
    if not context.is_valid:
        return None
    return CallerContext(
        trace_id=context.trace_id,
        span_id=context.span_id,
        is_sampled=context.trace_flags.sampled,
        trace_state=context.trace_state.to_header(),
    )


def traceparent(trace_id: int, span_id: int, *, is_sampled: bool) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{int(is_sampled):02x}"


def current_context() -> list[tuple[str, str]]:
    """Metadata that makes the current OpenTelemetry span the caller's; empty where there is none.

    Whoever has such a span has imported OpenTelemetry; nobody else pays for it.
    """
    if "opentelemetry.trace" not in sys.modules:
        return []
    carrier: dict[str, str] = {}
    _propagator().inject(carrier)
    return list(carrier.items())


def is_sampled_by_ratio(trace_id: int, ratio: float) -> bool:
    """As OpenTelemetry's TraceIdRatioBased decides, so that everyone with this ratio keeps the same traces."""
    return trace_id & (2**64 - 1) < round(ratio * 2**64)


@cache
def _keep_quiet() -> None:
    """The library logs each malformed header, and so would let callers fill the log."""
    for name in ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext"):
        logging.getLogger(name).setLevel(logging.ERROR)


@cache
def _propagator() -> TraceContextTextMapPropagator:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator()
