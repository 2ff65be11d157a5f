"""Pending messages: nothing final is lost, what is pending is bounded by sessions, order within a session holds."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpipe.errors import ErrorCode
from specpipe.link import (
    MAX_BATCH_COST,
    MAX_PENDING_COMMITS,
    MAX_PENDING_EXTENSIONS,
    RECORD_COST,
    Arrival,
    Inbox,
    Outbox,
    messages_of,
    union,
)
from specpipe.reports import MAX_REPORT_RECORDS, Report, SessionEvent, SessionEventKind, StepKind, StepRecord
from specpipe.types import (
    Batch,
    Close,
    Closed,
    Commit,
    Extension,
    Failed,
    FinishReason,
    Heartbeat,
    NeedTokens,
    Open,
    Origin,
    RoundStats,
    SamplingParams,
    SpeculationParams,
    StopRules,
)


def an_open(session, tokens=(1,)):
    return Open(
        session=session,
        request_id="r",
        tokens=tuple(tokens),
        num_prompt_tokens=1,
        sampling=SamplingParams(),
        stops=StopRules(max_length=9),
        speculation=SpeculationParams(),
    )


def an_extension(session, base=1):
    return Extension(session=session, base=base, parents=(0,), tokens=(5,), confidences=(0.5,))


def a_commit(session, base, tokens, *, number=1, finish_reason=None, **stats):
    return Commit(
        session=session,
        round=number,
        base=base,
        tokens=tuple(tokens),
        origins=(Origin.PLAIN,) * len(tokens),
        finish_reason=finish_reason,
        stats=RoundStats(**stats),
    )


def a_failure(session):
    return Failed(session=session, code=ErrorCode.INTERNAL, message="m")


def a_report(session, steps=(), *, num_events=0, num_lost=0):
    event = SessionEvent(kind=SessionEventKind.RESYNC, since_open_ms=1.0)
    return Report(
        session=session,
        since_open_ms=float(sum(steps)),
        steps=tuple(StepRecord(kind=StepKind.VERIFY, step=step) for step in steps),
        events=(event,) * num_events,
        num_lost=num_lost,
    )


def taken(outbox):
    batches = []
    while (batch := outbox.take()) is not None:
        batches.append(batch)
    return batches


def test_commits_of_a_session_become_one():
    outbox = Outbox()
    first = a_commit(1, 3, (10, 11), number=1, num_rounds=1, step_ms=2.0)
    second = a_commit(1, 5, (12,), number=2, num_rounds=1, step_ms=3.0, finish_reason=FinishReason.STOP)
    outbox.put(first)
    outbox.put(second)
    outbox.put(a_commit(2, 9, (1,)))
    [batch] = taken(outbox)
    assert batch.commits == (first.merged_with(second), a_commit(2, 9, (1,)))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.data())
def test_no_committed_token_and_no_statistic_is_lost(lengths, data):
    outbox, received, base = Outbox(), [], 5
    for number, length in enumerate(lengths, start=1):
        is_last = number == len(lengths)
        outbox.put(
            a_commit(
                1,
                base,
                range(base, base + length),
                number=number,
                num_rounds=1,
                finish_reason=FinishReason.LENGTH if is_last else None,
            )
        )
        base += length
        if data.draw(st.booleans()):
            received += taken(outbox)
    received += taken(outbox)
    commits = [commit for batch in received for commit in batch.commits]
    assert [token for commit in commits for token in commit.tokens] == list(range(5, base))
    assert sum((commit.stats for commit in commits), RoundStats()).num_rounds == len(lengths)
    assert [commit.finish_reason for commit in commits] == [None] * (len(commits) - 1) + [FinishReason.LENGTH]
    assert [batch.sequence for batch in received] == list(range(1, len(received) + 1))


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400), st.integers(0, 3)), min_size=1, max_size=8))
def test_reports_of_a_session_become_one_with_its_newest_records_and_a_count_of_the_others(sizes):
    outbox, steps, num_all = Outbox(), [], 0
    for num_steps, num_events, num_lost in sizes:
        new = range(len(steps), len(steps) + num_steps)
        steps += new
        num_all += num_steps + num_events + num_lost
        outbox.put(a_report(1, new, num_events=num_events, num_lost=num_lost))
    [batch] = taken(outbox)
    [report] = batch.reports
    assert [record.step for record in report.steps] == steps[-MAX_REPORT_RECORDS:]
    assert len(report.events) <= MAX_REPORT_RECORDS
    assert len(report.steps) + len(report.events) + report.num_lost == num_all
    assert report.since_open_ms == float(sum(new)), "when the last of them was said"


def test_a_report_comes_before_what_its_steps_led_to_whenever_it_is_put():
    outbox = Outbox()
    for message in (an_extension(1), a_commit(1, 3, (5,)), a_report(1, [1]), Closed(session=1, length=4)):
        outbox.put(message)
    outbox.put(a_report(1, [2]))
    [batch] = taken(outbox)
    assert [type(message) for message in messages_of(batch)] == [Report, Extension, Commit, Closed]
    assert outbox.num_dropped_messages == 1, "nothing joins a pending Closed"


def test_records_count_in_what_a_batch_may_hold():
    outbox = Outbox()
    num_sessions = 2 * MAX_BATCH_COST // (RECORD_COST * MAX_REPORT_RECORDS)
    for session in range(num_sessions):
        outbox.put(a_report(session, range(MAX_REPORT_RECORDS)))
    batches = taken(outbox)
    assert len(batches) > 1
    assert [report.session for batch in batches for report in batch.reports] == list(range(num_sessions))


TEXT = tuple(range(100, 140))


@given(st.tuples(st.integers(0, 39), st.integers(0, 39)), st.tuples(st.integers(0, 39), st.integers(0, 39)))
def test_union_says_what_both_commits_say(one, two):
    (a, b), (c, d) = sorted(one), sorted(two)
    first, second = a_commit(1, a, TEXT[a:b], num_rounds=1), a_commit(1, c, TEXT[c:d], number=2, num_rounds=1)
    merged = union(first, second)
    if max(a, c) > min(b, d):
        assert merged is None  # a hole between them
    else:
        assert merged is not None
        assert merged.base == min(a, c)
        assert merged.tokens == TEXT[min(a, c) : max(b, d)]
        assert len(merged.origins) == len(merged.tokens)
        assert merged.stats.num_rounds == 2
        assert merged.round == 2


def test_commits_that_contradict_or_run_past_an_end_stay_apart():
    assert union(a_commit(1, 3, (10, 11)), a_commit(1, 4, (99, 12))) is None
    ended = a_commit(1, 3, (10, 11), finish_reason=FinishReason.STOP)
    assert union(ended, a_commit(1, 5, (12,))) is None
    again = union(ended, a_commit(1, 4, (11,), number=0, finish_reason=FinishReason.STOP))
    assert again is not None
    assert again.finish_reason is FinishReason.STOP


def test_commits_with_holes_are_bounded():
    outbox = Outbox()
    for number in range(100):
        outbox.put(a_commit(1, 10 * number, (1,)))
    [batch] = taken(outbox)
    assert [commit.base for commit in batch.commits] == [10 * n for n in range(100 - MAX_PENDING_COMMITS, 100)]
    assert outbox.num_dropped_messages == 100 - MAX_PENDING_COMMITS


def test_a_flood_of_extensions_keeps_the_newest_of_each_session_and_counts_the_rest():
    outbox = Outbox()
    for base in range(10_000):
        outbox.put(an_extension(1, base))
    outbox.put(an_extension(2, 7))
    [batch] = taken(outbox)
    bases = [extension.base for extension in batch.extensions if extension.session == 1]
    assert bases == list(range(10_000 - MAX_PENDING_EXTENSIONS, 10_000))
    assert [extension.base for extension in batch.extensions if extension.session == 2] == [7]
    assert outbox.num_dropped_extensions == 10_000 - MAX_PENDING_EXTENSIONS


def test_a_close_removes_what_is_pending_for_its_session_only():
    outbox = Outbox()
    for session in (1, 2):
        outbox.put(an_open(session))
        outbox.put(a_commit(session, 1, (3,)))
        outbox.put(an_extension(session))
    outbox.put(Close(session=1))
    outbox.put(an_extension(1))
    [batch] = taken(outbox)
    assert list(messages_of(batch)) == [an_open(2), an_extension(2), a_commit(2, 1, (3,)), Close(session=1)]


def test_nothing_follows_closed():
    outbox = Outbox()
    outbox.put(a_commit(1, 1, (3,)))
    outbox.put(a_failure(1))
    outbox.put(Closed(session=1, length=2))
    outbox.put(a_commit(1, 2, (4,)))
    outbox.put(a_failure(1))
    [batch] = taken(outbox)
    assert list(messages_of(batch)) == [a_commit(1, 1, (3,)), a_failure(1), Closed(session=1, length=2)]


def test_a_duplicate_open_is_seen_by_the_receiver_but_not_more_than_once():
    outbox = Outbox()
    for _ in range(5):
        outbox.put(an_open(1))
    [batch] = taken(outbox)
    assert len(batch.opens) == 2


def test_only_the_newest_request_for_tokens_and_heartbeat_go():
    outbox = Outbox()
    for have in (3, 4, 5):
        outbox.put(NeedTokens(session=1, have=have))
        outbox.put_heartbeat(Heartbeat(step=have))
    [batch] = taken(outbox)
    assert batch == Batch(sequence=1, need_tokens=(NeedTokens(session=1, have=5),), heartbeat=Heartbeat(step=5))


def test_a_heartbeat_alone_is_a_batch_and_nothing_is_none():
    outbox = Outbox()
    assert outbox.take() is None
    outbox.put_heartbeat(Heartbeat())
    assert outbox.take() == Batch(sequence=1, heartbeat=Heartbeat())
    assert outbox.take() is None


def test_batches_are_bounded_by_their_tokens_and_a_session_is_never_split():
    outbox = Outbox()
    for session in range(5):
        outbox.put(an_open(session, range(MAX_BATCH_COST // 2 - 10)))
        outbox.put(Closed(session=session, length=1))
    outbox.put(an_open(9, range(3 * MAX_BATCH_COST)))
    batches = taken(outbox)
    assert [[message.session for message in batch.opens] for batch in batches] == [[0, 1], [2, 3], [4], [9]]
    assert all(
        [m.session for m in batch.closed] == [m.session for m in batch.opens if m.session != 9] for batch in batches
    )


def test_a_receiver_is_woken_once_until_it_has_found_nothing():
    outbox = Outbox()
    assert outbox.put(an_open(1)) is True
    assert outbox.put(an_open(2)) is False
    assert outbox.put_heartbeat(Heartbeat()) is False
    assert outbox.take() is not None
    assert outbox.put(an_open(3)) is False  # the receiver is still looking
    assert outbox.take() is not None
    assert outbox.take() is None
    assert outbox.put(an_open(4)) is True


def test_two_threads_lose_nothing():
    outbox = Outbox()
    tokens = []

    def produce():
        for position in range(3000):
            outbox.put(a_commit(1, position, (position,)))

    producer = threading.Thread(target=produce)
    producer.start()
    while producer.is_alive():
        tokens += [token for batch in taken(outbox) for commit in batch.commits for token in commit.tokens]
    producer.join()
    tokens += [token for batch in taken(outbox) for commit in batch.commits for token in commit.tokens]
    assert tokens == list(range(3000))


@pytest.mark.parametrize(
    ("sequences", "arrivals"),
    [
        ([1, 2, 3], ["in order"] * 3),
        ([1, 3, 4], ["in order", "after a hole", "in order"]),
        ([2], ["after a hole"]),
        ([1, 3, 2, 2, 4], ["in order", "after a hole", "late", "duplicate", "in order"]),
        ([1, 1], ["in order", "duplicate"]),
        ([0], ["duplicate"]),
    ],
)
def test_arrivals(sequences, arrivals):
    inbox = Inbox()
    assert [inbox.arrival(sequence).value for sequence in sequences] == arrivals


def test_a_hole_is_reported_once():
    inbox = Inbox()
    holes = [inbox.accept(Batch(sequence=sequence)) for sequence in (1, 2, 5, 6)]
    assert holes == [False, False, True, False]
    assert inbox.num_holes == 1


def test_a_huge_jump_in_the_sequence_costs_no_memory():
    inbox = Inbox()
    assert inbox.arrival(2**64 - 1) is Arrival.AFTER_HOLE
    assert len(inbox._missing) < 10_000


def test_of_many_requests_for_tokens_in_a_batch_the_last_of_each_session_counts():
    """Each is answered with a text: a peer that floods must not be worth a thousand of them."""
    needs = tuple(NeedTokens(session=number % 3, have=number) for number in range(1000))
    heard = list(messages_of(Batch(sequence=1, need_tokens=needs)))
    assert sorted((need.session, need.have) for need in heard) == [(0, 999), (1, 997), (2, 998)]
