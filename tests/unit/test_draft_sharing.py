"""Sessions of a draft worker share what was computed of their prompts, and draft what they would have drafted."""

from __future__ import annotations

import pytest
from draft_harness import (
    Harness,
    assert_drafts_are_the_models_own,
    close_message,
    commit_message,
    first_path,
    open_message,
)

from specpipe.config import DraftWorkerConfig, EngineConfig
from specpipe.testing import TableModel
from specpipe.types import Closed, Failed, FinishReason, Open

LONG = [i * i % 23 for i in range(200)]


class Counted(Harness):
    """Counts the committed rows of each session, by its id."""

    def __init__(self, model: TableModel, **options: int) -> None:
        super().__init__(model, **options)  # type: ignore[arg-type]
        self.committed: dict[int, int] = {}

    def step(self) -> float | None:
        forwards = self.model.num_forwards
        names = {session.key: session.id for session in self.loop._sessions.values()}
        result = super().step()
        if self.model.num_forwards > forwards:
            assert self.model.last_batch is not None
            for rows in self.model.last_batch.sessions:
                name = names[rows.session]
                self.committed[name] = self.committed.get(name, 0) + rows.num_committed_rows
        return result

    def ask(self, session: int, tokens: list[int]) -> Open:
        opened = open_message(session, tokens)
        self.receive(opened)
        self.run()
        assert_drafts_are_the_models_own(self, self.session(session), opened)
        return opened

    def answer(self, session: int, count: int) -> list[int]:
        """Commit `count` tokens along the draft's own tree, then finish; returns all tokens of the session."""
        while count > 0:
            held = self.session(session)
            path = first_path(held.tree)[: min(count, 5)]
            count -= len(path)
            reason = FinishReason.LENGTH if count == 0 else None
            self.receive(commit_message(session, held.base, path, next_budget=8, finish=reason))
            self.run()
        tokens = list(self.session(session).tokens)
        self.receive(close_message(session))
        return tokens


@pytest.fixture
def harness() -> Counted:
    return Counted(TableModel(24, 2048, seed=3))


def test_a_second_session_with_the_same_prompt_computes_its_last_token_only(harness: Counted) -> None:
    for session in (1, 2):
        harness.ask(session, LONG)
    harness.receive(close_message(1))
    harness.receive(close_message(2))
    harness.ask(3, LONG)
    assert harness.committed == {1: 200, 2: 1, 3: 1}
    assert (harness.loop.sharing.num_shares, harness.loop.sharing.num_shared_tokens) == (2, 398)


def test_without_a_prefix_cache_every_prompt_is_computed(harness: Counted) -> None:
    engine = EngineConfig(model="table", has_prefix_cache=False)
    harness.loop = type(harness.loop)(harness.model, DraftWorkerConfig(engine=engine), lambda link, message: None)
    for session in (1, 2):
        harness.ask(session, LONG)
    assert harness.committed == {1: 200, 2: 200}


def test_sessions_that_come_together_compute_a_long_prompt_once(harness: Counted) -> None:
    opened = [open_message(session, LONG, temperature=1.0, seed=session) for session in range(1, 9)]
    for message in opened:
        harness.receive(message)
    harness.run()
    for message in opened:
        assert_drafts_are_the_models_own(harness, harness.session(message.session), message)
    assert harness.committed[1] == 200
    assert sum(harness.committed.values()) < 200 + 64 + 8


def test_a_second_turn_begins_where_the_first_answer_ended(harness: Counted) -> None:
    tokens = LONG
    for session in range(1, 4):
        harness.ask(session, tokens)
        assert session == 1 or harness.committed[session] <= 4, "the new turn, and the last token of the one before"
        tokens = [*harness.answer(session, 20), 7, 8, 9]


def test_a_poisoned_session_adds_nothing_and_harms_nobody_it_shares_with(harness: Counted) -> None:
    neighbour = harness.ask(1, LONG)
    harness.model.poison([*LONG, 5, 6, 7])
    harness.ask(2, [*LONG, 5])
    for base, token in ((201, 6), (202, 7)):
        harness.receive(commit_message(2, base, [token], next_budget=8))
        harness.run()
    assert [type(message) for message in harness.take() if message.session == 2][-2:] == [Failed, Closed]
    harness.receive(commit_message(1, 200, [9], next_budget=8))
    harness.run()
    assert_drafts_are_the_models_own(harness, harness.session(1), neighbour)
    harness.ask(3, [*LONG, 5, 6, 1])
    assert harness.committed[3] == 2, "of the poisoned one only what it had shared before"
    for session in range(4, 8):  # the cleared slots are used again
        harness.ask(session, [session] * 150)


def test_a_node_with_nan_leaves_no_nan_behind(harness: Counted) -> None:
    guess = harness.model.logits_of(LONG).argmax()
    harness.model.poison([*LONG, int(guess)])
    harness.receive(open_message(1, LONG))
    harness.run()
    assert [type(message) for message in harness.take()][-2:] == [Failed, Closed]
    for session in range(2, 6):  # its slots are used again
        harness.ask(session, [session] * 150)


def test_a_prompt_half_computed_when_its_session_ends_is_zeroed_and_not_shared(harness: Counted) -> None:
    harness.model.poison(LONG[:20])
    harness.receive(open_message(1, LONG))
    harness.step()
    assert 20 <= harness.committed[1] < 200
    harness.receive(close_message(1))
    harness.ask(2, [9] * 300)
    harness.ask(3, LONG[:15])
    assert harness.committed[3] == 15


def test_a_parked_session_finds_again_what_was_not_needed_meanwhile() -> None:
    harness = Counted(TableModel(24, 370, seed=3), max_nodes=16)
    opened = [harness.ask(session, [session] * 130) for session in (1, 2)]
    for tokens in ([3] * 60, [4] * 60):  # the older one grows until the newer has to give way
        harness.receive(commit_message(1, harness.session(1).base, tokens))
        harness.run()
    assert harness.session(2).is_parked
    harness.receive(close_message(1))
    harness.run()
    assert not harness.session(2).is_parked
    assert harness.session(2).num_pending == 0
    assert 130 < harness.committed[2] < 230
    assert_drafts_are_the_models_own(harness, harness.session(2), opened[1])
    harness.receive(close_message(2))
    assert harness.loop.heartbeat().num_free_slots == 369


def test_what_is_cached_gives_way_to_trees_and_prompts() -> None:
    harness = Counted(TableModel(24, 300, seed=3))
    for session in range(1, 9):
        harness.ask(session, [session] * 100)
        harness.receive(close_message(session))
    assert harness.loop.sharing.num_evicted_slots > 400
    assert harness.loop.heartbeat().num_free_slots == 299
