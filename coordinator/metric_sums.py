"""What a coordinator counts of requests: their ends, their rounds, their draft time.

Owns: those metrics (docs/metrics.md) and how a commit adds to them. Must not know: machines, workers, clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specpipe.answers import SpeculationStats
from specpipe.telemetry.instruments import Counter, Description, Histogram, Instruments
from specpipe.types import Commit, FinishReason, Mode, Origin, RoundStats

MAX_DEPTH = 16
"""Deeper nodes count as this deep."""

# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/ says which buckets.
GEN_AI_LABELS = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model")
DURATION_BOUNDS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN_BOUNDS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
PER_TOKEN_BOUNDS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
USAGE_BOUNDS = tuple(float(4**i) for i in range(14))  # 1 to 67,108,864

_MODES = [mode.value for mode in Mode]
_ROUNDS = ("hit", "lookup", "miss", "uncounted")
_REQUESTS = ("finished", "failed", "cancelled", "refused")
_REASONS = (*(reason.value for reason in FinishReason), "failed", "cancelled")


class RequestMetrics:
    """Each request once, at its end."""

    def __init__(self, instruments: Instruments) -> None:
        def histogram(name: str, unit: str, text: str, bounds: Sequence[float], *labels: str) -> Histogram:
            return instruments.histogram(Description(name=name, unit=unit, text=text, labels=labels), bounds)

        self._requests = declare_counter(
            instruments, "requests", "{request}", "Requests that have ended.", outcome=_REQUESTS
        )
        self.duration = histogram(
            "gen_ai.server.request.duration",
            "s",
            "From the receipt of a request to its end.",
            DURATION_BOUNDS_S,
            *GEN_AI_LABELS,
            "error.type",
        )
        self.first_token = histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "From the receipt of a request to its first token.",
            FIRST_TOKEN_BOUNDS_S,
            *GEN_AI_LABELS,
        )
        self.per_token = histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time for each token after the first.",
            PER_TOKEN_BOUNDS_S,
            *GEN_AI_LABELS,
        )
        self.usage = histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Tokens of prompts and answers.",
            USAGE_BOUNDS,
            *GEN_AI_LABELS,
            "gen_ai.token.type",
        )
        self.queue = histogram(
            "specpipe.queue.duration", "s", "From the receipt of a request to its turn.", DURATION_BOUNDS_S
        )
        self.prompt_tokens = declare_counter(
            instruments, "prompt_tokens", "{token}", "Of prompts.", state=("cached", "computed")
        )
        self.completion_tokens = declare_counter(
            instruments,
            "completion_tokens",
            "{token}",
            "Delivered by requests that have ended.",
            finish_reason=_REASONS,
        )

    def end(self, outcome: str) -> None:
        self._requests.add(1, outcome)


class RoundMetrics:
    """Each commit, as far as it was delivered.

    Declared so that accepted <= verified <= drafted whenever somebody reads, and counted the other way round.
    """

    def __init__(self, instruments: Instruments) -> None:
        def counter(name: str, unit: str, text: str, **known: Sequence[str]) -> Counter:
            return declare_counter(instruments, name, unit, text, **known)

        depths = [str(depth) for depth in range(1, MAX_DEPTH + 1)]
        self._by_depth = counter("accepted_tokens_by_depth", "{token}", "Accepted nodes by depth.", depth=depths)
        self._accepted = counter("accepted_tokens", "{token}", "Nodes committed.", mode=_MODES)
        self._verified = counter("verified_tokens", "{token}", "Nodes that were rows of a step.", mode=_MODES)
        self._drafted = counter("drafted_tokens", "{token}", "Nodes at the target worker.", mode=_MODES)
        rounds = Description(name="specpipe.rounds", unit="{round}", text="Rounds.", labels=("mode", "outcome"))
        self._rounds = instruments.counter(rounds, [(mode, outcome) for mode in _MODES for outcome in _ROUNDS])
        committed = Description(
            name="specpipe.committed_tokens", unit="{token}", text="Tokens delivered.", labels=("mode", "origin")
        )
        self._committed = instruments.counter(committed, [(mode, origin.value) for mode in _MODES for origin in Origin])
        self._guesses = counter("guesses", "{guess}", "First guesses put to the test.", outcome=("right", "wrong"))
        self._late = counter("late_extensions", "{extension}", "Grafted below tokens committed since.")
        self._stale = counter("stale_extensions", "{extension}", "Dropped.")

    def add(self, commit: Commit, mode: Mode) -> None:
        sums, name = commit.stats, mode.value
        self._drafted.add(sums.num_drafted, name)
        self._verified.add(sums.num_verified, name)
        self._accepted.add(commit.origins.count(Origin.ACCEPTED), name)
        for depth in _depths(commit.origins):
            self._by_depth.add(1, str(min(depth, MAX_DEPTH)))
        for origin in Origin:
            if count := commit.origins.count(origin):
                self._committed.add(count, name, origin.value)
        for outcome, count in _rounds(sums).items():
            if count:
                self._rounds.add(count, name, outcome)
        if sums.num_judged:
            self._guesses.add(sums.num_first_ranked, "right")
            self._guesses.add(sums.num_judged - sums.num_first_ranked, "wrong")
        self._late.add(sums.num_late)
        self._stale.add(sums.num_stale)


def _rounds(sums: RoundStats) -> dict[str, int]:
    """By outcome."""
    return {
        "hit": sums.num_hits - sums.num_lookup_hits,
        "lookup": sums.num_lookup_hits,
        "miss": sums.num_misses,
        "uncounted": sums.num_rounds - sums.num_hits - sums.num_misses,
    }


def _depths(origins: Sequence[Origin]) -> Iterator[int]:
    """Of the accepted nodes: a round's come first, from depth 1, and its own choice ends it."""
    depth = 0
    for origin in origins:
        depth = depth + 1 if origin is Origin.ACCEPTED else 0
        if depth:
            yield depth


class DraftTimeMetrics:
    """Each request once, at its end."""

    def __init__(self, instruments: Instruments) -> None:
        def counter(name: str, text: str) -> Counter:
            return declare_counter(instruments, f"{name}draft_time", "s", text)

        self._exposed = counter("exposed_", "Draft time that the target waited for.")
        self._hidden = counter("hidden_", "Draft time that the target did not wait for.")
        self._wasted = counter("wasted_", "Draft time of steps none of whose nodes was verified.")
        self._all = counter("", "Draft forward time, shared out by rows.")

    def add(self, sums: SpeculationStats) -> None:
        self._all.add(sums.draft_ms / 1000)
        self._wasted.add(sums.wasted_draft_ms / 1000)
        self._hidden.add(sums.hidden_draft_ms / 1000)
        self._exposed.add(sums.exposed_draft_ms / 1000)


def declare_counter(instruments: Instruments, name: str, unit: str, text: str, **known: Sequence[str]) -> Counter:
    """With at most one label: its name, and the values that are known."""
    about = Description(name=f"specpipe.{name}", unit=unit, text=text, labels=tuple(known))
    return instruments.counter(about, [(value,) for values in known.values() for value in values])
