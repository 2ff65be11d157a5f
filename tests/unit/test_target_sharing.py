"""Sessions of a target worker share what was computed of their prompts, and say what they would have said without."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from target_simulator import Answer, Simulator, create_open, plain_run, self_drafter

from specpipe.sampling.coupled import Chooser
from specpipe.testing import TableModel
from specpipe.types import Close, FinishReason, Mode, Open

LONG = [i * i % 23 for i in range(200)]


@pytest.fixture
def table() -> TableModel:
    return TableModel(vocab_size=24, num_slots=1024, seed=3)


def ask(sim: Simulator, session: int, prompt: list[int], **options: object) -> Answer:
    """Open, run to the end, compare with the oracle."""
    answer = sim.open(create_open(session, prompt, **options))  # type: ignore[arg-type]
    sim.run()
    check(sim, answer)
    return answer


def check(sim: Simulator, answer: Answer) -> None:
    assert answer.failed is None
    assert (answer.new_tokens, answer.finish_reason) == plain_run(sim.model.table, answer.opened)


def rows_of(sim: Simulator, session: int, prompt: list[int], **options: object) -> int:
    before = sim.model.table.num_rows
    ask(sim, session, prompt, **options)
    return sim.model.table.num_rows - before


# What is computed


def test_a_second_request_with_the_same_prompt_computes_its_last_token_only(table: TableModel) -> None:
    sim = Simulator(table)
    assert rows_of(sim, 1, LONG, max_tokens=1, mode=Mode.OFF) == 200
    for session in (2, 3):
        assert rows_of(sim, session, LONG, max_tokens=1, mode=Mode.OFF) == 1
        assert sim.answers[session].stats.num_cached == 199
    assert sim.answers[1].stats.num_cached == 0
    assert (sim.loop.sharing.num_shares, sim.loop.sharing.num_shared_tokens) == (2, 398)


def test_without_a_prefix_cache_every_prompt_is_computed(table: TableModel) -> None:
    sim = Simulator(table, has_prefix_cache=False)
    for session in (1, 2):
        assert rows_of(sim, session, LONG, max_tokens=1, mode=Mode.OFF) == 200
        assert sim.answers[session].stats.num_cached == 0


def test_the_prompt_of_a_session_that_still_decodes_is_shared(table: TableModel) -> None:
    sim = Simulator(table)
    first = sim.open(create_open(1, LONG, max_tokens=40, mode=Mode.OFF))
    while not first.commits:
        sim.loop.run_once()
    second = sim.open(create_open(2, LONG, max_tokens=40, temperature=1.0, seed=9))
    sim.run()
    assert second.stats.num_cached == 199
    for answer in (first, second):
        check(sim, answer)


def test_requests_that_come_together_compute_a_long_prompt_once(table: TableModel) -> None:
    sim = Simulator(table, max_batch_tokens=64)
    answers = [sim.open(create_open(i, LONG, max_tokens=5, temperature=1.0, seed=i)) for i in range(1, 9)]
    sim.run()
    for answer in answers:
        check(sim, answer)
    assert table.num_rows < 200 + 8 * 30
    assert [answer.stats.num_cached for answer in answers] == [0] + [199] * 7


def test_a_second_turn_begins_where_the_first_answer_ended(table: TableModel) -> None:
    sim = Simulator(table, drafter=self_drafter(table, 4))
    turn = LONG
    for session in range(1, 5):
        answer = ask(sim, session, turn, max_tokens=20, temperature=0.9)
        assert answer.stats.num_cached == (0 if session == 1 else len(turn) - 4)
        turn = [*answer.tokens, 7, 8, 9]


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_an_answer_cut_in_the_middle_of_a_block_leaves_nothing_wrong_behind(table: TableModel, max_tokens: int) -> None:
    """Case G5: tokens accepted after a stop must not stay in what is shared."""
    sim = Simulator(table, drafter=self_drafter(table, 8), delay_ms=lambda: 0.0)
    plain, _ = plain_run(table, create_open(1, LONG, max_tokens=12))
    first = ask(sim, 1, LONG, max_tokens=12, k=8, mode=Mode.SYNC, stop_ids=(plain[max_tokens - 1],))
    for session, other in enumerate((first.tokens, [*first.tokens, *plain], first.tokens[:-1], LONG), start=2):
        ask(sim, session, [*other, 1], max_tokens=12)


@pytest.mark.parametrize("prompt", [[*LONG[:-1], 23], LONG[:1], LONG[:2], [23, *LONG], LONG[:100] + [23] * 50])
def test_prompts_that_agree_in_part_share_that_part(table: TableModel, prompt: list[int]) -> None:
    sim = Simulator(table)
    ask(sim, 1, LONG, max_tokens=3)
    answer = ask(sim, 2, prompt, max_tokens=3)
    agree = [a == b for a, b in zip(prompt, LONG, strict=False)]
    common = agree.index(False) if False in agree else len(agree)
    assert answer.stats.num_cached == min(common, len(prompt) - 1)


# Who goes first when slots run out


def test_what_is_cached_gives_way_before_anybody_is_preempted() -> None:
    table = TableModel(vocab_size=24, num_slots=140, seed=3)
    sim = Simulator(table)
    for session in range(1, 6):
        ask(sim, session, [session] * 30, max_tokens=60)
    both = [sim.open(create_open(i, [i] * 10, max_tokens=55, temperature=0.8)) for i in (6, 7)]
    sim.run()
    for answer in both:
        check(sim, answer)
    assert sim.loop._room.num_preempted == 0
    assert sim.loop.sharing.num_evicted_slots > 0
    assert sim.loop.heartbeat().num_free_slots == 139


def test_a_preempted_session_finds_again_what_was_not_needed_meanwhile() -> None:
    table = TableModel(vocab_size=24, num_slots=150, seed=3)
    sim = Simulator(table)
    answers = [sim.open(create_open(i, [i, 1], max_tokens=85, temperature=0.9, mode=Mode.OFF)) for i in (1, 2)]
    sim.run()
    assert sim.loop._room.num_preempted == 1
    assert sim.loop.sharing.num_shared_tokens > 0
    assert [answer.stats.num_cached for answer in answers] == [0, 0], "its own tokens are nobody's cached prompt"
    for answer in answers:
        check(sim, answer)


# NaN


def test_a_poisoned_session_adds_nothing_and_harms_nobody_it_shares_with(table: TableModel) -> None:
    sim = Simulator(table, drafter=self_drafter(TableModel(24, seed=3), 4))
    bad = create_open(1, LONG, max_tokens=40)
    tokens, _ = plain_run(table, bad)
    table.poison([*LONG, *tokens[:20]])
    neighbour = sim.open(create_open(2, LONG, max_tokens=60, temperature=1.0, seed=4))
    while not neighbour.commits:
        sim.loop.run_once()
    failed = sim.open(bad)
    sim.run()
    assert failed.failed is not None
    check(sim, neighbour)
    assert ask(sim, 3, LONG, max_tokens=10).stats.num_cached == 199
    onward = ask(sim, 4, [*LONG, *tokens[:15], 23], max_tokens=10)
    assert onward.stats.num_cached == 209, "what session 3 computed; nothing of what the poisoned one did"
    for session in range(5, 9):  # the cleared slots are used again
        ask(sim, session, [session] * 200, max_tokens=10)


def test_a_prompt_that_gives_nan_is_not_shared(table: TableModel) -> None:
    sim = Simulator(table)
    table.poison(LONG[:150])
    for session in (1, 2):
        answer = sim.open(create_open(session, LONG, max_tokens=5, mode=Mode.OFF))
        sim.run()
        assert answer.failed is not None
    assert table.num_rows == 400
    assert ask(sim, 3, LONG[:149], max_tokens=1).stats.num_cached == 0


def test_the_token_that_ended_an_answer_is_not_shared_if_nobody_saw_its_row() -> None:
    """It was drafted, so its row was computed; it ended the answer, so nobody looked: it may hold NaN."""
    table = TableModel(vocab_size=24, num_slots=256, seed=3)
    sim = Simulator(table, drafter=self_drafter(TableModel(24, seed=3), 8), delay_ms=lambda: 0.0)
    tokens, _ = plain_run(table, create_open(1, [1, 2, 3], max_tokens=6))
    end = next(i for i in range(3, 6) if tokens[i] not in tokens[:i])
    whole = [1, 2, 3, *tokens[: end + 1]]
    table.poison(whole)
    answer = sim.open(create_open(1, [1, 2, 3], max_tokens=9, k=8, stop_ids=(tokens[end],), mode=Mode.SYNC))
    sim.run()
    assert (answer.tokens, answer.finish_reason) == (whole, FinishReason.STOP)
    assert answer.stats.num_accepted == end + 1, "it was a row"
    onward = sim.open(create_open(2, [*whole, 5], max_tokens=3))
    sim.run()
    assert onward.failed is not None
    assert "NaN" in onward.failed.message, "computed anew, and found to be what it is"
    for session in range(3, 9):
        ask(sim, session, [session] * 60, max_tokens=30)


def test_a_prompt_half_computed_when_its_client_left_is_zeroed_and_not_shared(table: TableModel) -> None:
    sim = Simulator(table, max_batch_tokens=32)
    table.poison(LONG[:20])
    left = sim.open(create_open(1, LONG, max_tokens=5))
    sim.loop.run_once()
    sim.post(Close(session=1))
    sim.run()
    assert left.closed is not None
    assert 20 <= table.num_rows < 200
    assert ask(sim, 2, [9] * 300, max_tokens=5).stats.num_cached == 0
    assert ask(sim, 3, LONG[:15], max_tokens=5).stats.num_cached == 0


# Any order of events


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), num_slots=st.sampled_from([70, 120, 400]), max_rows=st.sampled_from([5, 16, 64]))
def test_whoever_shares_with_whom_the_answers_are_the_plain_ones(
    temperature: float, seed: int, num_slots: int, max_rows: int
) -> None:
    chance = random.Random(seed)
    table, clean = (TableModel(vocab_size=20, num_slots=num_slots, seed=seed % 7) for _ in range(2))
    draft = TableModel.like(clean, chance.choice([0.0, 0.9, 1.0]))
    sim = Simulator(table, drafter=self_drafter(draft, chance.choice([0, 3])), max_batch_tokens=max_rows)
    opens = [random_open(number, clean, chance, temperature) for number in range(1, chance.randint(4, 10))]
    poisoned = chance.choice(opens)
    if chance.random() < 0.3:
        table.poison([*poisoned.tokens, *plain_run(table, poisoned)[0][: chance.randint(1, 9)]])
    cancelled = set()
    for opened in opens:
        start = chance.choice([0.0, 30.0, 300.0, 900.0])
        sim.at(start, lambda opened=opened: sim.open(opened))  # type: ignore[misc]
        if chance.random() < 0.2:
            cancelled.add(opened.session)
            sim.post(Close(session=opened.session), after_ms=start + chance.uniform(0.0, 100.0))
    sim.run()
    for opened in opens:
        answer = sim.answers[opened.session]
        expected, reason = plain_run(clean, opened)
        assert answer.new_tokens == expected[: len(answer.new_tokens)]
        is_whole = answer.failed is None and opened.session not in cancelled
        assert not is_whole or (answer.new_tokens, answer.finish_reason) == (expected, reason)
        assert answer.failed is None or "NaN" in answer.failed.message
    assert sim.loop.heartbeat().num_free_slots == num_slots - 1


def random_open(number: int, table: TableModel, chance: random.Random, temperature: float) -> Open:
    """A prompt that begins like others: one of two beginnings, perhaps what the model says after it, perhaps more."""
    beginning = [[1, 2, 3] * 5, [1, 2, 3, 4] * 5][chance.randrange(2)][: chance.choice([4, 15, 20])]
    opened = create_open(
        number,
        beginning,
        max_tokens=chance.randint(1, 20),
        mode=chance.choice(list(Mode)),
        temperature=temperature,
        seed=chance.randrange(3),
    )
    chooser = Chooser(opened.sampling, table.info.vocab_size)
    tokens = list(beginning)
    for _ in range(chance.choice([0, 0, 5, 10])):
        tokens.append(chooser.choose(table.logits_of(tokens), len(tokens)))
    tokens += [chance.randrange(20) for _ in range(chance.choice([0, 0, 1, 5]))]
    length = len(tokens) + chance.randint(1, 20)
    return replace(
        opened,
        tokens=tuple(tokens),
        num_prompt_tokens=len(tokens),
        stops=replace(opened.stops, max_length=length, min_length=0),
    )
