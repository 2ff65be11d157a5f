"""What a request's rounds add up to. docs/statistics.md says what each number means.

Owns: sums over commits and draft steps, and the cut of a commit's sums at a stop string. Must not know: clocks, wires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specpipe.answers import SpeculationStats
from specpipe.types import Commit, Extension, Mode, Origin, RoundStats, SpeculationParams

MAX_DRAFT_STEPS = 2**18
"""Draft steps that are counted of one request: some of each of its tokens, and no memory for a worker that lies."""


@dataclass(slots=True)
class _DraftStep:
    step_ms: float
    share_ms: float
    is_verified: bool = False


class RequestStatistics:
    """Fed with every commit as far as it was delivered, and every extension that passed.

    Each draft worker numbers its steps for itself, and anew when it starts again. A node may be verified when its
    worker is long gone. So steps get numbers of the request on their way to the target, which tells them in commits; a
    draft session, whose id is never used twice, and its worker's number say which step is meant.
    """

    def __init__(self, speculation: SpeculationParams) -> None:
        self._speculation = speculation
        self._sums = RoundStats()
        self.num_cached: int | None = None  # prompt tokens that the first target session found computed; None: untold
        self._num_tokens = 0  # committed in rounds
        self._num_accepted = 0
        self._steps: list[_DraftStep] = []  # the request's number of a step is 1 + its index
        self._numbers: dict[tuple[int, int], int] = {}  # of steps, from draft session and its worker's number

    def add_commit(self, commit: Commit) -> Commit:
        """`commit` holds only what was delivered: see `cut_commit`. Returns it as it was counted: see `_completed`."""
        commit = self._completed(commit)
        self._sums += commit.stats
        if self._num_tokens == 0 and commit.round > 0:
            self.num_cached = commit.stats.num_cached
        self._num_tokens += len(commit.tokens)
        self._num_accepted += commit.origins.count(Origin.ACCEPTED)
        for number in commit.verified_draft_steps:
            if 1 <= number <= len(self._steps):
                self._steps[number - 1].is_verified = True
        return commit

    def add_extension(self, extension: Extension) -> int:
        """A draft step counts once, however many extensions tell of it. Returns its number in this request, or 0."""
        if not extension.draft_step:
            return 0
        key = (extension.session, extension.draft_step)
        if key not in self._numbers:
            if len(self._steps) >= MAX_DRAFT_STEPS:
                return 0
            self._steps.append(_DraftStep(extension.draft_step_ms, extension.draft_share_ms))
            self._numbers[key] = len(self._steps)
        return self._numbers[key]

    def draft_step_number(self, session: int, draft_step: int) -> int:
        """Of a step whose extension was added; 0: none was. Rises by one with each step."""
        return self._numbers.get((session, draft_step), 0)

    def _completed(self, commit: Commit) -> Commit:
        """With what must have been verified and drafted for its tokens, where the commits that told it were lost."""
        num_accepted = self._num_accepted + commit.origins.count(Origin.ACCEPTED)
        told_verified = self._sums.num_verified + commit.stats.num_verified
        told_drafted = self._sums.num_drafted + commit.stats.num_drafted
        if num_accepted <= told_verified <= told_drafted:
            return commit
        num_verified = max(told_verified, num_accepted)
        num_drafted = max(told_drafted, num_verified)
        untold = RoundStats(num_verified=num_verified - told_verified, num_drafted=num_drafted - told_drafted)
        return replace(commit, stats=commit.stats + untold)

    def report(self) -> SpeculationStats:
        sums, steps = self._sums, self._steps
        has_drafts = self._speculation.mode is not Mode.OFF and self._speculation.drafter != "none"
        draft_ms = sum(step.share_ms for step in steps)
        return SpeculationStats(
            mode=self._speculation.mode,
            rule=self._speculation.rule,
            rounds=sums.num_rounds,
            drafted_tokens=sums.num_drafted,
            verified_tokens=sums.num_verified,
            accepted_tokens=self._num_accepted,
            mean_acceptance_length=_ratio(self._num_tokens, sums.num_rounds),
            acceptance_rate=_ratio(sums.num_first_ranked, sums.num_judged) if has_drafts else None,
            hit_rate=_ratio(sums.num_hits, sums.num_hits + sums.num_misses) if has_drafts else None,
            lookup_rate=_ratio(sums.num_lookup_hits, sums.num_hits + sums.num_misses) if has_drafts else None,
            draft_ms=draft_ms,
            exposed_draft_ms=sums.exposed_ms,
            hidden_draft_ms=max(0.0, draft_ms - sums.exposed_ms),
            wasted_draft_ms=sum(step.share_ms for step in steps if not step.is_verified),
            target_step_ms=_ratio(sums.step_ms, sums.num_steps),
            draft_step_ms=_ratio(sum(step.step_ms for step in steps), len(steps)),
            step_gap_ms=_ratio(sums.gap_ms, sums.num_gaps),
        )


def told_rounds(commit: Commit) -> Commit:
    """A resync brings tokens whose commits were lost, and with them what these told of rounds: their origins say it."""
    if commit.round > 0:
        return commit
    num_accepted = commit.origins.count(Origin.ACCEPTED)
    return replace(commit, stats=RoundStats(num_rounds=_count_rounds(commit.origins), num_accepted=num_accepted))


def cut_commit(commit: Commit, num_tokens: int) -> Commit:
    """The commit without its tokens beyond the first `num_tokens`, and without what they cost.

    Origins tell rounds apart: a round ends with its only token that is not ACCEPTED (or is cut there). Rounds beyond
    the cut are dropped with their share of every sum. Of the round that was cut, the choices beyond the cut are not
    judged.
    """
    if num_tokens >= len(commit.tokens):
        return commit
    kept, dropped = commit.origins[:num_tokens], commit.origins[num_tokens:]
    num_kept, num_all = _count_rounds(kept), _count_rounds(commit.origins)
    stats = _scaled(commit.stats, num_kept / num_all) if num_kept < num_all else commit.stats
    cut_round = dropped[: _length_of_first_round(dropped)] if kept and kept[-1] is Origin.ACCEPTED else ()
    num_judged = max(0, stats.num_judged - sum(origin in (Origin.ACCEPTED, Origin.RECOVERED) for origin in cut_round))
    return replace(
        commit,
        tokens=commit.tokens[:num_tokens],
        origins=kept,
        stats=replace(
            stats,
            num_accepted=kept.count(Origin.ACCEPTED),
            num_judged=num_judged,
            num_first_ranked=min(stats.num_first_ranked, num_judged),
        ),
    )


def _count_rounds(origins: Sequence[Origin]) -> int:
    """Rounds with at least one of these tokens."""
    num_ended = sum(origin is not Origin.ACCEPTED for origin in origins)
    return num_ended + (1 if origins and origins[-1] is Origin.ACCEPTED else 0)


def _length_of_first_round(origins: Sequence[Origin]) -> int:
    ends = (i for i, origin in enumerate(origins, start=1) if origin is not Origin.ACCEPTED)
    return next(ends, len(origins))


def _scaled(stats: RoundStats, share: float) -> RoundStats:
    scaled = {name: getattr(stats, name) * share for name in stats.__slots__}
    sums = RoundStats(**{name: value if name.endswith("_ms") else round(value) for name, value in scaled.items()})
    return replace(
        sums,
        num_misses=min(sums.num_misses, sums.num_rounds - sums.num_hits),  # as each was rounded for itself
        num_cached=stats.num_cached,  # no sum: the first round said it
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
