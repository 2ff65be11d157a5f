"""Which failed requests the faults explain: who was out of reach, and when.

Owns: spans of time, and that verdict. Must not know: processes, networks, kinds of faults. Pure: times are given, in
seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from questions import Outcome

GRACE_S = 10.0
"""From when all is well again until it is found: who dials pauses for up to 4 s, and a connection that hangs is given
up after 5."""
UNSERVED_S = 7.0
"""Without any target worker in reach, before a request fails: the coordinator's 8.5 s, less the last heartbeat before
the fault, from which it counts."""

Span = tuple[float, float]  # begin, end


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """When a coordinator was out of its clients' reach, and each target worker out of the coordinator's.

    Spans may overlap, and come in any order. A draft worker may be out of reach as it likes: no request may fail of it.
    """

    own: tuple[Span, ...]
    targets: tuple[tuple[Span, ...], ...]

    def explains(self, asked_s: float, over_s: float) -> bool:
        """Whether a request that was asked then, and over then, may have failed here."""
        return bool(self._lost(asked_s, over_s)) or self._unserved_s(asked_s, over_s) >= UNSERVED_S

    def _lost(self, asked_s: float, over_s: float) -> list[Span]:
        return _common([(asked_s, over_s)], _with_grace(self.own))

    def _unserved_s(self, asked_s: float, over_s: float) -> float:
        """The longest time in one piece without any target worker."""
        unserved = [(asked_s, over_s)]
        for spans in self.targets:
            unserved = _common(unserved, _with_grace(spans))
        return max((end - begin for begin, end in unserved), default=0.0)


def unexplained(outcomes: Iterable[Outcome], reaches: Sequence[Reach]) -> list[str]:
    """Failures, in sentences, that no fault explains at every coordinator that was asked; `reaches` by their place."""
    return [
        f"no fault explains this error: {outcome}"
        for outcome in outcomes
        if outcome.error is not None and outcome.over_s is not None and not _is_explained(outcome, reaches)
    ]


def _is_explained(outcome: Outcome, reaches: Sequence[Reach]) -> bool:
    question = outcome.question
    asked = reaches if question.asks_elsewhere else [reaches[question.first_place]]
    assert outcome.over_s is not None
    return all(reach.explains(outcome.asked_s, outcome.over_s) for reach in asked)


def _with_grace(spans: Iterable[Span]) -> list[Span]:
    """In order, none touching another."""
    merged: list[Span] = []
    for begin, end in sorted((begin, end + GRACE_S) for begin, end in spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _common(some: Iterable[Span], others: Sequence[Span]) -> list[Span]:
    """What is in both. Those of each do not touch."""
    pairs = ((max(one[0], other[0]), min(one[1], other[1])) for one in some for other in others)
    return [(begin, end) for begin, end in pairs if begin <= end]
