"""A piece of a trace as a value: made by the coordinator, exported by telemetry, drawn by the timeline.

Owns: what a span is, and how processes are named. Must not know: OpenTelemetry, protobuf, how spans come about.

All spans of a request are laid out on the coordinator's clock, whoever did the work: see docs/decisions/0012.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

AttributeValue = str | bool | int | float | tuple[str, ...] | tuple[int, ...] | tuple[float, ...]


class SpanKind(enum.Enum):
    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


class Role(enum.Enum):
    COORDINATOR = "coordinator"
    DRAFT_WORKER = "draft-worker"
    TARGET_WORKER = "target-worker"
    CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """Who did what a span tells. Becomes the resource of the span: service.name specpipe-ROLE."""

    role: Role
    address: str = ""  # HOST:PORT of a worker
    host: str = ""
    pid: int = 0
    version: str = ""
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    name: str  # hit, miss, stale, late, resync, preempted, draft lost, session moved, cancel ...
    unix_nanos: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Ended. Names: generate, queue, tokenize, prefill, round, verify, draft, rank."""

    name: str
    trace_id: int  # 128 bits
    span_id: int  # 64 bits, never 0
    parent_id: int = 0  # 0: none
    kind: SpanKind = SpanKind.INTERNAL
    process: Process
    start_unix_nanos: int
    end_unix_nanos: int
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    links: tuple[int, ...] = ()  # span ids of the same trace
    error: str = ""  # empty: it went well
    trace_state: str = ""  # W3C tracestate, as it came


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTrace:
    """What is known of one request so far."""

    trace_id: int
    is_complete: bool  # the request has ended and no span is to come
    spans: tuple[Span, ...] = ()  # by start
