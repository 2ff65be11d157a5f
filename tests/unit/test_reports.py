"""What workers report of their steps is what they did: every round, every draft step, and what befell a session.

Much is asserted as messages come, by `report_books`, in every test whose Open wants reports.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from draft_harness import Harness, close_message, commit_message, continuation, open_message
from pair_simulator import PairSimulator
from report_books import DraftBook
from target_simulator import Simulator, chain, create_open, self_drafter, wrong_drafter

from specpipe.reports import Outcome, Report, SessionEventKind, StepKind
from specpipe.testing import TableModel
from specpipe.types import Close, Closed, Commit, Failed, FinishReason, Mode, NeedTokens


@pytest.fixture
def table() -> TableModel:
    return TableModel(vocab_size=24, num_slots=512, seed=3)


# The target worker


def test_a_prompt_in_chunks_is_prefill_records_and_the_first_round(table: TableModel) -> None:
    sim = Simulator(table, max_batch_tokens=16)
    answer = sim.open(create_open(1, [i % 24 for i in range(70)], max_tokens=3, mode=Mode.OFF, wants_reports=True))
    sim.run()
    kinds = [step.kind for step in answer.book.steps]
    assert kinds == [StepKind.PREFILL] * 4 + [StepKind.VERIFY] * 3
    assert sum(step.num_rows for step in answer.book.steps) == 70 + 2
    assert [step.base for step in answer.book.steps] == [70] * 5 + [71, 72]
    assert [step.outcome for step in answer.book.rounds] == [Outcome.NONE] * 3
    assert answer.book.steps[0].since_open_ms == 0.0
    assert len(answer.book.reports) >= 7, "a chunk is told when it is computed, not when the prompt is"


def test_hits_misses_and_lookups_are_told_apart(table: TableModel) -> None:
    outcomes = {}
    for name, drafter in {"right": self_drafter(table, 4), "wrong": wrong_drafter(table, 2), "none": None}.items():
        sim = Simulator(table, drafter=drafter, delay_ms=lambda: 1.0)
        mode = Mode.SYNC if drafter is not None else Mode.PIPELINED
        answer = sim.open(create_open(1, [1, 2] * 6, max_tokens=40, mode=mode, wants_reports=True))
        sim.run()
        outcomes[name] = {step.outcome for step in answer.book.rounds[1:-1]}  # the last has nothing left to verify
        assert answer.book.rounds[0].outcome is Outcome.NONE
    assert outcomes["right"] == outcomes["wrong"] == {Outcome.HIT}
    assert outcomes["none"] == {Outcome.MISS, Outcome.LOOKUP}


def test_a_wait_is_exposed_time_of_the_round_that_follows_and_no_queue_time(table: TableModel) -> None:
    sim = Simulator(table, drafter=self_drafter(table, 4), delay_ms=lambda: 7.0)
    answer = sim.open(create_open(1, max_tokens=30, mode=Mode.SYNC, wants_reports=True))
    sim.run()
    waited = [step for step in answer.book.rounds if step.exposed_ms > 0.0]
    assert len(waited) >= 5
    assert all(step.exposed_ms == pytest.approx(7.0) for step in waited)
    assert all(step.queue_ms == pytest.approx(0.0, abs=1e-6) for step in waited)
    assert all(step.draft_steps == (1,) for step in waited)


def test_a_session_that_others_keep_from_its_step_is_queued(table: TableModel) -> None:
    sim = Simulator(table, max_batch_tokens=1, base_ms=10.0)
    answers = [sim.open(create_open(i, [i], max_tokens=4, mode=Mode.OFF, wants_reports=True)) for i in (1, 2)]
    sim.run()
    for answer in answers:
        assert [step.queue_ms for step in answer.book.rounds[1:]] == pytest.approx([10.0] * 3)
    assert answers[1].book.rounds[0].queue_ms == pytest.approx(10.0)


def test_what_came_during_a_step_has_been_open_since_it_came(table: TableModel) -> None:
    sim = Simulator(table)
    opened = replace(create_open(1, max_tokens=2, mode=Mode.OFF, wants_reports=True), arrived_s=sim.clock.now - 0.004)
    answer = sim.open(opened)
    sim.run()
    [first, _] = answer.book.rounds
    assert first.since_open_ms == pytest.approx(4.0)
    assert first.queue_ms == pytest.approx(4.0)
    assert answer.book.reports[0].since_open_ms == pytest.approx(14.0)


def test_a_pause_is_not_queue_time(table: TableModel) -> None:
    sim = Simulator(table)
    answer = sim.open(create_open(1, max_tokens=6, mode=Mode.OFF, wants_reports=True))
    sim.at(25.0, lambda: sim.loop.link_paused(1, True))
    sim.at(500.0, lambda: sim.loop.link_paused(1, False))
    sim.run()
    rounds = answer.book.rounds
    assert len(rounds) == 6
    assert max(step.since_open_ms for step in rounds) > 500.0
    assert max(step.queue_ms for step in rounds) == pytest.approx(0.0, abs=1e-6)


def test_a_preempted_session_says_so() -> None:
    table = TableModel(vocab_size=24, num_slots=100, seed=3)
    sim = Simulator(table, drafter=self_drafter(table, 4))
    opens = [create_open(i, [i], max_tokens=90, temperature=0.9, wants_reports=i > 1) for i in range(1, 4)]
    answers = [sim.open(opened) for opened in opens]
    sim.run()
    told = [answer.book.count(SessionEventKind.PREEMPTED) for answer in answers]
    assert told[0] == 0
    assert sum(told) == sim.loop._room.num_preempted > 0


def test_a_resync_is_an_event_and_no_round(table: TableModel) -> None:
    sim = Simulator(table, auto_close=False)
    answer = sim.open(create_open(1, max_tokens=5, mode=Mode.OFF, wants_reports=True))
    sim.run()
    assert len(answer.tokens) == 8
    del sim.answers[1]
    sim.loop.receive(1, NeedTokens(session=1, have=4))
    report, commit = sim.orphans
    assert isinstance(report, Report)
    assert isinstance(commit, Commit)
    assert [(event.kind, event.base) for event in report.events] == [(SessionEventKind.RESYNC, 8)]
    assert report.steps == ()
    assert commit.round == 0


def test_what_was_done_before_a_session_ends_is_told_before_its_last_message(table: TableModel) -> None:
    sim = Simulator(table, max_batch_tokens=16)
    answer = sim.open(create_open(1, [i % 24 for i in range(70)], max_tokens=3, mode=Mode.OFF, wants_reports=True))
    sim.loop.run_once()
    sim.loop.run_once()
    assert len(answer.book.steps) == 1
    sim.loop.receive(1, Close(session=1))
    assert [step.kind for step in answer.book.steps] == [StepKind.PREFILL] * 2
    assert isinstance(answer.closed, Closed)


def test_of_a_session_that_fails_all_but_the_step_that_failed_is_told(table: TableModel) -> None:
    prompt = [i % 24 for i in range(20)]
    table.poison(prompt)
    sim = Simulator(table, max_batch_tokens=16)
    answer = sim.open(create_open(1, prompt, max_tokens=3, mode=Mode.OFF, wants_reports=True))
    sim.run()
    assert isinstance(answer.failed, Failed)
    assert [step.kind for step in answer.book.steps] == [StepKind.PREFILL]


def test_a_lost_link_hears_nothing_more(table: TableModel) -> None:
    sim = Simulator(table)
    answer = sim.open(create_open(1, max_tokens=9, mode=Mode.OFF, wants_reports=True))
    sim.loop.run_once()
    sim.loop.link_lost(1)
    sim.run()
    assert answer.book.reports == []


def test_nobody_asks_and_nothing_is_reported(table: TableModel) -> None:
    pair = PairSimulator(table, TableModel.like(table, 0.8))
    answer = pair.open(create_open(1, max_tokens=40))
    pair.run()
    assert answer.book.reports == []
    assert pair.draft_books[1].reports == []


def test_a_late_and_a_stale_extension_are_counted_in_the_next_round(table: TableModel) -> None:
    sim = Simulator(table)
    answer = sim.open(create_open(1, [1, 2, 3], max_tokens=6, wants_reports=True))
    sim.loop.run_once()
    sim.loop.run_once()
    tokens = answer.tokens
    assert len(tokens) > 3
    sim.loop.receive(1, chain(1, 3, [*tokens[3:], 5, 6]))
    sim.loop.receive(1, chain(1, 3, [(tokens[3] + 1) % 24]))
    sim.run()
    assert sum(step.num_late + step.num_stale for step in answer.book.rounds) == 2


def test_a_report_to_a_worker_says_nothing_to_it(table: TableModel) -> None:
    sim = Simulator(table)
    answer = sim.open(create_open(1, max_tokens=9, mode=Mode.OFF, wants_reports=True))
    sim.post(Report(session=1), after_ms=5.0)
    sim.run()
    assert len(answer.new_tokens) == 9
    harness, book = drafting(TableModel(seed=5, num_slots=400), [1, 2, 3])
    harness.receive(Report(session=1))
    harness.run()
    read(harness, book)
    assert book.steps


# The draft worker


@pytest.mark.parametrize("mode", [Mode.PIPELINED, Mode.SYNC])
def test_what_was_verified_was_drafted_in_steps_that_were_told(table: TableModel, mode: Mode) -> None:
    pair = PairSimulator(table, TableModel.like(table, 0.8))
    answer = pair.open(create_open(1, max_tokens=60, mode=mode, wants_reports=True))
    pair.run()
    drafted = {step.step for step in pair.draft_books[1].steps if step.kind is StepKind.DRAFT}
    verified = {step for record in answer.book.rounds for step in record.draft_steps}
    assert verified
    assert verified <= drafted


def test_the_steps_of_both_workers_overlap_when_pipelined(table: TableModel) -> None:
    """Both were opened at the same moment, so their times have one origin here."""
    pair = PairSimulator(table, TableModel.like(table, 0.9), hop_ms=0.5)
    answer = pair.open(create_open(1, max_tokens=60, wants_reports=True))
    pair.run()
    rounds = [(step.since_open_ms, step.since_open_ms + step.forward_ms) for step in answer.book.rounds]
    drafts = [step.since_open_ms for step in pair.draft_books[1].steps]
    overlapping = [start for start in drafts if any(begin <= start < end for begin, end in rounds)]
    assert len(overlapping) > 0.8 * len(drafts)


def test_a_long_prompt_is_prefill_records_then_drafts() -> None:
    harness, book = drafting(TableModel(seed=5, num_slots=400), [i % 7 for i in range(100)], max_batch_tokens=40)
    harness.run()
    read(harness, book)
    kinds = [step.kind for step in book.steps]
    assert kinds[:2] == [StepKind.PREFILL] * 2
    assert set(kinds[2:]) == {StepKind.DRAFT}
    assert [step.num_rows for step in book.steps[:3]] == [40, 40, 20]
    assert [step.share_ms for step in book.steps[:2]] == [0.0, 0.0]
    assert all(0.0 < step.share_ms <= step.forward_ms for step in book.steps[2:])
    assert [step.num_tree_nodes for step in book.steps[2:]] == sorted(step.num_tree_nodes for step in book.steps[2:])


def test_a_commit_out_of_the_tree_is_a_restart_and_one_along_it_is_none() -> None:
    model = TableModel(vocab_size=8, seed=5, num_slots=400)
    harness, book = drafting(model, [1, 2, 3])
    harness.run()
    path = list(harness.session(1).tree.root.children)[:1]
    harness.receive(commit_message(1, 3, path))
    harness.run()
    read(harness, book)
    assert book.count(SessionEventKind.RESTARTED) == 0
    absent = next(token for token in range(8) if token not in harness.session(1).tree.root.children)
    harness.receive(commit_message(1, 4, [absent]))
    harness.run()
    read(harness, book)
    [event] = book.events
    assert (event.kind, event.base) == (SessionEventKind.RESTARTED, 5)


def test_lost_commits_and_lost_extensions_are_resyncs() -> None:
    harness, book = drafting(TableModel(seed=5, num_slots=400), [1, 2, 3])
    harness.receive(commit_message(1, 5, [4]))
    harness.receive(NeedTokens(session=1, have=3))
    harness.run()
    messages = harness.take()
    assert NeedTokens(session=1, have=3) in messages
    for message in messages:
        book.take(message)
    assert book.count(SessionEventKind.RESYNC) == 2


def test_the_end_of_the_context_is_told_once() -> None:
    harness, book = drafting(TableModel(vocab_size=8, seed=5, num_slots=400, max_context=12), [1, 2, 3])
    for base in range(3, 20):
        harness.run()
        harness.receive(commit_message(1, base, [base % 8]))
    harness.run()
    read(harness, book)
    [event] = [event for event in book.events if event.kind is SessionEventKind.EXHAUSTED]
    assert event.base == 13


def test_a_text_that_the_draft_cannot_read_is_exhausted_from_the_start() -> None:
    harness, book = drafting(TableModel(vocab_size=8, seed=5, num_slots=400), [1, 2, 30])
    harness.run()
    read(harness, book)
    assert [event.kind for event in book.events] == [SessionEventKind.EXHAUSTED]
    assert book.steps == []


def test_a_session_that_parks_says_so_and_one_that_is_complete_is_not_exhausted() -> None:
    harness = Harness(TableModel(seed=13, num_slots=220))
    books, texts = {}, {}
    for session in (1, 2):
        opened = open_message(session, [session] * 20, wants_reports=True)
        harness.receive(opened)
        books[session] = DraftBook(opened)
        texts[session] = continuation(harness.model, opened, opened.tokens, 120)
    for start in range(0, 120, 3):
        for session in (1, 2):
            finish = FinishReason.LENGTH if start == 117 else None
            harness.receive(commit_message(session, 20 + start, texts[session][start : start + 3], finish=finish))
        harness.run()
    for message in harness.take():
        books[message.session].take(message)
    assert books[1].count(SessionEventKind.PREEMPTED) == 0
    assert books[2].count(SessionEventKind.PREEMPTED) >= 1
    for book in books.values():
        assert book.count(SessionEventKind.EXHAUSTED) == 0


def test_what_was_drafted_before_a_session_ends_is_told_before_its_last_message() -> None:
    harness, _ = drafting(TableModel(seed=5, num_slots=400), [1, 2, 3])
    harness.step()
    absent = next(token for token in range(32) if token not in harness.session(1).tree.root.children)
    harness.receive(commit_message(1, 3, [absent]))
    harness.receive(close_message(1))
    *_, report, closed = harness.take()
    assert isinstance(report, Report)
    assert isinstance(closed, Closed)
    assert [event.kind for event in report.events] == [SessionEventKind.RESTARTED]


def drafting(model: TableModel, tokens: list[int], **options: int) -> tuple[Harness, DraftBook]:
    """A draft worker with one session that is to report."""
    harness = Harness(model, **options)  # type: ignore[arg-type]
    opened = open_message(1, tokens, wants_reports=True)
    harness.receive(opened)
    return harness, DraftBook(opened)


def read(harness: Harness, book: DraftBook) -> None:
    for message in harness.take():
        book.take(message)
