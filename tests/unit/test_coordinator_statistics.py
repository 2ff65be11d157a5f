"""Numbers by hand; what lies beyond a stop string costs nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.codec import event_to_pb
from coordinator.statistics import RequestStatistics, cut_commit
from specpipe.answers import Chunk, Finished, Timing
from specpipe.types import Commit, Extension, FinishReason, Mode, Origin, RoundStats, SpeculationParams

ORIGINS = {"A": Origin.ACCEPTED, "R": Origin.RECOVERED, "B": Origin.BONUS, "P": Origin.PLAIN}


def commit(origins: str, *, steps: tuple[int, ...] = (), **stats: Any) -> Commit:
    return Commit(
        session=1,
        round=1,
        base=5,
        tokens=tuple(range(len(origins))),
        origins=tuple(ORIGINS[letter] for letter in origins),
        verified_draft_steps=steps,
        stats=RoundStats(**stats),
    )


def extension(step: int, step_ms: float = 4.0, share_ms: float = 2.0, session: int = 1) -> Extension:
    return Extension(
        session=session,
        base=5,
        parents=(0,),
        tokens=(1,),
        confidences=(0.5,),
        draft_step=step,
        draft_step_ms=step_ms,
        draft_share_ms=share_ms,
    )


def test_sums_become_the_report() -> None:
    statistics = RequestStatistics(SpeculationParams(drafter="model"))
    for step in (1, 2, 2, 3):
        statistics.add_extension(extension(step))
    statistics.add_commit(commit("P", num_rounds=1, num_steps=2, step_ms=20.0))
    first = {
        "num_rounds": 1,
        "num_drafted": 5,
        "num_verified": 4,
        "num_judged": 3,
        "num_first_ranked": 2,
        "num_hits": 1,
    }
    statistics.add_commit(commit("AAR", steps=(1, 2), **first, num_steps=1, step_ms=10.0, gap_ms=3.0, num_gaps=2))
    statistics.add_commit(commit("P", num_rounds=1, num_misses=1, exposed_ms=1.5, num_steps=1, step_ms=10.0))
    report = statistics.report()
    assert (report.rounds, report.drafted_tokens, report.verified_tokens, report.accepted_tokens) == (3, 5, 4, 2)
    assert report.mean_acceptance_length == pytest.approx(5 / 3)
    assert report.acceptance_rate == pytest.approx(2 / 3)
    assert report.hit_rate == 0.5
    assert (report.draft_ms, report.exposed_draft_ms, report.hidden_draft_ms) == (6.0, 1.5, 4.5)
    assert report.wasted_draft_ms == 2.0, "step 3 made no verified node"
    assert (report.target_step_ms, report.draft_step_ms, report.step_gap_ms) == (10.0, 4.0, 1.5)


def test_nothing_is_null_that_has_a_value_and_nothing_zero_that_has_none() -> None:
    report = RequestStatistics(SpeculationParams(drafter="model")).report()
    assert report.rounds == report.draft_ms == 0
    nulls = (report.mean_acceptance_length, report.acceptance_rate, report.hit_rate)
    assert (*nulls, report.target_step_ms, report.draft_step_ms, report.step_gap_ms) == (None,) * 6


@pytest.mark.parametrize(
    "speculation", [SpeculationParams(mode=Mode.OFF, drafter="none"), SpeculationParams(drafter="none")]
)
def test_rates_are_null_without_drafts(speculation: SpeculationParams) -> None:
    statistics = RequestStatistics(speculation)
    statistics.add_commit(commit("P", num_rounds=1, num_misses=1))
    report = statistics.report()
    assert (report.acceptance_rate, report.hit_rate, report.mean_acceptance_length) == (None, None, 1.0)


@pytest.mark.parametrize(("verified", "wasted_ms"), [(0, 3.0), (1, 2.0)])
def test_another_draft_worker_numbers_its_steps_anew_and_nodes_of_the_first_may_still_be_verified(
    verified: int, wasted_ms: float
) -> None:
    statistics = RequestStatistics(SpeculationParams(drafter="model"))
    numbers = [statistics.add_extension(extension(1))]
    numbers.append(statistics.add_extension(extension(1, session=3, share_ms=3.0)))
    assert numbers[0] != numbers[1]
    statistics.add_commit(commit("AB", steps=(numbers[verified],), num_rounds=1))
    report = statistics.report()
    assert (report.draft_ms, report.wasted_draft_ms) == (5.0, wasted_ms)


def test_a_step_that_nobody_told_of_is_none() -> None:
    statistics = RequestStatistics(SpeculationParams(drafter="model"))
    assert statistics.add_extension(extension(0)) == 0
    statistics.add_commit(commit("AB", steps=(0, 7), num_rounds=1))
    assert statistics.report().draft_ms == 0


class Draft:
    """A draft session as a request sees it: its worker's steps are numbered on, or anew when it starts again."""

    def __init__(self, session: int, first_step: int) -> None:
        self.session = session
        self.step = first_step


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.floats(0.1, 9.0), st.booleans()),  # its share; whether it has new nodes
        st.tuples(st.just("verify"), st.lists(st.integers(0, 30), max_size=4), st.floats(0.0, 4.0)),  # which; exposed
        st.tuples(st.just("move"), st.integers(1, 40), st.none()),  # to a worker that has come so far
    ),
    max_size=60,
)


@given(EVENTS)
def test_draft_time_is_hidden_or_exposed_and_what_was_verified_is_never_wasted(events: list[Any]) -> None:
    statistics = RequestStatistics(SpeculationParams(drafter="model"))
    draft = Draft(1, 1)
    told: list[int] = []  # by the relay, for each step
    shares: list[float] = []
    verified: set[int] = set()
    exposed_ms = 0.0
    for kind, value, more in events:
        if kind == "move":
            draft = Draft(draft.session + 1, value)
        elif kind == "extend":
            draft.step += 1
            told.append(statistics.add_extension(extension(draft.step, session=draft.session, share_ms=value)))
            shares.append(value)
            if more:  # the step is told of twice
                assert statistics.add_extension(extension(draft.step, session=draft.session, share_ms=0.0)) == told[-1]
        elif told:
            chosen = {index % len(told) for index in value}
            verified |= chosen
            exposed_ms += more
            steps = tuple(told[index] for index in chosen)
            statistics.add_commit(commit("P", steps=steps, num_rounds=1, exposed_ms=more))
    report = statistics.report()
    assert report.draft_ms == pytest.approx(sum(shares))
    assert report.hidden_draft_ms + report.exposed_draft_ms == pytest.approx(max(report.draft_ms, exposed_ms))
    assert report.exposed_draft_ms == pytest.approx(exposed_ms)
    wasted = [share for index, share in enumerate(shares) if index not in verified]
    assert report.wasted_draft_ms == pytest.approx(sum(wasted))
    assert report.wasted_draft_ms <= report.draft_ms + 1e-9


@pytest.mark.parametrize(
    ("origins", "kept", "rounds", "judged", "verified"),
    [
        ("AAAB", 4, 1, 4, 6),  # nothing cut
        ("AAAB", 2, 1, 3, 6),  # one accepted token beyond the cut was judged
        ("AAAR", 2, 1, 2, 6),  # so was the recovered one
        ("AAR", 3, 1, 4, 6),
        ("ABAB", 2, 1, 2, 3),  # a round beyond the cut takes its half along
        ("PPPP", 1, 1, 1, 2),
    ],
)
def test_what_lies_beyond_the_cut_is_dropped(origins: str, kept: int, rounds: int, judged: int, verified: int) -> None:
    num_rounds = sum(letter != "A" for letter in origins)
    whole = commit(
        origins,
        num_rounds=num_rounds,
        num_judged=4,
        num_first_ranked=4,
        num_verified=6,
        num_accepted=origins.count("A"),
    )
    cut = cut_commit(whole, kept)
    assert cut.tokens == whole.tokens[:kept]
    assert cut.origins == whole.origins[:kept]
    assert cut.stats.num_rounds == rounds
    assert cut.stats.num_judged == judged
    assert cut.stats.num_first_ranked <= judged
    assert abs(cut.stats.num_verified - verified) <= 1
    assert cut.stats.num_accepted == origins[:kept].count("A")


@given(st.text("ARBP", min_size=1, max_size=20), st.integers(1, 20))
def test_a_cut_never_makes_sums_contradict(origins: str, kept: int) -> None:
    num_rounds = sum(letter != "A" for letter in origins) + (origins[-1] == "A")
    num_judged = sum(letter in "AR" for letter in origins)
    whole = commit(origins, num_rounds=num_rounds, num_judged=num_judged, num_first_ranked=origins.count("A"))
    cut = cut_commit(whole, kept)
    assert 1 <= cut.stats.num_rounds <= num_rounds
    assert cut.stats.num_rounds <= len(cut.tokens)
    assert 0 <= cut.stats.num_first_ranked <= cut.stats.num_judged <= num_judged


def test_the_first_round_says_how_much_of_the_prompt_was_cached() -> None:
    statistics = RequestStatistics(SpeculationParams())
    assert statistics.num_cached is None
    statistics.add_commit(cut_commit(commit("PPPP", num_rounds=4, num_cached=40), 1))
    statistics.add_commit(commit("P", num_rounds=1, num_cached=7))  # the first round on another target worker
    assert statistics.num_cached == 40


def test_tokens_told_without_rounds_leave_it_unknown() -> None:
    statistics = RequestStatistics(SpeculationParams())
    statistics.add_commit(replace(commit("PP"), round=0))
    statistics.add_commit(commit("P", num_rounds=1))
    assert statistics.num_cached is None


def test_what_workers_count_beyond_the_wire_is_cut_there() -> None:
    """A worker may say what it likes; the answer's last message goes out."""
    most = 2**32 - 1
    statistics = RequestStatistics(SpeculationParams(drafter="model"))
    stats = RoundStats(num_rounds=most, num_drafted=most, num_verified=most, num_cached=most)
    for base in (3, 4):
        commit = Commit(session=1, round=most, base=base, tokens=(5,), origins=(Origin.PLAIN,), stats=stats)
        statistics.add_commit(commit)
    finished = Finished(
        finish_reason=FinishReason.STOP,
        prompt_tokens=3,
        completion_tokens=2,
        timing=Timing(ttft_ms=1.0, tpot_ms=None, total_ms=1.0),
        speculation=statistics.report(),
        cached_prompt_tokens=2 * most,
    )
    sent = event_to_pb(finished).finished
    assert sent.speculation.rounds == sent.speculation.drafted_tokens == sent.usage.cached_prompt_tokens == most
    chunk = Chunk(token_ids=(5,), text="", origins=(Origin.PLAIN,), round=2 * most, text_lengths=(0,))
    assert event_to_pb(chunk).chunk.round == most


def test_draft_steps_without_number_cost_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.statistics.MAX_DRAFT_STEPS", 10)
    statistics = RequestStatistics(SpeculationParams(drafter="model"))
    extension = Extension(session=1, base=3, parents=(), tokens=(), confidences=(), draft_share_ms=1.0)
    numbers = [statistics.add_extension(replace(extension, draft_step=step)) for step in range(1, 100)]
    assert numbers == [*range(1, 11), *[0] * 89]
    assert statistics.report().draft_ms == 10.0
