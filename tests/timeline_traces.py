"""Traces as a coordinator writes them, made by hand: what each worker did when, in milliseconds."""

from __future__ import annotations

import random
from typing import Any

from specpipe.spans import KeptTrace, Process, Role, Span, SpanEvent, SpanKind

ORIGIN = 1_700_000_000_000_000_000
COORDINATOR = Process(role=Role.COORDINATOR, host="host-c", pid=30, version="1")
TARGET = Process(role=Role.TARGET_WORKER, address="host-a:6001", host="host-a", pid=10, incarnation=1)
DRAFT = Process(role=Role.DRAFT_WORKER, address="host-b:6002", host="host-b", pid=20, incarnation=2)
TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C


class TraceMaker:
    """Spans get ids in the order in which they are added."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(
        self,
        name: str,
        start_ms: float,
        end_ms: float,
        process: Process,
        *,
        parent_id: int = 1,
        links: tuple[int, ...] = (),
        events: tuple[tuple[str, float], ...] = (),
        error: str = "",
        **attributes: Any,
    ) -> int:
        """Attributes are specpipe's own, or any where a name is written with "__" for dots."""
        span_id = len(self.spans) + 1
        self.spans.append(
            Span(
                name=name,
                trace_id=TRACE_ID,
                span_id=span_id,
                parent_id=parent_id if span_id > 1 else 0,
                kind=SpanKind.SERVER if name == "generate" else SpanKind.INTERNAL,
                process=process,
                start_unix_nanos=nanos(start_ms),
                end_unix_nanos=nanos(end_ms),
                attributes={
                    n.replace("__", ".") if "__" in n else f"specpipe.{n}": value for n, value in attributes.items()
                },
                events=tuple(SpanEvent(name=event, unix_nanos=nanos(at)) for event, at in events),
                links=links,
                error=error,
            )
        )
        return span_id

    def trace(self, *, is_complete: bool = True) -> KeptTrace:
        return KeptTrace(trace_id=TRACE_ID, is_complete=is_complete, spans=tuple(self.spans))


def nanos(ms: float) -> int:
    return ORIGIN + round(ms * 1e6)


def four_rounds() -> KeptTrace:
    """A first round that ended the prefill, a hit, a miss that waited, a lookup. One draft step was for nothing."""
    make = TraceMaker()
    make.add(
        "generate",
        0.0,
        116.0,
        COORDINATOR,
        request_id="r-1",
        mode="pipelined",
        gen_ai__response__model="demo",
        gen_ai__response__finish_reasons=("length",),
        gen_ai__usage__input_tokens=12,
        gen_ai__usage__output_tokens=9,
    )
    make.add("tokenize", 0.0, 1.0, COORDINATOR)
    make.add("queue", 1.0, 4.0, COORDINATOR, queue_ms=3.0)
    make.add("prefill", 5.0, 25.0, TARGET, num_rows=12)
    make.add("prefill", 5.0, 11.0, DRAFT, num_rows=12)
    round_id = make.add("round", 5.0, 25.0, COORDINATOR, round=1, outcome="none")
    make.add("verify", 5.0, 25.0, TARGET, parent_id=round_id, round=1, forward_ms=20.0)
    used = make.add("draft", 11.5, 18.0, DRAFT, parent_id=round_id, step=1, num_tree_nodes=4, share_ms=6.5)
    make.add("draft", 18.5, 24.5, DRAFT, parent_id=round_id, step=2, num_tree_nodes=9, share_ms=6.0)
    round_id = make.add("round", 25.0, 49.0, COORDINATOR, round=2, outcome="hit", events=(("hit", 26.0),))
    counts = {"num_verified": 4, "num_accepted": 3}
    make.add("verify", 26.0, 49.0, TARGET, parent_id=round_id, links=(used,), round=2, forward_ms=23.0, **counts)
    events = (("late", 58.0), ("miss", 58.0))
    round_id = make.add("round", 49.0, 75.0, COORDINATOR, round=3, outcome="miss", events=events)
    waits = {"exposed_ms": 5.0, "queue_ms": 2.0}
    make.add("verify", 58.0, 75.0, TARGET, parent_id=round_id, round=3, forward_ms=17.0, **waits)
    events = (("restarted", 51.0),)
    used = make.add(
        "draft", 51.0, 66.0, DRAFT, parent_id=round_id, step=3, num_tree_nodes=5, share_ms=12.5, events=events
    )
    round_id = make.add("round", 75.0, 100.0, COORDINATOR, round=4, outcome="lookup")
    counts = {"num_verified": 2, "num_accepted": 0}
    make.add("verify", 76.0, 100.0, TARGET, parent_id=round_id, links=(used,), round=4, forward_ms=24.0, **counts)
    return make.trace()


def long_trace(num_rounds: int, *, seed: int = 1) -> KeptTrace:
    """A pipelined request as it usually goes: drafting all the time, a miss in seven, now and then a slow step."""
    rng, make = random.Random(seed), TraceMaker()
    make.add("generate", 0.0, 0.0, COORDINATOR, request_id="r-long", mode="pipelined", gen_ai__response__model="demo")
    make.add("tokenize", 0.1, 0.6, COORDINATOR)
    make.add("prefill", 1.5, 21.0, TARGET, batch_tokens=128)
    make.add("prefill", 1.5, 8.0, DRAFT, batch_tokens=128)
    now, drafted, pending, num_tokens = 21.3, 8.2, [], 0
    for number in range(1, num_rounds + 1):
        is_miss = number > 1 and rng.random() < 0.14
        length = rng.uniform(11, 14) * (5.0 if rng.random() < 0.01 else 1.0)
        waited = rng.uniform(0.5, 4.0) if is_miss and rng.random() < 0.5 else 0.0
        start, end = now + waited, now + waited + length
        outcome = "none" if number == 1 else "miss" if is_miss else "lookup" if rng.random() < 0.1 else "hit"
        accepted = 0 if outcome in ("miss", "none") else rng.choice((0, 1, 2, 2, 3, 4))
        round_id = make.add("round", now, end, COORDINATOR, round=number, outcome=outcome)
        if is_miss:
            drafted = max(drafted, now + 0.4)
        links = tuple(rng.sample(pending, min(len(pending), 2))) if outcome == "hit" else ()
        make.add(
            "verify",
            start,
            end,
            TARGET,
            parent_id=round_id,
            links=links,
            round=number,
            num_verified=accepted + rng.randint(1, 6) if outcome in ("hit", "lookup") else 0,
            num_accepted=accepted,
            exposed_ms=waited,
            forward_ms=length,
        )
        pending = []
        while drafted < end:
            step = rng.uniform(2.5, 4.0)
            events = (("restarted", drafted),) if is_miss and not pending else ()
            pending.append(
                make.add(
                    "draft",
                    drafted,
                    drafted + step,
                    DRAFT,
                    parent_id=round_id,
                    step=len(make.spans),
                    share_ms=step,
                    num_tree_nodes=rng.randint(4, 40),
                    events=events,
                )
            )
            drafted += step + 0.15
        now, num_tokens = end + 0.15, num_tokens + accepted + 1
    spans = make.spans
    make = TraceMaker()
    make.add(
        "generate",
        0.0,
        now + 1.0,
        COORDINATOR,
        request_id="r-long",
        mode="pipelined",
        gen_ai__response__model="demo",
        gen_ai__response__finish_reasons=("stop",),
        gen_ai__usage__output_tokens=num_tokens,
        gen_ai__usage__input_tokens=128,
    )
    make.spans += spans[1:]
    return make.trace()
