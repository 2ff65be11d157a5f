"""Drafting that moves to another worker while the answer streams: from the tokens held, and at no cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinator_world import PROMPT, World, a_commit, a_request, started

from coordinator.draft_side import MAX_RETRY_MS, MAX_TAKEOVER_MS, STAY_MS
from coordinator.events import Cause, Joined, Kind
from specpipe.errors import ErrorCode
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
    SpeculationParams,
)


def drafting() -> tuple[World, int, int]:
    """A request that streams and is drafted, and its sessions."""
    world = started()
    target, draft = world.session(Kind.TARGET), world.session(Kind.DRAFT)
    assert target is not None
    assert draft is not None
    world.hear(Kind.TARGET, a_commit(3, [10, 11], session=target))
    world.extend(draft, (12,))
    return world, target, draft


def moving(cause: Cause = Cause.DRAINS) -> tuple[World, int, int, int]:
    world, target, draft = drafting()
    world.move(cause)
    assert world.successor is not None
    return world, target, draft, world.successor


@pytest.mark.parametrize("cause", [Cause.DRAINS, Cause.LEAVES, Cause.LOAD])
def test_drafting_moves_from_the_tokens_held_and_the_first_worker_drafts_until_the_other_does(cause: Cause) -> None:
    world, target, draft, successor = moving(cause)
    assert world.all(Open)[-1].tokens == (*PROMPT, 10, 11)
    world.hear(Kind.TARGET, a_commit(5, [12], session=target, round_=2))
    assert [message.session for message in world.all(Commit)[-2:]] == [draft, successor], "both hear it"
    world.extend(draft, (13,))
    assert world.sent[-1].tokens == (13,)
    world.extend(successor, (14,))
    closed, relayed = world.sent[-2:]
    assert closed == Close(session=draft, reason="another draft worker has taken over")
    assert (relayed.session, relayed.tokens) == (target, (14,))
    assert world.machine.draft is not None
    assert world.machine.draft.session == successor
    num_sent = len(world.sent)
    world.hear(Kind.DRAFT, Extension(session=draft, base=6, parents=(0,), tokens=(9,), confidences=(1.0,)))
    assert len(world.sent) == num_sent, "the first one is not heard any more"
    assert not any(extension.is_exhausted for extension in world.all(Extension)), (
        "there was a draft worker all the time"
    )
    world.hear(Kind.TARGET, a_commit(6, [13], session=target, round_=3, finish=FinishReason.LENGTH))
    assert world.tokens == [10, 11, 12, 13]
    assert world.sessions == {}


def test_a_silent_worker_is_closed_at_once_and_the_target_waits_for_nothing() -> None:
    world, target, draft = drafting()
    world.extend(draft)
    world.move(Cause.SILENT)
    closed, told, opened = world.sent[-3:]
    assert isinstance(closed, Close)
    assert closed.session == draft
    assert (told.session, told.is_exhausted) == (target, True)
    assert isinstance(opened, Open)
    assert world.session(Kind.DRAFT) == opened.session


def test_a_successor_takes_the_place_of_a_worker_that_is_lost_meanwhile() -> None:
    world, target, _, successor = moving()
    world.lose(Kind.DRAFT)
    assert len(world.all(Open)) == 3, "it is open already"
    assert world.sent[-1].is_exhausted, "until it drafts the target need not wait"
    assert world.machine.draft is not None
    assert world.machine.draft.session == successor
    world.extend(successor)
    assert world.sent[-1].session == target


@pytest.mark.parametrize("end", ["lost", "refused", "failed", "closed", "lies", "slow"])
def test_a_successor_that_comes_to_nothing_costs_nothing(end: str) -> None:
    world, _, draft, successor = moving()
    failure = Failed(session=successor, code=ErrorCode.INTERNAL, message="oops", is_retryable=False)
    match end:
        case "lost":
            world.lose_session(successor)
        case "refused":
            world.hear(Kind.DRAFT, replace(failure, code=ErrorCode.UNAVAILABLE, is_retryable=True))
        case "failed":
            world.hear(Kind.DRAFT, failure)
        case "closed":
            world.hear(Kind.DRAFT, Closed(session=successor, length=5))
        case "lies":
            world.hear(Kind.DRAFT, NeedTokens(session=successor, have=50))
        case "slow":
            world.tick(MAX_TAKEOVER_MS - 1)
            assert world.machine.latest_draft != world.machine.draft
            world.tick(1)
    world.sessions.pop(successor, None)
    assert world.machine.latest_draft == world.machine.draft
    assert world.machine.draft is not None
    assert world.machine.draft.session == draft
    assert not any(extension.is_exhausted for extension in world.all(Extension))
    world.extend(draft, (12,))
    assert world.sent[-1].tokens == (12,)
    world.move()
    assert world.successor is None, "not at once again"
    world.tick(MAX_RETRY_MS)
    world.move()
    assert world.successor is not None


def test_a_successor_that_can_draft_nothing_does_not_take_over_and_is_not_relayed() -> None:
    world, _, draft, successor = moving()
    num_sent = len(world.sent)
    world.extend(successor, ())
    assert len(world.sent) == num_sent
    assert world.machine.draft is not None
    assert world.machine.draft.session == draft


def test_the_target_may_move_while_drafting_does() -> None:
    world, _, draft, successor = moving()
    world.lose(Kind.TARGET)
    world.tick()
    target = world.session(Kind.TARGET)
    assert target is not None
    world.extend(successor, (12,))
    assert (world.sent[-1].session, draft in world.sessions) == (target, False)


def test_for_balance_drafting_moves_when_it_streams_and_is_drafted_and_not_soon_again() -> None:
    world = started()
    target, draft = world.session(Kind.TARGET), world.session(Kind.DRAFT)
    assert target is not None
    assert draft is not None
    assert world.machine.may_move_draft(Cause.DRAINS, 0.0), "its worker ends: the sooner the better"
    world.extend(draft)
    assert not world.machine.may_move_draft(Cause.LOAD, 0.0), "it has not committed"
    world.hear(Kind.TARGET, a_commit(3, [10], session=target))
    assert world.machine.may_move_draft(Cause.LOAD, 0.0)
    world.move(Cause.LOAD)
    assert not world.machine.may_move_draft(Cause.DRAINS, 0.0), "it moves already"
    assert world.successor is not None
    world.extend(world.successor)
    assert world.machine.may_move_draft(Cause.SILENT, 0.0)
    assert not world.machine.may_move_draft(Cause.LOAD, STAY_MS - 1)
    assert world.machine.may_move_draft(Cause.LOAD, STAY_MS)


@pytest.mark.parametrize("speculation", [SpeculationParams(mode=Mode.OFF, drafter="none"), SpeculationParams()])
def test_what_is_not_drafted_does_not_move(speculation: SpeculationParams) -> None:
    world = started(a_request(speculation=speculation), has={Kind.TARGET: True, Kind.DRAFT: False})
    assert not any(world.machine.may_move_draft(cause, 1e9) for cause in Cause)


def test_a_request_opened_without_a_draft_worker_is_drafted_when_one_joins_whatever_others_refused() -> None:
    world = started(has={Kind.TARGET: True, Kind.DRAFT: False})
    target = world.session(Kind.TARGET)
    assert target is not None
    world.hear(Kind.TARGET, a_commit(3, [10], session=target))
    assert [type(message) for message in world.sent] == [Open, Extension, Extension], "nothing will come"
    world.has[Kind.DRAFT] = True
    world.do(Joined())
    world.tick(1)
    assert world.all(Open)[-1].tokens == (*PROMPT, 10)
    draft = world.session(Kind.DRAFT)
    assert draft is not None
    world.hear(Kind.DRAFT, Closed(session=draft, length=4))
    del world.sessions[draft]
    world.tick(MAX_RETRY_MS / 2)
    assert world.session(Kind.DRAFT) is None, "that worker is of no use"
    world.do(Joined())
    world.tick(1)
    assert world.session(Kind.DRAFT) not in (None, draft)


def test_steps_of_both_workers_count_and_are_told_apart_while_drafting_moves() -> None:
    world, target, draft, successor = moving()
    numbers = []
    for session, share_ms in ((draft, 2.0), (successor, 3.0)):
        world.extend(session, (12,), draft_step=5, draft_step_ms=9.0, draft_share_ms=share_ms)
        numbers.append(world.all(Extension)[-1].draft_step)
    assert numbers == [1, 2]
    last = a_commit(5, [12], session=target, round_=2, finish=FinishReason.LENGTH)
    world.hear(Kind.TARGET, replace(last, verified_draft_steps=(2,)))
    speculation = world.finished.speculation
    assert (speculation.draft_ms, speculation.wasted_draft_ms) == (5.0, 2.0)
