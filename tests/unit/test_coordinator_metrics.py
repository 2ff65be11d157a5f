"""What commits and ends add to a coordinator's metrics; above all that accepted <= verified <= drafted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.detokenizer import AnswerText, Detokenizer, SpacedDecoder
from coordinator.events import (
    Admitted,
    Cause,
    Ended,
    Event,
    Kind,
    Lost,
    Moving,
    Placed,
    Placement,
    Received,
    Send,
    Unplaced,
)
from coordinator.metric_sums import RoundMetrics
from coordinator.metric_workers import WorkerMetrics
from coordinator.metrics import CoordinatorMetrics
from coordinator.pools import Connection, Link, Pool
from coordinator.requests import Request
from coordinator.state import RequestMachine
from coordinator.statistics import RequestStatistics, cut_commit, told_rounds
from specpipe.errors import ErrorCode, RequestCancelledError, WorkerUnavailableError
from specpipe.reports import Report
from specpipe.telemetry.instruments import Instruments, Labels
from specpipe.types import (
    Commit,
    Extension,
    Failed,
    FinishReason,
    Mode,
    Origin,
    RoundStats,
    SamplingParams,
    SpeculationParams,
    StopRules,
)

ORIGINS = {"A": Origin.ACCEPTED, "R": Origin.RECOVERED, "B": Origin.BONUS, "P": Origin.PLAIN}


def commit(origins: str, *, base: int = 3, round_: int = 1, finish: FinishReason | None = None, **stats: Any) -> Commit:
    return Commit(
        session=1,
        round=round_,
        base=base,
        tokens=tuple(range(10, 10 + len(origins))),
        origins=tuple(ORIGINS[letter] for letter in origins),
        finish_reason=finish,
        stats=RoundStats(**stats),
    )


def read(instruments: Instruments, name: str) -> Mapping[Labels, Any]:
    for observed in instruments.observed:
        if observed.description.name == f"specpipe.{name}":
            return observed.read()
    return next(h.read() for about, h in instruments.histograms if about.name in (name, f"specpipe.{name}"))


def some(readings: Mapping[Labels, float]) -> dict[Labels, float]:
    """Without zeros."""
    return {labels: value for labels, value in readings.items() if value}


# Commits


def test_a_commit_adds_its_rounds_tokens_and_guesses() -> None:
    instruments = Instruments()
    sums = RoundMetrics(instruments)
    sums.add(
        commit(
            "AARABP",
            num_rounds=3,
            num_drafted=9,
            num_verified=7,
            num_hits=2,
            num_misses=1,
            num_lookup_hits=1,
            num_judged=4,
            num_first_ranked=3,
            num_late=2,
            num_stale=5,
        ),
        Mode.PIPELINED,
    )
    assert some(read(instruments, "rounds")) == {
        ("pipelined", "hit"): 1,
        ("pipelined", "lookup"): 1,
        ("pipelined", "miss"): 1,
    }
    assert some(read(instruments, "accepted_tokens_by_depth")) == {("1",): 2, ("2",): 1}
    assert some(read(instruments, "committed_tokens")) == {
        ("pipelined", "accepted"): 3,
        ("pipelined", "recovered"): 1,
        ("pipelined", "bonus"): 1,
        ("pipelined", "plain"): 1,
    }
    assert some(read(instruments, "drafted_tokens")) == {("pipelined",): 9}
    assert some(read(instruments, "verified_tokens")) == {("pipelined",): 7}
    assert some(read(instruments, "accepted_tokens")) == {("pipelined",): 3}
    assert read(instruments, "guesses") == {("right",): 3, ("wrong",): 1}
    assert read(instruments, "late_extensions") == {(): 2}
    assert read(instruments, "stale_extensions") == {(): 5}


def test_a_first_round_is_neither_hit_nor_miss() -> None:
    instruments = Instruments()
    RoundMetrics(instruments).add(commit("P", num_rounds=1), Mode.SYNC)
    assert some(read(instruments, "rounds")) == {("sync", "uncounted"): 1}


def test_nodes_deeper_than_the_last_depth_count_there() -> None:
    instruments = Instruments()
    RoundMetrics(instruments).add(commit("A" * 20 + "B", num_rounds=1), Mode.SYNC)
    depths = read(instruments, "accepted_tokens_by_depth")
    assert depths[("15",)] == 1
    assert depths[("16",)] == 5
    assert sum(depths.values()) == 20


# Q1: never more accepted than verified, nor that than drafted


ROUNDS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=6)
"""Of each round: accepted nodes, verified ones beside them, drafted ones beside these."""


def merged(rounds: list[tuple[int, int, int]]) -> Commit:
    """As a target that found its stream busy says several rounds at once."""
    parts = [
        commit(
            "A" * accepted + "R",
            num_rounds=1,
            num_accepted=accepted,
            num_verified=accepted + verified,
            num_drafted=accepted + verified + drafted,
            num_hits=int(accepted + verified > 0),
            num_misses=int(accepted + verified == 0),
        )
        for accepted, verified, drafted in rounds
    ]
    stats = sum((part.stats for part in parts), RoundStats())
    return replace(
        parts[0],
        tokens=tuple(range(sum(len(part.tokens) for part in parts))),
        origins=tuple(origin for part in parts for origin in part.origins),
        stats=stats,
    )


@given(ROUNDS, st.data())
def test_a_commit_that_is_cut_anywhere_leaves_the_order_of_counts_and_no_round_below_zero(
    rounds: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    whole = merged(rounds)
    statistics = RequestStatistics(SpeculationParams(drafter="model"))
    cut = statistics.add_commit(cut_commit(whole, data.draw(st.integers(1, len(whole.tokens)))))
    num_accepted = cut.origins.count(Origin.ACCEPTED)
    assert num_accepted == cut.stats.num_accepted <= cut.stats.num_verified <= cut.stats.num_drafted
    assert (statistics.report().verified_tokens, statistics.report().drafted_tokens) == (
        cut.stats.num_verified,
        cut.stats.num_drafted,
    )
    instruments = Instruments()
    RoundMetrics(instruments).add(cut, Mode.PIPELINED)
    counts = read(instruments, "rounds")
    assert min(counts.values()) >= 0
    assert sum(counts.values()) == cut.stats.num_rounds
    assert sum(read(instruments, "committed_tokens").values()) == len(cut.tokens)


@given(ROUNDS)
def test_tokens_whose_commits_were_lost_bring_their_rounds(rounds: list[tuple[int, int, int]]) -> None:
    whole = merged(rounds)
    statistics = RequestStatistics(SpeculationParams(drafter="model"))
    statistics.add_commit(told_rounds(replace(whole, round=0, stats=RoundStats())))
    report = statistics.report()
    assert report.rounds == len(rounds)
    assert report.accepted_tokens <= report.verified_tokens <= report.drafted_tokens
    assert report.mean_acceptance_length == len(whole.tokens) / len(rounds)


@given(st.lists(st.tuples(ROUNDS, st.booleans()), min_size=1, max_size=5))
def test_counts_keep_their_order_whatever_commits_are_lost(told: list[tuple[list[tuple[int, int, int]], bool]]) -> None:
    """A lost one comes again as a resync, without its sums; nodes that it told of may be verified later."""
    statistics = RequestStatistics(SpeculationParams(drafter="model"))
    instruments = Instruments()
    sums = RoundMetrics(instruments)
    for rounds, is_lost in told:
        whole = merged([(accepted, verified + 3, -3) for accepted, verified, _ in rounds])  # of nodes from before
        if is_lost:
            whole = told_rounds(replace(whole, round=0, stats=RoundStats()))
        sums.add(statistics.add_commit(whole), Mode.SYNC)
        report = statistics.report()
        assert report.accepted_tokens <= report.verified_tokens <= report.drafted_tokens
        for name in ("accepted", "verified", "drafted"):
            assert read(instruments, f"{name}_tokens")[("sync",)] == getattr(report, f"{name}_tokens")


# Requests


class Story:
    """A request and what it adds, event by event."""

    def __init__(self, **changes: Any) -> None:
        self.instruments = Instruments()
        self.metrics = CoordinatorMetrics(self.instruments)
        self.count = self.metrics.begin(is_chat=False, received_ms=1000.0)
        values: dict[str, Any] = {
            "request_id": "r",
            "model": "m",
            "prompt": (7, 8, 9),
            "sampling": SamplingParams(seed=3),
            "stops": StopRules(max_length=100),
            "speculation": SpeculationParams(drafter="model"),
            "received_ms": 1000.0,
        }
        self.machine = RequestMachine(Request(**values | changes), AnswerText(Detokenizer(str, SpacedDecoder()), ()))
        self.now_ms = 1000.0
        self.count.submit(self.machine)

    def do(self, *events: Event, after_ms: float = 10.0) -> None:
        for event in events:
            self.now_ms += after_ms
            instructions = self.machine.handle(event, self.now_ms)
            self.count.observe(event, instructions, self.now_ms)

    def read(self, name: str) -> dict[Labels, Any]:
        return dict(read(self.instruments, name))

    @property
    def undrafted(self) -> float:
        return self.read("requests.undrafted")[()]


PLACED = (Admitted(), Placed(Kind.TARGET, 1, 1), Placed(Kind.DRAFT, 2, 2))
MODEL = ("text_completion", "specpipe", "m", "m")


def test_a_finished_request_is_timed_and_its_tokens_are_told() -> None:
    story = Story()
    story.do(*PLACED)
    story.do(Received(Kind.TARGET, commit("P", num_rounds=1, num_cached=2)))
    story.do(Received(Kind.TARGET, commit("AAB", base=4, round_=2, finish=FinishReason.STOP, num_rounds=1)))
    assert story.read("requests") == {
        ("finished",): 1,
        ("failed",): 0,
        ("cancelled",): 0,
        ("refused",): 0,
    }
    assert story.read("queue.duration")[()].total == pytest.approx(0.010)
    assert story.read("gen_ai.server.request.duration")[(*MODEL, "")].total == pytest.approx(0.050)
    assert story.read("gen_ai.server.time_to_first_token")[MODEL].total == pytest.approx(0.040)
    assert story.read("gen_ai.server.time_per_output_token")[MODEL].total == pytest.approx(0.010 / 3)
    usage = story.read("gen_ai.client.token.usage")
    assert (usage[(*MODEL, "input")].total, usage[(*MODEL, "output")].total) == (3, 4)
    assert some(story.read("completion_tokens")) == {("stop",): 4}
    assert story.read("prompt_tokens") == {("cached",): 2, ("computed",): 1}
    assert story.undrafted == 0


def test_what_was_hidden_of_draft_time_is_told_at_the_end() -> None:
    story = Story()
    story.do(*PLACED)
    extension = Extension(
        session=2,
        base=3,
        parents=(0,),
        tokens=(1,),
        confidences=(0.5,),
        draft_step=1,
        draft_step_ms=9.0,
        draft_share_ms=6.0,
    )
    story.do(Received(Kind.DRAFT, extension))
    story.do(Received(Kind.TARGET, commit("P", num_rounds=1, exposed_ms=2.0)))
    assert story.read("draft_time") == {(): 0}
    story.do(Ended(RequestCancelledError("the client has left")))
    told = {name: story.read(f"{name}draft_time")[()] for name in ("", "exposed_", "hidden_", "wasted_")}
    assert told == pytest.approx({"": 0.006, "exposed_": 0.002, "hidden_": 0.004, "wasted_": 0.006})
    assert some(story.read("completion_tokens")) == {("cancelled",): 1}
    assert story.read("gen_ai.server.request.duration")[(*MODEL, "CANCELLED")].counts
    assert not story.read("gen_ai.server.time_to_first_token")


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (Lost(Kind.DRAFT, 2, "it is gone"), "lost"),
        (Received(Kind.DRAFT, Failed(session=2, code=ErrorCode.RESOURCE_EXHAUSTED, message="full")), "failed"),
    ],
)
def test_a_request_that_loses_its_draft_session_falls_back_once(event: Event, cause: str) -> None:
    story = Story()
    story.do(*PLACED)
    assert story.undrafted == 0
    story.do(event, Unplaced(Kind.DRAFT), Unplaced(Kind.DRAFT))
    assert some(story.read("fallbacks")) == {(cause,): 1}
    assert story.read("session_moves")[("draft",)] == 1
    assert story.undrafted == 1
    story.do(Ended(WorkerUnavailableError("the service is stopping")))
    assert story.undrafted == 0


def test_a_request_that_never_had_a_draft_worker_falls_back_once() -> None:
    story = Story()
    story.do(Admitted(), Placed(Kind.TARGET, 1, 1), Unplaced(Kind.DRAFT), Unplaced(Kind.DRAFT))
    assert some(story.read("fallbacks")) == {("unplaced",): 1}
    assert some(story.read("session_moves")) == {}


def test_a_request_without_drafts_falls_back_to_nothing() -> None:
    story = Story(speculation=SpeculationParams(mode=Mode.OFF, drafter="none"))
    story.do(Admitted(), Placed(Kind.TARGET, 1, 1), Unplaced(Kind.DRAFT))
    assert some(story.read("fallbacks")) == {}
    assert story.undrafted == 0


def test_a_target_that_is_lost_is_a_move_and_what_it_told_stays() -> None:
    story = Story()
    story.do(*PLACED)
    story.do(Received(Kind.TARGET, commit("AB", num_rounds=1, num_verified=2, num_drafted=3)))
    story.do(Lost(Kind.TARGET, 1, "it is gone"), Placed(Kind.TARGET, 3, 5))
    assert story.read("session_moves") == {("draft",): 0, ("target",): 1}
    story.do(Received(Kind.TARGET, replace(commit("P", base=5, num_rounds=1), session=5)))
    assert sum(story.read("rounds").values()) == 2
    assert story.machine.target == Placement(3, 5)


def drafted(session: int) -> Received:
    """That session says something of it."""
    return Received(Kind.DRAFT, Extension(session=session, base=3, parents=(0,), tokens=(7,), confidences=(0.5,)))


def test_drafting_that_moves_is_counted_by_cause_and_is_neither_a_loss_nor_a_fallback() -> None:
    story = Story()
    story.do(*PLACED)
    story.do(Moving(3, 5, Cause.DRAINS))
    assert some(story.read("draft_moves")) == {}, "the first one drafts"
    story.do(drafted(5), drafted(5), Moving(2, 6, Cause.SILENT), drafted(6))
    assert some(story.read("draft_moves")) == {("drains",): 1, ("silent",): 1}
    assert some(story.read("session_moves")) == some(story.read("fallbacks")) == {}
    assert story.undrafted == 0


def test_a_successor_that_comes_to_nothing_counts_nowhere_and_one_that_replaces_a_lost_worker_as_its_loss() -> None:
    story = Story()
    story.do(*PLACED)
    story.do(Moving(3, 5, Cause.LEAVES), Lost(Kind.DRAFT, 5, "it is gone"))
    assert some(story.read("draft_moves")) == some(story.read("session_moves")) == some(story.read("fallbacks")) == {}
    story.do(Moving(3, 6, Cause.LEAVES), after_ms=2000.0)
    story.do(Lost(Kind.DRAFT, 2, "it is gone"))
    assert some(story.read("session_moves")) == {("draft",): 1}
    assert some(story.read("draft_moves")) == some(story.read("fallbacks")) == {}


def test_a_request_that_is_refused_is_told_with_its_status() -> None:
    story = Story()
    other = story.metrics.begin(is_chat=True, received_ms=0.0)
    other.refuse(WorkerUnavailableError("the service is still starting"), 30.0)
    story.metrics.begin(is_chat=True, received_ms=0.0).refuse(KeyboardInterrupt(), 30.0)
    assert some(story.read("requests")) == {("refused",): 1, ("cancelled",): 1}
    durations = story.read("gen_ai.server.request.duration")
    assert durations[("chat", "specpipe", "", "", "UNAVAILABLE")].total == pytest.approx(0.030)


def test_records_that_workers_dropped_are_added_up() -> None:
    story = Story()
    for num_lost in (3, 0, 4):
        story.metrics.hear(Report(session=1, num_lost=num_lost))
    assert story.read("reports.lost") == {(): 7}


def test_what_a_draft_worker_says_after_the_end_changes_nothing() -> None:
    story = Story()
    story.do(*PLACED)
    story.do(Received(Kind.TARGET, commit("P", num_rounds=1, finish=FinishReason.LENGTH)))
    assert not [out for out in story.machine.handle(Lost(Kind.DRAFT, 2, "gone"), 0.0) if isinstance(out, Send)]
    story.do(Lost(Kind.DRAFT, 2, "gone"), Unplaced(Kind.DRAFT))
    assert some(story.read("fallbacks")) == some(story.read("session_moves")) == {}


# Workers


@dataclass
class Looking:
    """A coordinator that looks for these workers."""

    workers: list[tuple[Kind, str]]
    num_waiting: int = 0
    num_running: int = 0
    pools: dict[Kind, Pool] = field(default_factory=lambda: {kind: Pool(kind) for kind in Kind})


def losses(looking: Looking) -> tuple[Callable[[], dict[Labels, float]], Callable[[Kind, str], None]]:
    instruments = Instruments()
    metrics = WorkerMetrics(instruments)
    metrics.watch(looking)

    def lose(kind: Kind, address: str) -> None:
        link = cast("Link", SimpleNamespace(num_dropped_extensions=0))
        metrics.lose(Connection(1, kind, address, link))

    return lambda: dict(read(instruments, "worker.losses")), lose


def test_losses_of_workers_that_are_not_looked_for_any_more_are_one_number_and_the_sum_never_falls() -> None:
    looking = Looking([(Kind.TARGET, "a:1"), (Kind.DRAFT, "b:1")])
    told, lose = losses(looking)
    assert told() == {("target", "a:1"): 0, ("draft", "b:1"): 0}, "from the beginning, so that the first loss is one"
    for number in range(100):
        looking.workers = [(Kind.TARGET, f"t{number}:1"), (Kind.DRAFT, "b:1")]
        lose(Kind.TARGET, f"t{number}:1")
        now = told()
        assert now[("target", f"t{number}:1")] == 1
        assert sum(now.values()) == number + 1
        assert len(now) <= 4
    assert now[("target", "gone")] == 99
    assert ("draft", "gone") not in now


def test_the_last_loss_of_a_worker_is_told_at_its_address_before_it_counts_among_those_that_are_gone() -> None:
    looking = Looking([(Kind.DRAFT, "b:1")])
    told, lose = losses(looking)
    told()
    lose(Kind.DRAFT, "b:1")
    looking.workers = []
    assert told() == {("draft", "b:1"): 1}
    assert told() == {("draft", "gone"): 1}
    looking.workers = [(Kind.DRAFT, "b:1")]
    assert told() == {("draft", "b:1"): 0, ("draft", "gone"): 1}, "what has gone there stays there"
    lose(Kind.DRAFT, "b:1")
    assert told() == {("draft", "b:1"): 1, ("draft", "gone"): 1}
