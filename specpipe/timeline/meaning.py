"""What the spans of a request mean for one another: which round a step was part of, how it went, what was in vain.

Owns: tones, numbers of rounds. Must not know: lanes, how anything is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from specpipe.spans import Span
from specpipe.timeline.attributes import count_of, number_of, text_of
from specpipe.timeline.model import Tone

OUTCOME_TONES: Final = {
    "hit": Tone.HIT,
    "lookup": Tone.LOOKUP,
    "miss": Tone.MISS,
    "late": Tone.MISS,
    "stale": Tone.MISS,
}
STEP_TONES: Final = {"prefill": Tone.PREFILL, "queue": Tone.QUEUED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What has to be known of all spans to tell what one of them means."""

    origin: int  # unix nanoseconds: where the time axis begins
    tones: Mapping[int, Tone]  # of verify and draft spans, by id
    outcomes: Mapping[int, str]  # of verify spans, by id: how their round began
    rounds: Mapping[int, int]  # of verify spans, by id: number of their round
    drafts: frozenset[int]  # ids of draft spans
    notes: Mapping[int, tuple[str, ...]]  # of verify spans, by id: what else is told of their round

    def ms(self, unix_nanos: int) -> float:
        """Since the axis began."""
        return max(unix_nanos - self.origin, 0) / 1e6

    def tone_of(self, span: Span) -> Tone:
        return self.tones.get(span.span_id) or STEP_TONES.get(span.name, Tone.OTHER)

    def links_of(self, span: Span) -> tuple[int, ...]:
        """The draft steps whose nodes a verify span verified, as far as they are there."""
        return tuple(sorted(set(span.links) & self.drafts)) if span.span_id in self.rounds else ()


def facts_of(spans: Sequence[Span]) -> Facts:
    """Spans are sorted by start."""
    verifies = [span for span in spans if span.name == "verify"]
    parents = {span.span_id: span for span in spans if span.name == "round"}
    outcomes = {span.span_id: _outcome(span, parents.get(span.parent_id)) for span in verifies}
    tones = {span.span_id: Tone.WASTED for span in spans if span.name == "draft"}
    drafts = frozenset(tones)
    for span in verifies:
        _judge_drafts(span, tones)
    return Facts(
        origin=spans[0].start_unix_nanos if spans else 0,
        tones=tones | {span.span_id: OUTCOME_TONES.get(outcomes[span.span_id], Tone.PLAIN) for span in verifies},
        outcomes=outcomes,
        rounds=_round_numbers(verifies, parents),
        drafts=drafts,
        notes={span.span_id: _notes(parents.get(span.parent_id)) for span in verifies},
    )


def _outcome(verify: Span, parent: Span | None) -> str:
    """A round is told after its steps: until then what was verified tells a hit."""
    told = text_of(verify, "specpipe.outcome") or (text_of(parent, "specpipe.outcome") if parent else "")
    return told or ("hit" if count_of(verify, "num_verified") else "none")


def _notes(parent: Span | None) -> tuple[str, ...]:
    """Extensions that came too late for the round before are no event of its own worth a mark."""
    events = parent.events if parent else ()
    return tuple(
        f"{event.name} extensions before it: {count}"
        for event in events
        if event.name in ("late", "stale") and (count := text_of(event, "specpipe.num_extensions"))
    )


def _judge_drafts(verify: Span, tones: dict[int, Tone]) -> None:
    for linked in verify.links:
        if linked in tones and tones[linked] is not Tone.ACCEPTED:
            tones[linked] = Tone.ACCEPTED if count_of(verify, "num_accepted") else Tone.REJECTED


def _round_numbers(verifies: Sequence[Span], parents: Mapping[int, Span]) -> dict[int, int]:
    """As the spans say, if that tells rounds apart and grows with time; else counted from 1."""
    told = [
        count_of(verify, "round")
        or (count_of(parents[verify.parent_id], "round") if verify.parent_id in parents else 0)
        for verify in verifies
    ]
    grows = all(told) and all(one < other for one, other in pairwise(told))
    numbers: Iterable[int] = told if grows else range(1, len(told) + 1)
    return {verify.span_id: number for verify, number in zip(verifies, numbers, strict=True)}


def forward_ms(span: Span) -> float:
    return number_of(span, "forward_ms") or (span.end_unix_nanos - span.start_unix_nanos) / 1e6


def draft_ms(span: Span) -> float:
    """The request's share of a draft step."""
    return number_of(span, "share_ms") or forward_ms(span)
