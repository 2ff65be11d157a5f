"""From the trace of one request to the picture of it.

Owns: rounds, sums, what the picture says of the request. Pure. Must not know: how it is drawn.

Whatever spans come, a picture comes out: of spans that do not belong together, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from specpipe.spans import KeptTrace, Span
from specpipe.timeline.attributes import count_of, number_of, printable, text_of
from specpipe.timeline.lanes import lanes_of
from specpipe.timeline.meaning import Facts, draft_ms, facts_of, forward_ms
from specpipe.timeline.model import Round, Timeline, Tone, Totals


def lay_out(trace: KeptTrace, *, request_id: str = "") -> Timeline:
    """The picture of a trace, finished or not; `request_id` is shown if the trace does not say it yet."""
    by_id = {span.span_id: span for span in reversed(trace.spans)}  # of two with one id the first counts
    spans = sorted(by_id.values(), key=_place)
    facts = facts_of(spans)
    request = next((span for span in spans if span.name == "generate"), None)
    rounds = _rounds([span for span in spans if span.name == "verify"], facts)
    return Timeline(
        request_id=_said(request, "specpipe.request_id") or printable(request_id),
        trace_id=f"{trace.trace_id:032x}",
        is_complete=trace.is_complete,
        model=_said(request, "gen_ai.response.model") or _said(request, "gen_ai.request.model"),
        mode=_said(request, "specpipe.mode"),
        duration_ms=max((facts.ms(span.end_unix_nanos) for span in spans), default=0.0),
        answer_ms=facts.ms(request.end_unix_nanos) - facts.ms(request.start_unix_nanos) if request else None,
        num_prompt_tokens=_usage(request, "input"),
        num_tokens=_usage(request, "output"),
        ending=_said(request, "gen_ai.response.finish_reasons"),
        error=printable(request.error) if request else "",
        lanes=lanes_of(spans, facts),
        rounds=rounds,
        totals=_totals(rounds, [span for span in spans if span.name == "draft"], request, facts),
    )


def _place(span: Span) -> tuple[int, bool, int, int]:
    """Ranks come after the step that they worked on, however long they took."""
    return span.start_unix_nanos, span.name == "rank", -span.end_unix_nanos, span.span_id


def _said(request: Span | None, name: str) -> str:
    return text_of(request, name) if request else ""


def _usage(request: Span | None, side: str) -> int | None:
    value = request.attributes.get(f"gen_ai.usage.{side}_tokens") if request else None
    return value if isinstance(value, int) else None


def _rounds(verifies: Iterable[Span], facts: Facts) -> tuple[Round, ...]:
    rounds: list[Round] = []
    for verify in verifies:
        start_ms = facts.ms(verify.start_unix_nanos)
        exposed_ms, queue_ms = number_of(verify, "exposed_ms"), number_of(verify, "queue_ms")
        waits_from = max(start_ms - exposed_ms - queue_ms, 0.0)
        rounds.append(
            Round(
                number=facts.rounds[verify.span_id],
                start_ms=min(rounds[-1].end_ms, start_ms) if rounds else waits_from,
                end_ms=facts.ms(verify.end_unix_nanos),
                tone=facts.tone_of(verify),
                outcome=facts.outcomes[verify.span_id],
                forward_ms=forward_ms(verify),
                exposed_ms=exposed_ms,
                queue_ms=queue_ms,
                num_verified=count_of(verify, "num_verified"),
                num_accepted=count_of(verify, "num_accepted"),
                num_draft_steps=len(facts.links_of(verify)),
            )
        )
    return tuple(rounds)


def _totals(rounds: Sequence[Round], drafts: Sequence[Span], request: Span | None, facts: Facts) -> Totals:
    """Where the request's own statistics came with the trace, the sums of times are theirs: they leave out draft steps
    of which no node ever came."""
    drafted_ms, exposed_ms = sum(map(draft_ms, drafts)), sum(one.exposed_ms for one in rounds)
    verified_ms = sum(draft_ms(span) for span in drafts if facts.tone_of(span) is not Tone.WASTED)
    if request is not None and "specpipe.draft_ms" in request.attributes:
        drafted_ms, exposed_ms = number_of(request, "draft_ms"), number_of(request, "exposed_ms")
    num_of = Counter(one.tone for one in rounds)
    return Totals(
        num_rounds=(count_of(request, "num_rounds") if request else 0) or len(rounds),
        num_hits=num_of[Tone.HIT] + num_of[Tone.LOOKUP],
        num_lookups=num_of[Tone.LOOKUP],
        num_misses=num_of[Tone.MISS],
        num_verified=sum(one.num_verified for one in rounds),
        num_accepted=sum(one.num_accepted for one in rounds),
        num_draft_steps=len(drafts),
        forward_ms=sum(one.forward_ms for one in rounds),
        draft_ms=drafted_ms,
        exposed_ms=exposed_ms,
        hidden_ms=max(drafted_ms - exposed_ms, 0.0),
        wasted_ms=max(drafted_ms - verified_ms, 0.0),
        queue_ms=sum(one.queue_ms for one in rounds),
    )
