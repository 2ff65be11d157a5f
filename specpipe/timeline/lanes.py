"""One lane for each process: its bars in rows, what it waited for, what happened on it.

Owns: the order of lanes, the rows within one. Must not know: how it is drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from specpipe.spans import Process, Role, Span
from specpipe.timeline.attributes import number_of, printable, text_of
from specpipe.timeline.meaning import Facts
from specpipe.timeline.model import Bar, Lane, Mark, Tone
from specpipe.timeline.words import bar_details, bar_labels, event_details, process_words, wait_details

LANE_ORDER: Final = (Role.CLIENT, Role.COORDINATOR, Role.TARGET_WORKER, Role.DRAFT_WORKER)
LANE_NAMES: Final = {
    Role.CLIENT: "client",
    Role.COORDINATOR: "coordinator",
    Role.TARGET_WORKER: "target",
    Role.DRAFT_WORKER: "draft",
}
FRAMES: Final = ("generate", "round")  # how long they took is told by what lies in them
TOLD_BY_ROUND: Final = ("hit", "miss", "lookup", "late", "stale")  # events that are no marks
LEAST_QUEUE: Final = 0.1  # of the step that it precedes: what is shorter is the way from one step to the next
TOLERANCE_MS: Final = 0.05  # steps that overlap by less come one after the other


def lanes_of(spans: Sequence[Span], facts: Facts) -> tuple[Lane, ...]:
    """Spans are sorted by start. A worker that was lost and its successor have a lane each."""
    by_process: dict[Process, list[Span]] = defaultdict(list)
    for span in spans:
        by_process[span.process].append(span)
    processes = sorted(by_process, key=lambda process: LANE_ORDER.index(process.role))  # stable: by first span
    names = _names(processes)
    marks = _marks(spans, processes, facts)
    return tuple(_lane(names[p], p, by_process[p], marks[p], facts) for p in processes)


def _names(processes: Sequence[Process]) -> dict[Process, str]:
    """Numbered where a role has several."""
    names = {}
    for role in LANE_ORDER:
        own = [process for process in processes if process.role is role]
        for number, process in enumerate(own, start=1):
            names[process] = LANE_NAMES[role] + (f" {number}" if len(own) > 1 else "")
    return names


def _lane(name: str, process: Process, spans: Sequence[Span], marks: Sequence[Mark], facts: Facts) -> Lane:
    shown = [span for span in spans if span.name not in FRAMES or (span.error and span.name == "round")]
    bars = _in_rows(_without_doubles([_bar(span, facts) for span in shown]))
    bars += _waits(bars, {span.span_id: span for span in shown}, facts)
    return Lane(
        name=name,
        process=process_words(process),
        num_rows=1 + max((bar.row for bar in bars), default=0),
        bars=tuple(sorted(bars, key=lambda bar: (bar.start_ms, bar.row))),
        marks=tuple(marks),
        is_target=process.role is Role.TARGET_WORKER,
        is_draft=process.role is Role.DRAFT_WORKER,
    )


def _bar(span: Span, facts: Facts) -> Bar:
    number = facts.rounds.get(span.span_id, 0)
    outcome = facts.outcomes.get(span.span_id, "")
    return Bar(
        tone=facts.tone_of(span),
        start_ms=facts.ms(span.start_unix_nanos),
        end_ms=facts.ms(span.end_unix_nanos),
        labels=bar_labels(span, outcome),
        details=(
            *bar_details(span, facts.tone_of(span), outcome, number, facts.ms(span.start_unix_nanos)),
            *facts.notes.get(span.span_id, ()),
        ),
        id=span.span_id,
        links=facts.links_of(span),
        round=number,
        is_failed=bool(span.error),
    )


def _without_doubles(bars: Sequence[Bar]) -> list[Bar]:
    """The step that ends a prefill is a round or drafts as well: it is drawn once."""
    steps = [bar for bar in bars if bar.tone is not Tone.PREFILL]
    kept: dict[int, Bar] = {bar.id: bar for bar in bars}
    for prefill in (bar for bar in bars if bar.tone is Tone.PREFILL):
        last = next((step for step in steps if prefill.start_ms <= step.start_ms < prefill.end_ms), None)
        if last is None:
            continue
        if last.start_ms > prefill.start_ms:
            kept[prefill.id] = replace(prefill, end_ms=last.start_ms)
        elif kept[last.id] is last:
            del kept[prefill.id]
            labels = (f"prefill and {'round' if last.round else 'draft'}", *prefill.labels)
            kept[last.id] = replace(last, tone=Tone.PREFILL, labels=labels)
    return list(kept.values())


def _in_rows(bars: Sequence[Bar]) -> list[Bar]:
    """Each in the first row that is free when it starts. Bars are sorted by start."""
    free_from: list[float] = []
    placed = []
    for bar in bars:
        fits = (row for row, end_ms in enumerate(free_from) if end_ms <= bar.start_ms + TOLERANCE_MS)
        row = next(fits, len(free_from))
        if row == len(free_from):
            free_from.append(0.0)
        start_ms = max(bar.start_ms, free_from[row])
        placed.append(replace(bar, row=row, start_ms=start_ms, end_ms=max(bar.end_ms, start_ms)))
        free_from[row] = placed[-1].end_ms
    return placed


def _waits(bars: Sequence[Bar], spans: Mapping[int, Span], facts: Facts) -> list[Bar]:
    """Before each step what it waited for, as far as the time back to the bar before it goes. Nobody waits for a draft
    step: what it waited for itself is in its details only."""
    ends: dict[int, float] = defaultdict(float)  # by row
    waits: list[Bar] = []
    for bar in bars:
        if bar.tone is not Tone.QUEUED and bar.id not in facts.drafts:
            waits += _waits_before(bar, spans[bar.id], ends[bar.row])
        ends[bar.row] = bar.end_ms
    return waits


def _waits_before(bar: Bar, span: Span, from_ms: float) -> Iterable[Bar]:
    end_ms = bar.start_ms
    for tone, name in ((Tone.EXPOSED, "exposed"), (Tone.QUEUED, "queue")):
        waited_ms = number_of(span, f"{name}_ms")
        start_ms = max(end_ms - waited_ms, from_ms)
        if start_ms < end_ms and (tone is Tone.EXPOSED or waited_ms >= LEAST_QUEUE * bar.duration_ms):
            details = wait_details(tone, waited_ms, bar.round)
            yield Bar(
                tone=tone,
                start_ms=start_ms,
                end_ms=end_ms,
                row=bar.row,
                labels=(name,),
                details=details,
                round=bar.round,
            )
            end_ms = start_ms


def _marks(spans: Sequence[Span], processes: Sequence[Process], facts: Facts) -> dict[Process, list[Mark]]:
    """Events, each where it happened: on the worker that it names, else on the process whose span tells it."""
    by_address = {process.address: process for process in processes if process.address}
    marks: dict[Process, list[Mark]] = {process: [] for process in processes}
    for span in spans:
        for event in span.events:
            if event.name not in TOLD_BY_ROUND:
                at_ms, worker = facts.ms(event.unix_nanos), text_of(event, "specpipe.worker")
                mark = Mark(text=printable(event.name), at_ms=at_ms, details=event_details(event, at_ms))
                marks[by_address.get(worker, span.process)].append(mark)
    return {process: sorted(found, key=lambda mark: mark.at_ms) for process, found in marks.items()}
