"""What of a repeated answer is new, where it differs, and how often a question is asked again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpipe import client
from specpipe.answers import AnswerEvent, Chunk, Finished, SpeculationStats, Started, Timing
from specpipe.errors import InvariantError, ModelMismatchError, WorkerUnavailableError
from specpipe.resume import PAUSE_S, ROUNDS, SPREAD_S, Patience, ResumedAnswer, spread
from specpipe.types import FinishReason, Mode, Origin, Rule

STARTED = Started(request_id="r", model="m", prompt_tokens=3, seed=7, rule=Rule.COUPLED)
NO_COUNTS = dict.fromkeys(SpeculationStats.__slots__, 0) | {"mode": Mode.OFF, "rule": Rule.COUPLED}
FINISHED = Finished(
    finish_reason=FinishReason.LENGTH,
    prompt_tokens=3,
    completion_tokens=6,
    timing=Timing(ttft_ms=1.0, tpot_ms=1.0, total_ms=6.0),
    speculation=SpeculationStats(**NO_COUNTS),
)
TEXTS = ("a", "", "bcd", "e", "", "fg")  # of tokens 0 to 5; text may be held back


def chunk(first: int, end: int) -> Chunk:
    texts = TEXTS[first:end]
    return Chunk(
        token_ids=tuple(range(first, end)),
        text="".join(texts),
        origins=(Origin.ACCEPTED,) * (end - first),
        round=end,
        text_lengths=tuple(map(len, texts)),
    )


def chunks(ends: list[int]) -> list[Chunk]:
    return [chunk(first, end) for first, end in zip([0, *ends], ends, strict=False)]


def given_out(answer: ResumedAnswer, events: list[AnswerEvent]) -> list[AnswerEvent]:
    return [new for event in events if (new := answer.add(event)) is not None]


def begun(rule: Rule | None = Rule.COUPLED, temperature: float | None = None, num_tokens: int = 3) -> ResumedAnswer:
    answer = ResumedAnswer(temperature=temperature)
    given_out(answer, [replace(STARTED, rule=rule), *chunks([num_tokens] if num_tokens else [])])
    return answer


cuts = st.lists(st.integers(1, 5), unique=True, max_size=4).map(sorted)


@given(tries=st.lists(cuts, min_size=1, max_size=4), last=cuts)
def test_tries_that_break_anywhere_add_up_to_one_answer(tries: list[list[int]], last: list[int]) -> None:
    answer, got = ResumedAnswer(), []
    for ends in tries:
        got += given_out(answer, [STARTED, *chunks(ends)])
        answer.restart()
    got += given_out(answer, [STARTED, *chunks([*last, 6]), FINISHED])
    assert [event for event in got if not isinstance(event, Chunk)] == [STARTED, FINISHED]
    assert (got[0], got[-1]) == (STARTED, FINISHED)
    parts = [event for event in got if isinstance(event, Chunk)]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.merged_with(part)
    assert whole == replace(chunk(0, 6), round=whole.round)
    assert all(part.token_ids for part in parts)


def test_a_try_that_breaks_before_its_first_event_is_as_if_it_had_not_been() -> None:
    answer = ResumedAnswer()
    answer.restart()
    assert given_out(answer, [STARTED, chunk(0, 6), FINISHED]) == [STARTED, chunk(0, 6), FINISHED]


@pytest.mark.parametrize("change", [{"token_ids": (0, 9)}, {"text": "x"}])
def test_a_repeated_answer_with_other_tokens_or_text_is_no_answer(change: dict[str, object]) -> None:
    answer = begun()
    answer.restart()
    answer.add(STARTED)
    with pytest.raises(InvariantError, match="first 3 tokens"):
        answer.add(replace(chunk(0, 2), **change))


def test_a_repeated_answer_that_is_shorter_than_what_was_delivered_is_no_answer() -> None:
    answer = begun()
    answer.restart()
    given_out(answer, [STARTED, chunk(0, 2)])
    with pytest.raises(InvariantError, match="first 3 tokens"):
        answer.add(FINISHED)


@pytest.mark.parametrize("change", [{"model": "other"}, {"prompt_tokens": 4}, {"seed": 8}])
def test_an_answer_does_not_go_on_with_another_model_prompt_or_seed(change: dict[str, object]) -> None:
    answer = begun(num_tokens=0)
    answer.restart()
    with pytest.raises(ModelMismatchError, match="began with 3 prompt tokens for m with seed 7"):
        answer.add(replace(STARTED, **change))


@pytest.mark.parametrize("rule", [Rule.COUPLED, None])
def test_coupled_answers_may_go_on_elsewhere(rule: Rule | None) -> None:
    assert begun(rule).obstacle == ""


@pytest.mark.parametrize(
    ("temperature", "num_tokens", "may_go_on"), [(None, 3, False), (0.5, 1, False), (0.0, 3, True), (0.5, 0, True)]
)
def test_answers_under_the_rejection_rule_may_only_if_greedy_or_not_begun(
    temperature: float | None, num_tokens: int, may_go_on: bool
) -> None:
    obstacle = begun(Rule.REJECTION, temperature, num_tokens).obstacle
    assert (obstacle == "") is may_go_on
    assert may_go_on or f"{num_tokens} tokens were delivered" in obstacle


def test_every_place_is_tried_at_once_and_rounds_wait_longer_and_longer() -> None:
    patience = Patience(2)
    pauses = [patience.pause_s() for _ in range(2 * ROUNDS)]
    assert pauses == [0.0, PAUSE_S, 0.0, 2 * PAUSE_S, 0.0, 4 * PAUSE_S, 0.0, None]


def test_a_single_place_is_not_asked_again() -> None:
    assert Patience(1).pause_s() is None


def test_progress_begins_the_count_anew() -> None:
    patience = Patience(2)
    for _ in range(10 * ROUNDS):
        assert patience.pause_s() == 0.0
        patience.progress()


@given(pause_s=st.floats(0.0, 10.0))
def test_clients_of_one_place_ask_the_next_at_moments_of_their_own_and_not_sooner(pause_s: float) -> None:
    pauses = {spread(pause_s) for _ in range(10)}
    assert len(pauses) > 1
    assert min(pauses) >= pause_s
    assert max(pauses) <= 1.5 * pause_s + SPREAD_S


async def test_a_client_spreads_its_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = []
    monkeypatch.setattr(client, "spread", lambda pause_s: pauses.append(pause_s) or 0.0)
    async with client.GenerateClient(["127.0.0.1:9", "127.0.0.1:9"]) as asking:
        with pytest.raises(WorkerUnavailableError, match="no coordinator answers"):
            await asking.answer(client.GenerateRequest(prompt="x"), timeout_s=30)
    assert pauses == [0.0, PAUSE_S, 0.0, 2 * PAUSE_S, 0.0, 4 * PAUSE_S, 0.0]
