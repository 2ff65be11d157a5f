"""A trace as one JSON object, for programs: the spans as they are, and the rounds and sums that the picture shows.

Owns: the names in it; docs/tracing.md tells what spans and attributes mean. Ids are hexadecimal texts, as elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from specpipe.spans import AttributeValue, KeptTrace, Span
from specpipe.timeline.layout import lay_out
from specpipe.timeline.model import Round, Timeline


def trace_json(trace: KeptTrace) -> dict[str, Any]:
    timeline = lay_out(trace)
    return {
        "request_id": timeline.request_id,
        "trace_id": timeline.trace_id,
        "is_complete": trace.is_complete,
        "totals": _totals_json(timeline),
        "rounds": [_round_json(one) for one in timeline.rounds],
        "spans": [_span_json(span) for span in trace.spans],
    }


def _totals_json(timeline: Timeline) -> dict[str, Any]:
    return {**asdict(timeline.totals), "hidden_share": timeline.totals.hidden_share}


def _round_json(one: Round) -> dict[str, Any]:
    values = asdict(one)
    del values["tone"]
    return values


def _span_json(span: Span) -> dict[str, Any]:
    return {
        "name": span.name,
        "span_id": f"{span.span_id:016x}",
        "parent_id": f"{span.parent_id:016x}" if span.parent_id else None,
        "process": {**asdict(span.process), "role": span.process.role.value},
        "start_unix_nanos": span.start_unix_nanos,
        "end_unix_nanos": span.end_unix_nanos,
        "attributes": _attributes_json(span.attributes),
        "events": [
            {"name": e.name, "unix_nanos": e.unix_nanos, "attributes": _attributes_json(e.attributes)}
            for e in span.events
        ],
        "links": [f"{linked:016x}" for linked in span.links],
        "error": span.error or None,
    }


def _attributes_json(attributes: Mapping[str, AttributeValue]) -> dict[str, Any]:
    return {name: _value_json(value) for name, value in attributes.items()}


def _value_json(value: AttributeValue) -> Any:
    """JSON has no number for what is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return [_value_json(part) for part in value] if isinstance(value, tuple) else value
