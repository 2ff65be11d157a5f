"""What bars, marks, rounds and totals say: one set of words for all renderers.

Owns: sentences and numbers as texts. Must not know: layout, how anything is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from specpipe.spans import AttributeValue, Process, Span, SpanEvent
from specpipe.timeline.attributes import count_of, printable, text_of
from specpipe.timeline.model import Lane, Round, Timeline, Tone, Totals

OWN_PREFIX: Final = "specpipe."
MAX_VALUE_CHARS: Final = 200
SAID_IN_FIRST_LINE: Final = {"specpipe.round", "specpipe.outcome", "specpipe.num_verified", "specpipe.num_accepted"}
HOW_TO_READ: Final = "In a round: nodes accepted, of those verified. In a draft step: nodes that the tree had then."
DRAFT_WORTH: Final = {
    Tone.ACCEPTED: "verified when tokens were accepted",
    Tone.REJECTED: "verified, nothing accepted",
    Tone.WASTED: "never verified",
}


def ms_text(ms: float) -> str:
    """Three digits, more or less: 0.04 ms, 1.25 ms, 12.5 ms, 125 ms, 1.25 s."""
    if not ms:
        return "0 ms"
    number, unit = (ms / 1000, "s") if ms >= 999.5 else (ms, "ms")
    return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f} {unit}"


def count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def share_text(share: float) -> str:
    """Never 100 % or 0 % of what is not quite all or nothing."""
    percent = min(round(100 * share), 99) if share < 1 else 100
    return f"{max(percent, 1) if share > 0 else 0} %"


def process_words(process: Process) -> str:
    pid = f"pid {process.pid}{' on ' + process.host if process.host else ''}" if process.pid else ""
    return printable(f"{process.address} ({pid})" if process.address and pid else process.address or pid)


def lanes_words(lanes: Iterable[Lane]) -> str:
    """Which process each lane is."""
    return " · ".join(f"{lane.name}: {lane.process}" for lane in lanes if lane.process)


def bar_labels(span: Span, outcome: str) -> tuple[str, ...]:
    """From the longest to the shortest."""
    if span.error:
        return (f"{printable(span.name)} failed", "failed", "!")
    match span.name:
        case "verify":
            return _verify_labels(span, outcome)
        case "draft":
            num_nodes = count_of(span, "num_tree_nodes")
            return (f"{num_nodes} nodes", f"{num_nodes}") if num_nodes else ()
        case "rank":
            return (f"rank {count_of(span, 'rank')}", f"{count_of(span, 'rank')}")
    return (printable(span.name), printable(span.name[:3]))


def _verify_labels(span: Span, outcome: str) -> tuple[str, ...]:
    verified, accepted = count_of(span, "num_verified"), count_of(span, "num_accepted")
    word = outcome_word(outcome)
    if not verified:
        return (word, word[0])
    found = f"{accepted} of {verified}"
    return (f"{word}: {found} accepted", f"{word} {found}", found, f"{accepted}")


def outcome_word(outcome: str) -> str:
    return {"none": "plain", "late": "miss: late", "stale": "miss: stale"}.get(outcome, outcome)


def bar_details(span: Span, tone: Tone, outcome: str, round_number: int, start_ms: float) -> tuple[str, ...]:
    duration_ms = (span.end_unix_nanos - span.start_unix_nanos) / 1e6
    lines = [_first_line(span, tone, outcome, round_number)]
    lines.append(f"{ms_text(duration_ms)}, from {ms_text(start_ms)} on")
    if span.error:
        lines.append(f"error: {printable(span.error)}")
    return (*lines, *_attribute_lines(span.attributes))


def _first_line(span: Span, tone: Tone, outcome: str, round_number: int) -> str:
    match span.name:
        case "verify":
            verified, accepted = count_of(span, "num_verified"), count_of(span, "num_accepted")
            found = f", {accepted} of {count_text(verified, 'verified node')} accepted" if verified else ""
            return f"round {round_number}: {outcome_word(outcome)}{found}"
        case "draft":
            step = text_of(span, "specpipe.step")
            return f"draft step{' ' + step if step else ''}: {DRAFT_WORTH[tone]}"
    return printable(span.name)


def _attribute_lines(attributes: Mapping[str, AttributeValue]) -> Iterator[str]:
    for name in sorted(attributes.keys() - SAID_IN_FIRST_LINE):
        text = _value_text(attributes[name])
        shown = text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."
        yield printable(f"{name.removeprefix(OWN_PREFIX)}: {shown}")


def _value_text(value: AttributeValue) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return ", ".join(_value_text(part) for part in value)
    return str(value)


def event_details(event: SpanEvent, at_ms: float) -> tuple[str, ...]:
    return (printable(event.name), f"at {ms_text(at_ms)}", *_attribute_lines(event.attributes))


def wait_details(tone: Tone, ms: float, round_number: int) -> tuple[str, ...]:
    what = (
        "waited for an extension, with nothing to run" if tone is Tone.EXPOSED else "was ready, and others went first"
    )
    before = f"before round {round_number}: " if round_number else ""
    return (f"{before}{what}", ms_text(ms))


def headline(timeline: Timeline) -> str:
    """What was asked of whom."""
    parts = [f"request {timeline.request_id}" if timeline.request_id else f"trace {timeline.trace_id}"]
    parts += [part for part in (timeline.model, timeline.mode) if part]
    if not timeline.is_complete:
        parts.append("not complete yet")
    return " · ".join(parts)


def answer_words(timeline: Timeline) -> list[str]:
    """What came of it, and how long it took."""
    took = ms_text(timeline.duration_ms if timeline.answer_ms is None else timeline.answer_ms)
    totals, num_tokens = timeline.totals, timeline.num_tokens
    parts = [f"{count_text(num_tokens, 'token')} in {took}" if num_tokens is not None else took]
    if ending := timeline.error or timeline.ending:
        parts[0] += f" ({ending})"
    parts.append(count_text(totals.num_rounds, "round"))
    if num_tokens and totals.num_rounds:
        parts.append(f"{num_tokens / totals.num_rounds:.2f} tokens a round")
    if totals.num_hits + totals.num_misses:
        parts.append(_hit_words(totals))
    return parts


def _hit_words(totals: Totals) -> str:
    looked_up = f" ({totals.num_lookups} looked up)" if totals.num_lookups else ""
    misses = "miss" if totals.num_misses == 1 else "misses"
    return f"{count_text(totals.num_hits, 'hit')}{looked_up}, {totals.num_misses} {misses}"


def drafting_words(totals: Totals) -> str:
    """How much of the drafting cost time; empty if nothing was drafted."""
    if totals.hidden_share is None:
        return ""
    words = (
        f"drafting {ms_text(totals.draft_ms)}: {share_text(totals.hidden_share)} hidden behind the target's steps, "
        f"{ms_text(totals.exposed_ms)} exposed"
    )
    if totals.wasted_ms:
        words += f", {ms_text(totals.wasted_ms)} never verified"
    return words


def round_cells(one: Round) -> tuple[str, ...]:
    """As in ROUND_COLUMNS."""
    return (
        str(one.number),
        outcome_word(one.outcome),
        ms_text(one.start_ms),
        ms_text(one.duration_ms),
        ms_text(one.forward_ms),
        ms_text(one.exposed_ms) if one.exposed_ms else "-",
        ms_text(one.queue_ms) if one.queue_ms else "-",
        f"{one.num_accepted} of {one.num_verified}" if one.num_verified else "-",
        str(one.num_draft_steps) if one.num_draft_steps else "-",
    )


ROUND_COLUMNS: Final = (
    "round",
    "began with",
    "from",
    "took",
    "verify",
    "exposed",
    "queue",
    "accepted",
    "drafts",
)
