"""The draft worker's loop against a model that checks every row: drafts, commits, capacity, failures."""

from __future__ import annotations

import random
from typing import Any

import pytest
from draft_harness import (
    LINK,
    Harness,
    assert_drafts_are_the_models_own,
    close_message,
    commit_message,
    continuation,
    first_path,
    open_message,
    received_tree,
)

from draft_worker.scheduler import StepRules
from specpipe.errors import ErrorCode
from specpipe.sampling.coupled import Chooser
from specpipe.testing import TableModel
from specpipe.types import Closed, Extension, Failed, FinishReason, Mode, NeedTokens

PROMPT = (1, 2, 3)


def drafted(harness: Harness, opened, tokens) -> list[int]:
    harness.run()
    extensions = [e for e in harness.take_extensions() if e.base == len(tokens)]
    return first_path(received_tree(opened, tokens, extensions))


class TestDrafts:
    @pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
    def test_first_ranked_path_is_what_the_draft_itself_would_say(self, temperature: float) -> None:
        harness = Harness(TableModel(seed=3, spread=4.0))
        opened = open_message(temperature=temperature)
        harness.receive(opened)
        path = drafted(harness, opened, PROMPT)
        assert len(path) >= 4
        assert path == continuation(harness.model, opened, PROMPT, len(path))

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_the_target_itself_as_draft_foresees_every_choice(self, temperature: float) -> None:
        """SELF: after any commit, the first-ranked path is the target's own continuation."""
        harness = Harness(TableModel(seed=4))
        opened = open_message(temperature=temperature)
        text = continuation(harness.model, opened, PROMPT, 80)
        harness.receive(opened)
        tokens, rng = list(PROMPT), random.Random(0)
        while len(tokens) < 40:
            path = drafted(harness, opened, tokens)
            start = len(tokens) - len(PROMPT)
            assert path
            assert path == text[start : start + len(path)]
            new = text[start : start + rng.randint(1, 6)]
            harness.receive(commit_message(1, len(tokens), new))
            tokens += new

    def test_every_fan_is_what_a_fresh_draft_would_rank(self) -> None:
        harness = Harness(TableModel(seed=5))
        opened = open_message(temperature=1.0)
        harness.receive(opened)
        harness.run()
        session = harness.session(1)
        assert session.tree.num_nodes > 20
        assert_drafts_are_the_models_own(harness, session, opened)

    def test_extensions_hold_new_nodes_and_their_ancestors_only(self) -> None:
        harness = Harness(TableModel(seed=6))
        opened = open_message()
        harness.receive(opened)
        known = received_tree(opened, PROMPT, [])
        while harness.step() is not None:
            for extension in harness.take_extensions():
                added = known.graft(extension, PROMPT).added
                inner = set(extension.parents)
                leaves = [i for i in range(len(extension.tokens)) if i + 1 not in inner]
                assert added
                assert len(added) >= len(leaves)
        session = harness.session(1)
        assert known.num_nodes == session.tree.num_nodes

    def test_extensions_tell_the_step_and_this_sessions_share_of_it(self) -> None:
        harness = Harness(TableModel(seed=6))
        harness.receive(open_message(1))
        harness.receive(open_message(2, (4, 5)))
        harness.step()
        first, second = harness.take_extensions()
        assert first.draft_step == second.draft_step == 1
        assert first.draft_step_ms == second.draft_step_ms > 0
        assert first.draft_share_ms == pytest.approx(first.draft_step_ms * 3 / 5)
        assert first.draft_share_ms + second.draft_share_ms == pytest.approx(first.draft_step_ms)

    def test_a_covered_session_goes_idle_and_wakes_up_with_a_commit(self) -> None:
        harness = Harness(TableModel(seed=7))
        opened = open_message()
        harness.receive(opened)
        harness.run()
        assert harness.step() is None
        text = continuation(harness.model, opened, PROMPT, 2)
        harness.receive(commit_message(1, 3, text, next_budget=8))
        assert harness.step() == 0.0

    def test_growth_is_best_first_over_all_sessions(self) -> None:
        """A sure draft gets the rows that an unsure one is not worth."""
        harness = Harness(TableModel(seed=8, spread=4.0), steps=StepRules(num_leaves=8))
        for session in range(1, 5):
            harness.receive(open_message(session, (session, session + 1)))
        harness.step()
        for _ in range(4):
            leaves = [n for s in range(1, 5) for n in harness.session(s).leaves()]
            expected = sorted((n.reach for n in leaves), reverse=True)[:8]
            before = {id(n) for n in leaves}
            harness.step()
            expanded = [n for s in range(1, 5) for n in harness.session(s).tree.nodes() if n.slot and id(n) in before]
            assert sorted((n.reach for n in expanded), reverse=True) == expected


class TestSync:
    @pytest.mark.parametrize("k", [None, 1, 2, 8])
    def test_one_chain_of_exactly_k_greedy_tokens_for_each_base(self, k: int | None) -> None:
        harness = Harness(TableModel(seed=9))
        opened = open_message(mode=Mode.SYNC, num_speculative_tokens=k)
        harness.receive(opened)
        tokens = list(PROMPT)
        for length in (1, k or 4, (k or 4) + 1, 2):
            harness.run()
            (extension,) = harness.take_extensions()
            assert extension.is_exhausted
            assert extension.base == len(tokens)
            assert extension.parents == tuple(range(k or 4))
            assert list(extension.tokens) == continuation(harness.model, opened, tokens, k or 4)
            assert 0 < extension.draft_step_ms <= extension.draft_share_ms * (1 + 1e-9)
            new = continuation(harness.model, opened, tokens, length)
            harness.receive(commit_message(1, len(tokens), new))
            tokens += new

    def test_it_does_not_run_ahead(self) -> None:
        harness = Harness(TableModel(seed=9))
        harness.receive(open_message(mode=Mode.SYNC))
        assert harness.run() == 4
        assert [harness.step() for _ in range(3)] == [None] * 3
        assert harness.model.num_forwards == 4

    def test_a_chain_is_cut_where_the_answer_ends(self) -> None:
        harness = Harness(TableModel(seed=9))
        harness.receive(open_message(mode=Mode.SYNC, max_length=6))
        harness.run()
        (extension,) = harness.take_extensions()
        assert len(extension.tokens) == 2  # positions 3 and 4; a row at 5 would choose beyond the answer
        assert extension.is_exhausted


class TestCommits:
    def test_a_commit_along_the_tree_keeps_what_was_computed(self) -> None:
        harness = Harness(TableModel(seed=10))
        opened = open_message()
        harness.receive(opened)
        harness.run()
        rows = harness.model.num_rows
        new = continuation(harness.model, opened, PROMPT, 3)
        harness.receive(commit_message(1, 3, new))
        session = harness.session(1)
        assert len(session.slots) == 6
        assert session.num_pending == 0
        assert harness.model.num_rows == rows
        assert session.tree.num_nodes > 0

    def test_a_commit_out_of_the_tree_keeps_kv_up_to_the_last_matched_token(self) -> None:
        harness = Harness(TableModel(seed=10))
        opened = open_message()
        harness.receive(opened)
        harness.run()
        two = continuation(harness.model, opened, PROMPT, 2)
        stranger = _token_outside_the_tree(harness, two)
        harness.receive(commit_message(1, 3, [*two, stranger, 5]))
        session = harness.session(1)
        assert len(session.slots) == 5
        assert session.num_pending == 2
        harness.step()
        (rows,) = harness.model.last_batch.sessions
        assert list(rows.tokens) == [stranger, 5]
        assert_drafts_are_the_models_own(harness, session, opened)

    def test_candidates_left_out_before_a_commit_are_sent_without_a_step(self) -> None:
        """A deep node keeps few children; near the base the others are worth it, and they are known already."""
        harness = Harness(TableModel(seed=12, spread=1.0))
        opened = open_message()
        harness.receive(opened)
        harness.run()
        harness.take()
        session = harness.session(1)
        node = next(n for n in session.tree.nodes() if n.slot and len(n.children) == 1 and n.depth > 1)
        path, forwards = [n.token for n in node.path()], harness.model.num_forwards
        harness.receive(commit_message(1, 3, path))
        assert len(session.tree.root.children) > 1
        extension = session.take_extension(harness.loop._last_steps[session.key])
        assert extension is not None
        assert extension.base == 3 + len(path)
        assert extension.draft_share_ms == 0.0
        assert harness.model.num_forwards == forwards

    def test_a_doubled_commit_changes_nothing(self) -> None:
        harness = Harness(TableModel(seed=10))
        opened = open_message()
        harness.receive(opened)
        new = continuation(harness.model, opened, PROMPT, 3)
        harness.receive(commit_message(1, 3, new))
        harness.receive(commit_message(1, 3, new))
        harness.receive(commit_message(1, 4, new[1:]))
        assert harness.session(1).tokens == [*PROMPT, *new]
        assert harness.take() == []

    def test_a_lost_commit_is_asked_for_and_made_up_by_a_large_one(self) -> None:
        harness = Harness(TableModel(seed=10))
        opened = open_message()
        harness.receive(opened)
        harness.run()
        harness.take()
        text = continuation(harness.model, opened, PROMPT, 40)
        harness.receive(commit_message(1, 10, text[7:9]))
        assert harness.take() == [NeedTokens(session=1, have=3)]
        harness.receive(commit_message(1, 3, text[:9]))
        assert harness.session(1).tokens == [*PROMPT, *text[:9]]
        assert drafted(harness, opened, [*PROMPT, *text[:9]])[:3] == text[9:12]

    def test_an_overlap_that_disagrees_fails_that_session_only(self) -> None:
        harness = Harness(TableModel(seed=10))
        harness.receive(open_message(1))
        harness.receive(open_message(2))
        harness.receive(commit_message(1, 3, [4, 5]))
        harness.receive(commit_message(1, 4, [6]))
        failed, closed = harness.take()
        assert isinstance(failed, Failed)
        assert failed.code is ErrorCode.FAILED_PRECONDITION
        assert closed == Closed(session=1, length=5)
        harness.run()
        assert {e.session for e in harness.take_extensions()} == {2}

    def test_a_finished_session_gives_its_slots_back_at_once_and_is_silent(self) -> None:
        harness = Harness(TableModel(seed=10))
        harness.receive(open_message())
        harness.run()
        harness.take()
        harness.receive(commit_message(1, 3, [4], finish=FinishReason.STOP))
        assert harness.loop.heartbeat().num_free_slots == harness.model.num_slots - 1
        harness.run()
        assert harness.take() == []
        harness.receive(close_message(1))
        assert harness.take() == [Closed(session=1, length=4)]

    def test_the_coordinator_can_have_the_tree_sent_again(self) -> None:
        harness = Harness(TableModel(seed=10))
        opened = open_message()
        harness.receive(opened)
        harness.run()
        whole = received_tree(opened, PROMPT, harness.take_extensions())
        harness.receive(NeedTokens(session=1, have=3))
        harness.run()
        again = received_tree(opened, PROMPT, harness.take_extensions())
        assert again.num_nodes == whole.num_nodes


class TestEnds:
    def test_close_frees_everything_and_closed_is_the_last_word(self) -> None:
        harness = Harness(TableModel(seed=11))
        harness.receive(open_message())
        harness.step()
        harness.receive(close_message(1))
        assert harness.take()[-1] == Closed(session=1, length=3)
        assert harness.step() is None
        assert harness.take() == []
        assert harness.loop.heartbeat().num_free_slots == harness.model.num_slots - 1

    def test_close_of_a_session_that_never_arrived_is_answered(self) -> None:
        harness = Harness(TableModel(seed=11))
        harness.receive(close_message(9))
        assert harness.take() == [Closed(session=9, length=0)]

    def test_a_close_that_crosses_a_failure_is_not_answered_twice(self) -> None:
        harness = Harness(TableModel(seed=11))
        harness.receive(open_message())
        harness.receive(commit_message(1, 2, [9]))
        assert [type(m) for m in harness.take()] == [Failed, Closed]
        harness.receive(close_message(1))
        assert harness.take() == []

    def test_messages_for_unknown_sessions_are_normal(self) -> None:
        harness = Harness(TableModel(seed=11))
        harness.receive(commit_message(5, 3, [4]))
        harness.receive(NeedTokens(session=5, have=3))
        assert harness.take() == []

    def test_a_duplicate_open_is_refused_and_the_session_goes_on(self) -> None:
        harness = Harness(TableModel(seed=11))
        harness.receive(open_message())
        harness.receive(open_message())
        (failed,) = harness.take()
        assert isinstance(failed, Failed)
        assert failed.code is ErrorCode.ALREADY_EXISTS
        harness.run()
        assert harness.take_extensions()

    def test_a_lost_link_ends_its_sessions_only(self) -> None:
        harness = Harness(TableModel(seed=11))
        harness.receive(open_message(1), link=1)
        harness.receive(open_message(1, (5, 6)), link=2)
        harness.step()
        harness.take(1)
        harness.take(2)
        harness.loop.link_lost(1)
        harness.loop.check()
        harness.run()
        assert harness.take(1) == []
        assert harness.take_extensions(2)
        assert harness.loop.heartbeat().num_sessions == 1

    def test_a_paused_link_is_not_drafted_for(self) -> None:
        harness = Harness(TableModel(seed=11))
        harness.receive(open_message())
        harness.loop.link_paused(LINK, True)
        harness.receive(open_message(2))
        assert harness.step() is None
        harness.loop.link_paused(LINK, False)
        harness.run()
        assert {e.session for e in harness.take_extensions()} == {1, 2}


class TestLimits:
    def test_a_draft_with_a_shorter_context_stops_that_session_and_no_other(self) -> None:
        harness = Harness(TableModel(seed=12, max_context=16))
        long_one = open_message(1, range(1, 13))
        harness.receive(long_one)
        harness.receive(open_message(2))
        tokens = list(long_one.tokens)
        while len(tokens) < 24:
            harness.run()
            for extension in harness.take_extensions():
                if extension.session == 1 and extension.base == len(tokens):
                    positions = [
                        len(tokens) + n.depth - 1 for n in received_tree(long_one, tokens, [extension]).nodes()
                    ]
                    assert all(position <= 16 for position in positions)
                    assert extension.is_exhausted == (len(tokens) > 16)
            new = continuation(harness.model, long_one, tokens, 2)
            harness.receive(commit_message(1, len(tokens), new))
            tokens += new
        session = harness.session(1)
        assert session.held_slots() == []
        assert "context" in session.stop_reason
        assert harness.session(2).can_draft

    def test_a_prompt_beyond_the_context_is_taken_and_exhausted_at_once(self) -> None:
        harness = Harness(TableModel(seed=12, max_context=16))
        harness.receive(open_message(1, [1] * 40))
        assert harness.step() is None
        (extension,) = harness.take_extensions()
        assert extension == Extension(
            session=1, base=40, parents=(), tokens=(), confidences=(), is_exhausted=True, drafter="model"
        )
        assert harness.model.num_forwards == 0

    def test_nothing_is_drafted_beyond_the_answers_end(self) -> None:
        harness = Harness(TableModel(seed=12))
        opened = open_message(max_length=6)
        harness.receive(opened)
        harness.run()
        tree = received_tree(opened, PROMPT, harness.take_extensions())
        assert max(node.depth for node in tree.nodes()) == 2

    @pytest.mark.parametrize("tokens", [(1, 2, 99), (99,)])
    def test_tokens_outside_the_drafts_vocabulary_only_end_drafting(self, tokens: tuple[int, ...]) -> None:
        harness = Harness(TableModel(seed=12))
        harness.receive(open_message(1, tokens))
        harness.run()
        (extension,) = harness.take_extensions()
        assert extension.is_exhausted
        harness.receive(open_message(2))
        harness.run()
        harness.take()
        harness.receive(commit_message(2, 3, [40]))
        harness.run()
        (extension,) = harness.take_extensions()
        assert (extension.session, extension.base, extension.is_exhausted) == (2, 4, True)

    def test_mode_off_is_not_drafted(self) -> None:
        harness = Harness(TableModel(seed=12))
        harness.receive(open_message(mode=Mode.OFF))
        assert harness.step() is None
        assert harness.model.num_forwards == 0

    def test_prefill_goes_in_chunks_first_come_first_served_while_others_draft(self) -> None:
        harness = Harness(TableModel(seed=13), max_batch_tokens=32)
        harness.receive(open_message(1))
        harness.step()
        harness.receive(open_message(2, [1] * 70))
        harness.receive(open_message(3, [2] * 70))
        seen: list[tuple[int, ...]] = []
        while harness.session(3).num_pending:
            harness.step()
            batch = harness.model.last_batch
            assert batch.num_rows <= 32
            seen.append(tuple(rows.session for rows in batch.sessions))
            assert harness.session(3).num_pending == 70 or harness.session(2).num_pending == 0
        assert any(1 in sessions and 2 in sessions for sessions in seen)

    def test_too_many_sessions_are_refused_for_now(self) -> None:
        harness = Harness(TableModel(seed=13), max_sessions=1)
        harness.receive(open_message(1))
        harness.receive(open_message(2))
        failed, closed = harness.take()
        assert isinstance(failed, Failed)
        assert (failed.session, failed.code, failed.is_retryable) == (2, ErrorCode.RESOURCE_EXHAUSTED, True)
        assert closed == Closed(session=2, length=3)
        harness.receive(close_message(1))
        harness.take()
        harness.receive(open_message(2))
        assert harness.take() == []

    def test_a_prompt_without_room_is_refused_for_now(self) -> None:
        harness = Harness(TableModel(seed=13, num_slots=200))
        harness.receive(open_message(1, [1] * 100))
        harness.receive(open_message(2, [1] * 100))
        failed, _ = harness.take()
        assert isinstance(failed, Failed)
        assert (failed.code, failed.is_retryable) == (ErrorCode.RESOURCE_EXHAUSTED, True)

    def test_when_slots_run_out_the_newest_parks_and_is_taken_up_again(self) -> None:
        harness = Harness(TableModel(seed=13, num_slots=220))
        texts = {}
        for session in (1, 2):
            opened = open_message(session, [session] * 20)
            harness.receive(opened)
            texts[session] = continuation(harness.model, opened, opened.tokens, 120)
        parked = False
        for start in range(0, 120, 3):
            for session in (1, 2):
                harness.receive(commit_message(session, 20 + start, texts[session][start : start + 3]))
            harness.run()
            parked = parked or harness.session(2).is_parked
            assert not harness.session(1).is_parked
        assert parked
        assert any(e.session == 2 and e.is_exhausted for e in harness.take_extensions())
        harness.receive(close_message(1))
        harness.take()
        harness.run()
        assert not harness.session(2).is_parked
        assert harness.take_extensions()


class TestFaults:
    def test_nan_fails_its_session_only_and_its_slots_are_cleared(self) -> None:
        harness = Harness(TableModel(seed=14, num_slots=300))
        opened = open_message(1)
        harness.model.poison([*PROMPT, *continuation(harness.model, opened, PROMPT, 2)])
        harness.receive(opened)
        harness.receive(open_message(2, (4, 5, 6)))
        harness.run()
        messages = harness.take()
        failures = [m for m in messages if isinstance(m, Failed)]
        assert [(f.session, f.code, f.is_retryable) for f in failures] == [(1, ErrorCode.INTERNAL, False)]
        assert "NaN" in failures[0].message
        assert harness.session(2).tree.num_nodes > 0
        harness.receive(open_message(3, (7, 8)))  # takes the slots of session 1: the model refuses uncleared ones
        harness.run()
        assert harness.session(3).tree.num_nodes > 0

    def test_a_fault_of_ours_ends_its_session_and_no_other(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        rank = Chooser.rank

        def fail(chooser: Chooser, logits: Any, position: int, count: int) -> list[tuple[int, float]]:
            if chooser._params.seed == 13:
                raise IndexError("out of bounds")
            return rank(chooser, logits, position, count)

        monkeypatch.setattr(Chooser, "rank", fail)
        harness = Harness(TableModel(seed=14, num_slots=300))
        harness.receive(open_message(1, seed=13))
        harness.receive(open_message(2, (4, 5, 6)))
        harness.run()
        failures = [m for m in harness.take() if isinstance(m, Failed)]
        assert [(f.session, f.code, f.is_retryable) for f in failures] == [(1, ErrorCode.INTERNAL, False)]
        assert harness.session(2).tree.num_nodes > 0
        assert "out of bounds" in caplog.text

    def test_heartbeat_tells_the_running_step(self) -> None:
        harness = Harness(TableModel(seed=14))
        seen = []
        forward = harness.model.forward

        def watched(batch):
            seen.append(harness.loop.heartbeat())
            return forward(batch)

        harness.model.forward = watched  # type: ignore[method-assign]
        harness.receive(open_message())
        harness.step()
        assert (seen[0].step, seen[0].num_sessions) == (1, 1)
        assert seen[0].step_running_ms > 0
        assert harness.loop.heartbeat().step_running_ms == 0


def _token_outside_the_tree(harness: Harness, path: list[int]) -> int:
    node = harness.session(1).tree.find(path)
    return next(token for token in range(32) if token not in node.children)
