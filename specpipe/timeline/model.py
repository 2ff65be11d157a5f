"""What a picture of a trace is made of: lanes of bars on one time axis, rounds, marks, and what they add up to.

Owns: the values that renderers draw. Must not know: spans, terminals, SVG, HTML.

Times are milliseconds since the trace began. What a bar says is in words already, so that all renderers say the same.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Tone(enum.Enum):
    """What a bar shows; its colour, pattern and glyphs follow from this."""

    HIT = "hit"  # a round that began with a draft to verify
    LOOKUP = "lookup"  # a hit by the target worker's own lookup alone
    MISS = "miss"
    PLAIN = "plain"  # a first round, or one of a request that does not draft
    ACCEPTED = "accepted"  # a draft step, verified in a round that accepted tokens
    REJECTED = "rejected"  # a draft step, verified, and the target chose otherwise
    WASTED = "wasted"  # a draft step of which no node was verified
    PREFILL = "prefill"
    EXPOSED = "exposed"  # the target worker ran nothing and waited for an extension
    QUEUED = "queued"  # ready, and others went first
    OTHER = "other"


DRAFT_TONES = (Tone.ACCEPTED, Tone.REJECTED, Tone.WASTED)
WAIT_TONES = (Tone.EXPOSED, Tone.QUEUED)

MEANINGS = {
    Tone.HIT: "round with a draft to verify (hit)",
    Tone.LOOKUP: "round with a draft looked up by the target itself",
    Tone.MISS: "round without a draft (miss)",
    Tone.PLAIN: "first or plain round",
    Tone.ACCEPTED: "draft step, verified when tokens were accepted",
    Tone.REJECTED: "draft step, verified, nothing accepted",
    Tone.WASTED: "draft step, never verified",
    Tone.PREFILL: "prefill",
    Tone.EXPOSED: "target idle, waiting for a draft (exposed)",
    Tone.QUEUED: "waiting while others went first (queue)",
    Tone.OTHER: "other work",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    tone: Tone
    start_ms: float
    end_ms: float
    row: int = 0  # of its lane; bars of one row never overlap
    labels: tuple[str, ...] = ()  # to be written into it: the first that fits
    details: tuple[str, ...] = ()  # all there is to say, line by line; the first is its name
    id: int = 0  # of its span; 0: a wait, which has none
    links: tuple[int, ...] = ()  # ids of the draft bars whose nodes it verified
    round: int = 0  # 0: of no round
    is_failed: bool = False

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at one moment."""

    text: str
    at_ms: float
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One process."""

    name: str  # "target", or "target 2" where there are several
    process: str  # which one, in words
    num_rows: int
    bars: tuple[Bar, ...]  # by start
    marks: tuple[Mark, ...]  # by time
    is_target: bool = False
    is_draft: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One verify step with what led to it. `start_ms` is where the one before ended, so that rounds tile the time."""

    number: int
    start_ms: float
    end_ms: float
    tone: Tone
    outcome: str  # how it began: as its tone says, and why a miss was one
    forward_ms: float
    exposed_ms: float
    queue_ms: float
    num_verified: int
    num_accepted: int
    num_draft_steps: int  # whose nodes it verified

    @property
    def duration_ms(self) -> float:
        return self.end_ms - self.start_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the request; docs/statistics.md defines what is drafting, exposed, hidden and wasted."""

    num_rounds: int = 0
    num_hits: int = 0  # lookups included
    num_lookups: int = 0
    num_misses: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_draft_steps: int = 0
    forward_ms: float = 0.0  # of verify steps
    draft_ms: float = 0.0
    exposed_ms: float = 0.0
    hidden_ms: float = 0.0
    wasted_ms: float = 0.0
    queue_ms: float = 0.0

    @property
    def hidden_share(self) -> float | None:
        """Of the drafting; None if nothing was drafted."""
        return self.hidden_ms / self.draft_ms if self.draft_ms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    request_id: str
    trace_id: str
    is_complete: bool
    model: str
    mode: str
    duration_ms: float  # of all spans
    answer_ms: float | None  # of the request; None: it has not ended
    num_prompt_tokens: int | None
    num_tokens: int | None  # of the answer
    ending: str  # why it ended, as far as the trace says
    error: str
    lanes: tuple[Lane, ...]
    rounds: tuple[Round, ...]
    totals: Totals
