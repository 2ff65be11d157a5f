"""What the page is told, as JSON.

Owns: the shape of answers' events, of spans, of the service's state. Must not know: HTTP, who listens.

Of a span only what says how it went is told: never what was asked or answered, whoever watches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

import specpipe
from coordinator.driver import Coordinator
from coordinator.events import Kind
from coordinator.pools import Connection
from coordinator.validation import DEFAULT_MAX_TOKENS, DEFAULT_TEMPERATURE, ServiceFacts
from specpipe.answers import AnswerEvent, Chunk, Finished, Started
from specpipe.spans import Span

TOLD: Final = tuple(
    (f"specpipe.{name}", name)
    for name in (
        *("step", "incarnation", "round", "outcome", "exposed_ms", "batch_sessions", "batch_tokens"),
        *("num_rows", "num_verified", "num_accepted", "num_committed", "num_cut"),
    )
)
"""Attributes that the page shows, and what they are called there."""


def event_json(event: AnswerEvent) -> tuple[str, dict[str, Any]]:
    """Name and content. 64-bit numbers are texts: JavaScript cannot hold them."""
    match event:
        case Started():
            return "started", {**asdict(event), "seed": str(event.seed), "rule": event.rule and event.rule.value}
        case Chunk():
            pairs = zip(event.token_ids, event.pieces(), strict=True)
            pieces = [[token, text, origin.value] for token, (text, origin) in pairs]
            return "chunk", {"round": event.round, "pieces": pieces}
        case Finished():
            stats = event.speculation
            return "finished", {
                "finish_reason": event.finish_reason.value,
                "usage": {
                    "prompt_tokens": event.prompt_tokens,
                    "completion_tokens": event.completion_tokens,
                    "cached_prompt_tokens": event.cached_prompt_tokens,
                },
                "timing": asdict(event.timing),
                "speculation": {**asdict(stats), "mode": stats.mode.value, "rule": stats.rule.value},
            }


def span_json(span: Span) -> dict[str, Any]:
    """Times in milliseconds since 1970; ids as hexadecimal digits. NOTE: there are thousands a second under load."""
    told, attributes = {}, span.attributes
    for name, short in TOLD:
        if name in attributes:
            told[short] = attributes[name]
    return {
        "name": span.name,
        "id": f"{span.span_id:x}",
        "parent": f"{span.parent_id:x}",
        "role": span.process.role.value,
        "address": span.process.address,
        "start": span.start_unix_nanos // 1000 / 1000,
        "end": span.end_unix_nanos // 1000 / 1000,
        "attributes": told,
        "links": [f"{link:x}" for link in span.links],
    }


def service_json(facts: ServiceFacts | None) -> dict[str, Any]:
    """What does not change while the service runs. `model` is null until it is known."""
    if facts is None:
        return {"version": specpipe.__version__, "model": None}
    return {
        "version": specpipe.__version__,
        "model": {
            "name": facts.model_name,
            "vocab_size": facts.model.vocab_size,
            "max_context": facts.model.max_context,
        },
        "drafter": facts.drafter,
        "defaults": {
            "mode": facts.mode.value,
            "rule": facts.rule.value,
            "num_speculative_tokens": facts.num_speculative_tokens,
            "temperature": DEFAULT_TEMPERATURE,
            "max_tokens": DEFAULT_MAX_TOKENS,
        },
    }


def state_json(coordinator: Coordinator) -> dict[str, Any]:
    """What changes: requests, and each worker that is looked for. The words of states are those of docs/metrics.md."""
    workers = sorted(coordinator.workers, key=lambda worker: worker[0] is not Kind.TARGET)  # targets first
    return {
        "is_ready": coordinator.is_ready,
        "is_stopping": coordinator.is_stopping,
        "requests": {"running": coordinator.num_running, "waiting": coordinator.num_waiting},
        "workers": [_worker_json(kind, address, coordinator.pools[kind]) for kind, address in workers],
    }


def _worker_json(kind: Kind, address: str, connections: Iterable[Connection]) -> dict[str, Any]:
    connection = next((c for c in connections if c.address == address), None)
    base: dict[str, Any] = {"kind": kind.value, "address": address, "state": "lost"}
    if connection is None:
        return base
    hello, heartbeat = connection.link.hello, connection.link.heartbeat
    return {
        **base,
        "state": "silent" if connection.is_suspect else "connected",
        "has_room": connection.has_room,
        "model": hello.model.name.rstrip("/").rpartition("/")[2] if hello.model else "",
        "sessions": len(connection.sessions),
        "max_sessions": hello.max_sessions,
        "free_slots": heartbeat.num_free_slots,
        "num_slots": hello.num_slots,
        "step": heartbeat.step,
        "step_running_ms": heartbeat.step_running_ms,
        "incarnation": f"{hello.incarnation:016x}",
        "pid": hello.process.pid,
        "host": hello.process.host,
    }
