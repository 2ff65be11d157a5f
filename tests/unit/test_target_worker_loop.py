"""The target loop against an oracle that decodes one token at a time, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from target_simulator import (
    LINK,
    Drafter,
    Simulator,
    chain,
    create_open,
    plain_run,
    self_drafter,
    wrong_drafter,
)

from specpipe.errors import ErrorCode
from specpipe.sampling.coupled import Chooser
from specpipe.testing import TableModel
from specpipe.types import (
    Close,
    Closed,
    Commit,
    Extension,
    Failed,
    FinishReason,
    Mode,
    NeedTokens,
    Open,
    Origin,
)


@pytest.fixture
def table() -> TableModel:
    return TableModel(vocab_size=24, num_slots=512, seed=3)


def sampled(number: int) -> dict[str, float]:
    return [{}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "top_p": 0.8, "top_k": 5}][number]


# Plain decoding


@pytest.mark.parametrize("setting", [0, 1, 2])
@pytest.mark.parametrize("mode", [Mode.OFF, Mode.PIPELINED])
def test_without_drafts_it_decodes_plainly(table: TableModel, mode: Mode, setting: int) -> None:
    sim = Simulator(table)
    opened = create_open(1, max_tokens=20, mode=mode, **sampled(setting))  # type: ignore[arg-type]
    answer = sim.open(opened)
    sim.run()
    assert (answer.new_tokens, answer.finish_reason) == plain_run(table, opened)
    assert answer.origins == [Origin.PLAIN] * 20
    assert len(answer.commits) == answer.stats.num_rounds == 20
    assert answer.closed == Closed(session=1, length=23)
    assert sim.loop.heartbeat().num_sessions == 0
    assert sim.loop.heartbeat().num_free_slots == 511


def test_many_sessions_at_once_each_get_their_own_answer(table: TableModel) -> None:
    sim = Simulator(table, drafter=self_drafter(table, 4))
    opens = [
        create_open(i, [1 + i % 20, 2, 3 + i % 4], max_tokens=3 + i, temperature=0.7 * (i % 2), seed=i)
        for i in range(1, 13)
    ]
    answers = [sim.open(opened) for opened in opens]
    sim.run()
    for opened, answer in zip(opens, answers, strict=True):
        assert (answer.new_tokens, answer.finish_reason) == plain_run(table, opened)


def test_a_long_prompt_is_computed_in_chunks_while_others_go_on(table: TableModel) -> None:
    sim = Simulator(table, max_batch_tokens=32)
    short = sim.open(create_open(1, max_tokens=30, mode=Mode.OFF))
    for _ in range(3):
        sim.loop.run_once()
    opened = create_open(2, [i % 24 for i in range(300)], max_tokens=4, mode=Mode.OFF)
    long = sim.open(opened)
    steps_before = len(short.commits)
    while not long.commits:
        sim.loop.run_once()
    assert len(short.commits) - steps_before >= 8
    assert max(sim.model.rows_of_steps) <= 32
    sim.run()
    assert long.new_tokens == plain_run(table, opened)[0]
    assert long.stats.num_steps > long.stats.num_rounds == 4


def test_the_first_round_verifies_what_was_drafted_during_prefill(table: TableModel) -> None:
    sim = Simulator(table, drafter=self_drafter(table, 3), delay_ms=lambda: 0.0)
    answer = sim.open(create_open(1, [1, 2, 3, 4], max_tokens=12))
    sim.run()
    assert answer.origins[:4] == [Origin.ACCEPTED] * 3 + [Origin.BONUS]
    assert answer.stats.num_hits + answer.stats.num_misses == answer.stats.num_rounds - 1


def test_a_session_opened_in_the_middle_of_an_answer_goes_on(table: TableModel) -> None:
    opened = create_open(1, max_tokens=20, temperature=1.0)
    expected, _ = plain_run(table, opened)
    moved = replace(opened, tokens=opened.tokens + tuple(expected[:9]))
    sim = Simulator(table, drafter=self_drafter(table, 5))
    answer = sim.open(moved)
    sim.run()
    assert answer.new_tokens == expected[9:]


# SELF and RAND


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_self_in_sync_takes_as_few_rounds_as_there_can_be(table: TableModel, k: int, temperature: float) -> None:
    opened = create_open(1, max_tokens=60, mode=Mode.SYNC, k=k, temperature=temperature)
    sim = Simulator(table, drafter=self_drafter(table, k))
    answer = sim.open(opened)
    sim.run()
    assert answer.new_tokens == plain_run(table, opened)[0]
    assert answer.stats.num_rounds <= math.ceil(60 / (k + 1)) + 2
    assert answer.stats.num_first_ranked == answer.stats.num_judged > 0
    assert answer.stats.num_misses == 0
    assert max(len(commit.tokens) for commit in answer.commits) == k + 1


def test_sync_default_is_four(table: TableModel) -> None:
    sim = Simulator(table, drafter=self_drafter(table, 9))
    answer = sim.open(create_open(1, max_tokens=41, mode=Mode.SYNC))
    sim.run()
    assert max(len(commit.tokens) for commit in answer.commits) == 5


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
def test_a_draft_that_is_always_wrong_is_always_rejected(table: TableModel, mode: Mode) -> None:
    opened = create_open(1, max_tokens=30, mode=mode, temperature=0.5)
    sim = Simulator(table, drafter=wrong_drafter(table, 4))
    answer = sim.open(opened)
    sim.run()
    assert answer.new_tokens == plain_run(table, opened)[0]
    assert answer.stats.num_accepted == answer.stats.num_first_ranked == 0
    assert Origin.ACCEPTED not in answer.origins
    assert Origin.BONUS not in answer.origins


def test_pipelined_counts_add_up(table: TableModel) -> None:
    draft = TableModel.like(table, 0.7)
    sim = Simulator(table, drafter=self_drafter(draft, 6, is_exhausted=False), delay_ms=lambda: 4.0)
    answer = sim.open(create_open(1, max_tokens=200, temperature=0.6))
    sim.run()
    stats = answer.stats
    assert answer.new_tokens == plain_run(table, answer.opened)[0]
    assert stats.num_accepted == answer.origins.count(Origin.ACCEPTED)
    assert 0 < stats.num_accepted <= stats.num_verified <= stats.num_drafted
    assert stats.num_hits + stats.num_misses in (stats.num_rounds - 1, stats.num_rounds - 2)
    assert stats.num_first_ranked <= stats.num_judged <= stats.num_verified
    assert stats.num_rounds < 150
    assert stats.num_gaps == stats.num_rounds


# Waiting


def test_sync_waits_for_its_extension_and_says_how_long(table: TableModel) -> None:
    sim = Simulator(table, drafter=self_drafter(table, 4), delay_ms=lambda: 30.0)
    answer = sim.open(create_open(1, max_tokens=26, mode=Mode.SYNC))
    sim.run()
    assert answer.stats.num_misses == 0
    waits = answer.stats.num_rounds - 1
    assert answer.stats.exposed_ms == pytest.approx(30.0 * waits, abs=1e-6)
    assert answer.stats.gap_ms == pytest.approx(0.0, abs=1e-6)


def test_sync_without_a_drafter_pays_one_wait_and_then_decodes_plainly(table: TableModel) -> None:
    sim = Simulator(table)
    answer = sim.open(create_open(1, max_tokens=20, mode=Mode.SYNC))
    sim.run()
    assert answer.new_tokens == plain_run(table, answer.opened)[0]
    assert answer.stats.exposed_ms == pytest.approx(1000.0)


def test_a_sync_drafter_that_returns_is_waited_for_again(table: TableModel) -> None:
    draft = self_drafter(table, 4)
    silent = [True]

    def sometimes(tokens: Sequence[int], opened: Open) -> list[Extension]:
        if len(tokens) == 20:
            silent[0] = False
        return [] if silent[0] else draft(tokens, opened)

    sim = Simulator(table, drafter=sometimes)
    answer = sim.open(create_open(1, max_tokens=60, mode=Mode.SYNC))
    sim.run()
    assert answer.new_tokens == plain_run(table, answer.opened)[0]
    assert answer.stats.exposed_ms < 1300.0
    assert answer.stats.num_accepted > 20


def test_others_go_on_while_one_waits(table: TableModel) -> None:
    sim = Simulator(table)
    waiting = sim.open(create_open(1, max_tokens=10, mode=Mode.SYNC))
    other = sim.open(create_open(2, max_tokens=40, mode=Mode.OFF))
    sim.run()
    finished_at = [commit.finish_reason is not None for commit in other.commits].index(True)
    assert finished_at == 39
    assert waiting.stats.exposed_ms < 1000.0 - 300.0
    assert waiting.new_tokens == plain_run(table, waiting.opened)[0]


def test_an_exhausted_draft_is_not_waited_for(table: TableModel) -> None:
    def nothing(tokens: Sequence[int], opened: Open) -> list[Extension]:
        return [chain(opened.session, len(tokens), (), is_exhausted=True)]

    for mode in (Mode.SYNC, Mode.PIPELINED):
        sim = Simulator(table, drafter=nothing, delay_ms=lambda: 0.0)
        answer = sim.open(create_open(1, max_tokens=20, mode=mode))
        sim.run()
        assert answer.stats.exposed_ms == 0.0


def test_a_silent_draft_is_not_waited_for_in_pipelined_mode(table: TableModel) -> None:
    sim = Simulator(table)
    answer = sim.open(create_open(1, max_tokens=50))
    sim.run()
    assert answer.stats.exposed_ms == 0.0


def test_a_short_wait_turns_a_miss_into_a_hit(table: TableModel) -> None:
    sim = Simulator(table, drafter=self_drafter(table, 6, is_exhausted=False), delay_ms=lambda: 3.0)
    answer = sim.open(create_open(1, max_tokens=200))
    sim.run()
    stats = answer.stats
    assert stats.num_hits > 0.8 * stats.num_rounds
    assert 0 < stats.exposed_ms < 0.35 * stats.step_ms


def test_a_draft_slower_than_plain_steps_is_not_waited_for_long(table: TableModel) -> None:
    sim = Simulator(table, drafter=self_drafter(table, 6, is_exhausted=False), delay_ms=lambda: 500.0)
    answer = sim.open(create_open(1, max_tokens=200))
    sim.run()
    assert answer.new_tokens == plain_run(table, answer.opened)[0]
    assert answer.stats.exposed_ms < 0.1 * answer.stats.step_ms


def test_a_close_ends_a_wait_at_once(table: TableModel) -> None:
    sim = Simulator(table)
    answer = sim.open(create_open(1, max_tokens=10, mode=Mode.SYNC))
    start = sim.clock.now
    sim.post(Close(session=1), after_ms=50.0)
    sim.run()
    assert answer.closed is not None
    assert sim.clock.now - start == pytest.approx(0.05)
    assert sim.loop.heartbeat().num_free_slots == 511


# Stops and lengths inside a block (cases D1, D2, D4)


@pytest.mark.parametrize("kind", ["eos", "stop_ids"])
def test_chosen_stop_at_every_position_of_a_block(kind: str) -> None:
    table = TableModel(vocab_size=200, num_slots=512, seed=11)
    tokens, _ = plain_run(table, create_open(1, max_tokens=40))
    for position in range(1, 22):
        stop = tokens[position]
        first = tokens.index(stop)
        for max_tokens in {first, *range(first + 1, first + 9)} - {0}:
            sim = Simulator(table, drafter=self_drafter(table, 8))
            opened = create_open(1, max_tokens=max_tokens, k=8, mode=Mode.SYNC, **{kind: (stop,)})  # type: ignore[arg-type]
            answer = sim.open(opened)
            sim.run()
            fits = first < max_tokens
            assert answer.new_tokens == tokens[: first + 1 if fits else max_tokens]
            assert answer.finish_reason is (FinishReason.STOP if fits else FinishReason.LENGTH)


def test_with_ignore_eos_the_answer_runs_to_its_limit_exactly(table: TableModel) -> None:
    tokens, _ = plain_run(table, create_open(1, max_tokens=30))
    for max_tokens in (1, 2, 8, 9, 10, 30):
        sim = Simulator(table, drafter=self_drafter(table, 8))
        answer = sim.open(create_open(1, max_tokens=max_tokens, k=8, eos=tuple(range(24)), ignore_eos=True))
        sim.run()
        assert answer.new_tokens == tokens[:max_tokens]
        assert answer.finish_reason is FinishReason.LENGTH
        assert len(answer.origins) == max_tokens


def test_a_rejected_eos_of_the_draft_means_nothing() -> None:
    table = TableModel(vocab_size=24, num_slots=512, seed=3)
    tokens, _ = plain_run(table, create_open(1, max_tokens=30))
    eos = next(token for token in range(24) if token not in tokens)

    def eos_drafter(committed: Sequence[int], opened: Open) -> list[Extension]:
        return [chain(1, len(committed), [eos] * 4, confidence=0.99)]

    sim = Simulator(table, drafter=eos_drafter, delay_ms=lambda: 0.0)
    answer = sim.open(create_open(1, max_tokens=30, eos=(eos,)))
    sim.run()
    assert answer.new_tokens == tokens
    assert answer.stats.num_verified > 0


def test_no_stop_token_ends_the_answer_before_min_length(table: TableModel) -> None:
    opened = create_open(1, max_tokens=30, eos=tuple(range(24)), min_tokens=7)
    sim = Simulator(table, drafter=self_drafter(table, 8))
    answer = sim.open(opened)
    sim.run()
    assert (len(answer.new_tokens), answer.finish_reason) == (7, FinishReason.STOP)


# The context's edge (case E1)


@pytest.mark.parametrize("length", [1, 58, 60, 61, 62, 63])
@pytest.mark.parametrize("mode", list(Mode))
def test_every_remaining_position_is_used(length: int, mode: Mode) -> None:
    table = TableModel(vocab_size=24, num_slots=512, seed=3, max_context=64)
    sim = Simulator(table, drafter=self_drafter(TableModel(24, seed=3), 12))
    answer = sim.open(create_open(1, [i % 24 for i in range(length)], max_tokens=10_000, k=8, mode=mode))
    sim.run()
    assert len(answer.tokens) == 64
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.new_tokens == plain_run(table, answer.opened)[0]


# Hints that are no good (cases F1, I3)

FORGED = [
    Extension(session=1, base=3, parents=(0,), tokens=(24,), confidences=(0.9,)),
    Extension(session=1, base=3, parents=(0,), tokens=(-1,), confidences=(0.9,)),
    Extension(session=1, base=3, parents=(0,), tokens=(2**31,), confidences=(0.9,)),
    Extension(session=1, base=3, parents=(1,), tokens=(1,), confidences=(0.9,)),
    Extension(session=1, base=3, parents=(0, 5), tokens=(1, 2), confidences=(0.9, 0.9)),
    Extension(session=1, base=3, parents=(-1,), tokens=(1,), confidences=(0.9,)),
    Extension(session=1, base=3, parents=(0,), tokens=(1,), confidences=(math.nan,)),
    Extension(session=1, base=3, parents=(0,), tokens=(1,), confidences=(math.inf,)),
    Extension(session=1, base=3, parents=(0,), tokens=(1,), confidences=(7.0,)),
    Extension(session=1, base=3, parents=(0, 0), tokens=(1,), confidences=(0.5,)),
    Extension(session=1, base=-3, parents=(0,), tokens=(1,), confidences=(0.5,)),
    Extension(session=1, base=2**31, parents=(0,), tokens=(1,), confidences=(0.5,)),
    Extension(session=1, base=3, parents=(0,) * 100_000, tokens=(1,) * 100_000, confidences=(0.5,) * 100_000),
    Extension(session=1, base=3, parents=(0,), tokens=(1,), confidences=(0.5,), draft_step_ms=math.nan),
    Extension(session=1, base=3, parents=(0,), tokens=(1,), confidences=(0.5,), draft_step=-7, drafter="?" * 1000),
    Extension(session=2, base=3, parents=(0,), tokens=(1,), confidences=(0.5,)),
]


@pytest.mark.parametrize("number", range(len(FORGED)))
@pytest.mark.parametrize("mode", list(Mode))
def test_a_forged_extension_changes_nothing(table: TableModel, number: int, mode: Mode) -> None:
    honest = self_drafter(table, 3)

    def forger(tokens: Sequence[int], opened: Open) -> list[Extension]:
        return [FORGED[number], *honest(tokens, opened), replace(FORGED[number], base=len(tokens))]

    opened = create_open(1, max_tokens=20, mode=mode, temperature=0.9)
    sim = Simulator(table, drafter=forger)
    answer = sim.open(opened)
    sim.run()
    assert (answer.new_tokens, answer.finish_reason) == plain_run(table, opened)
    assert sim.loop.heartbeat().num_free_slots == 511


def test_extensions_late_and_stale_are_counted(table: TableModel) -> None:
    tokens, _ = plain_run(table, create_open(1, max_tokens=12))
    sim = Simulator(table)
    answer = sim.open(create_open(1, max_tokens=12))
    while len(answer.new_tokens) < 3:  # the fourth is committed and not yet said
        sim.loop.run_once()
    sim.loop.receive(LINK, chain(1, 3, tokens[:7]))  # three nodes lie below what is committed
    sim.loop.receive(LINK, chain(1, 3, [(tokens[0] + 1) % 24, 1]))
    sim.loop.receive(LINK, chain(1, 100, [1]))
    sim.run()
    assert answer.new_tokens == tokens
    assert (answer.stats.num_late, answer.stats.num_stale) == (1, 2)
    assert answer.stats.num_drafted == 3
    assert answer.stats.num_accepted == 3


# n-gram and none


def test_ngram_drafts_from_the_text_itself() -> None:
    table = TableModel(vocab_size=8, num_slots=512, seed=5, order=2)
    opened = create_open(1, [1, 2, 3, 4] * 4, max_tokens=100, drafter="ngram")
    sim = Simulator(table)
    answer = sim.open(opened)
    sim.run()
    assert answer.new_tokens == plain_run(table, opened)[0]
    assert answer.stats.num_accepted > 30
    assert answer.stats.exposed_ms == 0.0


def test_on_a_miss_the_text_itself_is_looked_up() -> None:
    table = TableModel(vocab_size=8, num_slots=512, seed=5, order=2)
    opened = create_open(1, [1, 2, 3, 4] * 4, max_tokens=100, drafter="model")
    sim = Simulator(table)  # its draft worker is dead
    answer = sim.open(opened)
    sim.run()
    assert answer.new_tokens == plain_run(table, opened)[0]
    assert answer.stats.num_accepted > 30
    assert answer.stats.num_hits == answer.stats.num_lookup_hits > 0
    assert answer.stats.num_judged == 0  # no merit of the draft model
    assert answer.stats.num_misses > 0
    assert answer.stats.exposed_ms == 0.0


def test_drafter_none_ignores_extensions(table: TableModel) -> None:
    sim = Simulator(table, drafter=self_drafter(table, 4))
    answer = sim.open(create_open(1, max_tokens=20, drafter="none"))
    sim.run()
    assert answer.stats.num_drafted == answer.stats.num_verified == 0
    assert answer.stats.num_hits == answer.stats.num_misses == 0
    assert answer.stats.exposed_ms == 0.0


# Refusals


def refused(sim: Simulator, opened: Open) -> Failed:
    answer = sim.open(opened)
    sim.run()
    assert answer.failed is not None
    assert answer.closed is not None
    assert answer.commits == []
    assert sim.loop.heartbeat().num_sessions == 0
    return answer.failed


@pytest.mark.parametrize(
    ("change", "code", "is_retryable", "word"),
    [
        ({"tokens": ()}, ErrorCode.INVALID_ARGUMENT, False, "num_prompt_tokens"),
        ({"tokens": (1, 5, 24)}, ErrorCode.INVALID_ARGUMENT, False, "24"),
        ({"tokens": (1, 5, -1)}, ErrorCode.INVALID_ARGUMENT, False, "-1"),
        ({"tokens": (1,) * 5000, "num_prompt_tokens": 5000}, ErrorCode.INVALID_ARGUMENT, False, "context"),
        ({"num_prompt_tokens": 0}, ErrorCode.INVALID_ARGUMENT, False, "num_prompt_tokens"),
        ({"adapter": "lora"}, ErrorCode.INVALID_ARGUMENT, False, "adapter"),
        ({"remaining_ms": 0.0}, ErrorCode.DEADLINE_EXCEEDED, False, "time"),
        ({"remaining_ms": -5.0}, ErrorCode.DEADLINE_EXCEEDED, False, "time"),
    ],
)
def test_an_open_that_cannot_work_is_refused(
    table: TableModel, change: dict[str, object], code: ErrorCode, is_retryable: bool, word: str
) -> None:
    failed = refused(Simulator(table), replace(create_open(1), **change))  # type: ignore[arg-type]
    assert (failed.code, failed.is_retryable) == (code, is_retryable)
    assert word in failed.message


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": math.nan}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": math.nan}, {"min_p": 2.0}],
)
def test_sampling_out_of_range_is_refused(table: TableModel, sampling: dict[str, float]) -> None:
    failed = refused(Simulator(table), create_open(1, **sampling))  # type: ignore[arg-type]
    assert failed.code is ErrorCode.INVALID_ARGUMENT


def test_what_can_never_fit_is_refused_for_good() -> None:
    sim = Simulator(TableModel(vocab_size=24, num_slots=32, seed=3))
    failed = refused(sim, create_open(1, max_tokens=60))
    assert (failed.code, failed.is_retryable) == (ErrorCode.RESOURCE_EXHAUSTED, False)


def test_one_session_too_many_may_try_again(table: TableModel) -> None:
    sim = Simulator(table, max_sessions=2)
    sim.open(create_open(1))
    sim.open(create_open(2))
    third = sim.open(create_open(3))
    assert third.failed is not None
    assert (third.failed.code, third.failed.is_retryable) == (ErrorCode.RESOURCE_EXHAUSTED, True)
    sim.run()
    sim.open(create_open(4, max_tokens=3))
    sim.run()
    assert sim.answers[4].finish_reason is FinishReason.LENGTH


def test_a_second_open_of_a_live_session_is_refused_and_the_first_goes_on(table: TableModel) -> None:
    sim = Simulator(table)
    opened = create_open(1, max_tokens=9)
    answer = sim.open(opened)
    sim.loop.run_once()
    sim.loop.receive(LINK, replace(opened, tokens=(5, 6), num_prompt_tokens=2))
    assert answer.failed is not None
    assert answer.failed.code is ErrorCode.ALREADY_EXISTS
    sim.run()
    assert answer.new_tokens == plain_run(table, opened)[0]


# Room


def test_sessions_queue_for_slots_and_all_are_answered() -> None:
    table = TableModel(vocab_size=24, num_slots=64, seed=3)
    sim = Simulator(table, drafter=self_drafter(table, 4))
    opens = [create_open(i, [i % 24] * 20, max_tokens=20) for i in range(1, 9)]
    answers = [sim.open(opened) for opened in opens]
    sim.run()
    for opened, answer in zip(opens, answers, strict=True):
        assert answer.new_tokens == plain_run(table, opened)[0]
    assert sim.loop.heartbeat().num_free_slots == 63


def test_when_slots_run_out_the_newest_is_computed_again_and_says_the_same() -> None:
    table = TableModel(vocab_size=24, num_slots=100, seed=3)
    sim = Simulator(table, drafter=self_drafter(table, 4))
    opens = [create_open(i, [i], max_tokens=90, temperature=0.9) for i in range(1, 4)]
    answers = [sim.open(opened) for opened in opens]
    sim.run()
    assert sim.loop._room.num_preempted > 0
    for opened, answer in zip(opens, answers, strict=True):
        assert answer.new_tokens == plain_run(table, opened)[0]
    assert [answer.failed for answer in answers] == [None] * 3


def test_a_session_that_is_preempted_while_it_waits_for_a_draft_is_computed_again_as_soon_as_there_is_room() -> None:
    table = TableModel(vocab_size=24, num_slots=100, seed=3)
    sim = Simulator(table)  # nobody drafts: the second session would wait for a second
    older = sim.open(create_open(1, [1], max_tokens=60, mode=Mode.OFF, wants_reports=True))
    newer = sim.open(create_open(2, [2] * 60, max_tokens=10, mode=Mode.SYNC, wants_reports=True))
    sim.run()
    assert sim.loop._room.num_preempted == 1
    assert newer.new_tokens == plain_run(table, newer.opened)[0]
    ended_ms = older.book.rounds[-1].since_open_ms
    assert ended_ms < newer.book.rounds[1].since_open_ms < ended_ms + 100.0


def test_more_sessions_than_rows_take_turns() -> None:
    table = TableModel(vocab_size=24, num_slots=512, seed=3)
    sim = Simulator(table, max_batch_tokens=4)
    opens = [create_open(i, [i, 1], max_tokens=6) for i in range(1, 10)]
    answers = [sim.open(opened) for opened in opens]
    sim.run()
    assert max(sim.model.rows_of_steps) <= 4
    for opened, answer in zip(opens, answers, strict=True):
        assert answer.new_tokens == plain_run(table, opened)[0]


# Failures, deadlines, links


def test_a_row_with_nan_ends_its_session_and_no_other(table: TableModel) -> None:
    bad, good = create_open(1, [1, 2, 3], max_tokens=20), create_open(2, [4, 5, 6], max_tokens=20)
    tokens, _ = plain_run(table, bad)
    table.poison([*bad.tokens, *tokens[:6]])
    sim = Simulator(table, drafter=self_drafter(TableModel(24, seed=3), 4))
    bad_answer, good_answer = sim.open(bad), sim.open(good)
    sim.run()
    assert bad_answer.failed is not None
    assert bad_answer.failed.code is ErrorCode.INTERNAL
    assert bad_answer.closed is not None
    assert bad_answer.new_tokens == tokens[: len(bad_answer.new_tokens)]
    assert good_answer.new_tokens == plain_run(table, good)[0]
    later = sim.open(create_open(3, [7] * 40, max_tokens=300))  # uses the cleared slots
    sim.run()
    assert later.finish_reason is FinishReason.LENGTH


def test_a_fault_of_ours_in_one_decision_ends_its_session_and_no_other(
    table: TableModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the worker would end, and so would each one that the session moves to."""
    choose = Chooser.choose

    def fail(self: Chooser, logits: Any, position: int) -> int:
        if self._params.seed == 13 and position == 8:
            raise ValueError("zero-size array")
        return choose(self, logits, position)

    bad, good = create_open(1, [1, 2, 3], max_tokens=20, seed=13), create_open(2, [4, 5, 6], max_tokens=20)
    expected = plain_run(table, good)[0]
    monkeypatch.setattr(Chooser, "choose", fail)
    sim = Simulator(table)
    bad_answer, good_answer = sim.open(bad), sim.open(good)
    sim.run()
    assert bad_answer.failed is not None
    assert not bad_answer.failed.is_retryable
    assert bad_answer.closed is not None
    assert good_answer.new_tokens == expected
    assert "zero-size array" in caplog.text


def test_nan_in_a_row_that_is_not_walked_harms_nobody(table: TableModel) -> None:
    opened = create_open(1, max_tokens=10)
    tokens, _ = plain_run(table, opened)
    wrong = (tokens[0] + 1) % 24
    table.poison([*opened.tokens, wrong])
    sim = Simulator(table, drafter=wrong_drafter(TableModel(24, seed=3), 1), delay_ms=lambda: 0.0)
    answer = sim.open(opened)
    sim.run()
    assert answer.new_tokens == tokens


def test_the_deadline_ends_a_session_that_runs_waits_or_queues() -> None:
    table = TableModel(vocab_size=24, num_slots=40, seed=3)
    sim = Simulator(table)
    running = sim.open(create_open(1, [1] * 20, max_tokens=15, mode=Mode.OFF))
    queued = sim.open(create_open(2, [2] * 20, max_tokens=15, remaining_ms=35.0, mode=Mode.OFF))
    sim.run()
    assert queued.failed is not None
    assert queued.failed.code is ErrorCode.DEADLINE_EXCEEDED
    assert running.finish_reason is FinishReason.LENGTH
    waiting = sim.open(create_open(3, max_tokens=15, remaining_ms=300.0, mode=Mode.SYNC))
    start = sim.clock.now
    sim.run()
    assert waiting.failed is not None
    assert waiting.failed.code is ErrorCode.DEADLINE_EXCEEDED
    assert sim.clock.now - start < 0.32
    assert waiting.new_tokens == plain_run(table, waiting.opened)[0][: len(waiting.new_tokens)]


def test_a_lost_link_ends_its_sessions_without_a_word(table: TableModel) -> None:
    sim = Simulator(table)
    lost = sim.open(create_open(1, max_tokens=50), link=7)
    kept = sim.open(create_open(2, max_tokens=50))
    for _ in range(5):
        sim.loop.run_once()
    said = len(lost.commits)
    sim.loop.link_lost(7)
    sim.loop.check()
    sim.run()
    assert len(lost.commits) == said
    assert lost.closed is None
    assert kept.finish_reason is FinishReason.LENGTH
    assert sim.loop.heartbeat().num_free_slots == 511


def test_sessions_of_two_links_may_have_one_id(table: TableModel) -> None:
    sim = Simulator(table)
    sim.open(create_open(1, [9, 9], max_tokens=5), link=1)
    sim.loop.receive(2, create_open(1, [8, 8], max_tokens=5))
    sim.loop.link_lost(1)
    sim.loop.check()
    assert sim.loop.heartbeat().num_sessions == 1


def test_a_paused_link_keeps_its_place_and_does_not_run(table: TableModel) -> None:
    sim = Simulator(table)
    paused = sim.open(create_open(1, max_tokens=20), link=7)
    other = sim.open(create_open(2, max_tokens=20))
    for _ in range(5):
        sim.loop.run_once()
    said = len(paused.commits)
    sim.loop.link_paused(7, True)
    sim.run()
    assert len(paused.commits) == said + 1  # the last step's, which was still to be said
    assert other.finish_reason is FinishReason.LENGTH
    sim.loop.link_paused(7, False)
    sim.run()
    assert paused.new_tokens == plain_run(table, paused.opened)[0]


def test_need_tokens_is_answered_by_one_commit_from_there(table: TableModel) -> None:
    sim = Simulator(table, auto_close=False)
    answer = sim.open(create_open(1, max_tokens=12))
    sim.run()
    del sim.answers[1]
    for have in (3, 9, 15, 1):
        sim.loop.receive(LINK, NeedTokens(session=1, have=have))
    sent = [message for message in sim.orphans if isinstance(message, Commit)]
    assert [commit.base for commit in sent] == [3, 9, 15, 1]
    for commit in sent:
        assert list(commit.tokens) == answer.tokens[commit.base :]
        assert len(commit.origins) == len(commit.tokens)
        assert (commit.round, commit.finish_reason) == (0, FinishReason.LENGTH)
    sim.loop.receive(LINK, NeedTokens(session=1, have=16))
    assert [type(message) for message in sim.orphans[4:]] == [Failed, Closed]


def test_a_finished_session_gives_its_slots_back_at_once_and_ends_with_close(table: TableModel) -> None:
    sim = Simulator(table, auto_close=False)
    answer = sim.open(create_open(1, max_tokens=12))
    sim.run()
    assert sim.loop.heartbeat().num_free_slots == 511
    assert sim.loop.heartbeat().num_sessions == 1
    sim.loop.receive(LINK, Close(session=1))
    assert answer.closed == Closed(session=1, length=15)
    sim.loop.receive(LINK, Close(session=1))  # nothing names the session after Closed
    sim.loop.receive(LINK, chain(1, 3, [1]))
    sim.loop.receive(LINK, NeedTokens(session=1, have=0))


def test_close_of_an_unknown_session_is_answered(table: TableModel) -> None:
    sim = Simulator(table)
    sim.loop.receive(LINK, Close(session=99))
    assert sim.orphans == [Closed(session=99, length=0)]


# Under load (case P1)


@pytest.mark.parametrize("num_sessions", [1, 4, 16])
def test_speculation_never_slows_the_service_down(num_sessions: int) -> None:
    """A draft that is right every other time, on a machine whose rows stop being free at 8."""
    times = {}
    for mode in (Mode.OFF, Mode.PIPELINED):
        table = TableModel(vocab_size=24, num_slots=4096, seed=3)
        draft: Drafter = self_drafter(TableModel.like(table, 0.5), 4, is_exhausted=False)
        sim = Simulator(table, drafter=draft, flat_rows=8, max_batch_tokens=128)
        answers = [sim.open(create_open(i, [i, 1, 2], max_tokens=25, mode=mode)) for i in range(1, num_sessions + 1)]
        start = sim.clock.now
        sim.run()
        times[mode] = sim.clock.now - start
        assert all(answer.finish_reason is FinishReason.LENGTH for answer in answers)
    assert times[Mode.PIPELINED] <= 1.05 * times[Mode.OFF]
