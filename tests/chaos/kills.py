"""One answer, alone, in whose middle somebody who works on it is killed: others must go on with it.

Owns: who is killed, and when; that the answer is whole. Must not know: how long that took. No client's second try hides
what a coordinator must do by itself: only where a coordinator is killed does the client know another.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass

from fleet import Fleet
from judge import Judge
from members import Member
from questions import Outcome, Question, ask, draw_questions
from running import READY_TIMEOUT_S
from waiting import wait_until

from specpipe.types import Mode

NUM_TOKENS = 800
BEFORE_SEEN = 20  # tokens: by then it is known who works on it
BEFORE_KILL = 150  # tokens: some thirty rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    outcome: Outcome
    role: str  # of who was killed
    killed_s: float
    is_replaced: bool  # another worker of this role took the session before the victim was back


async def answer_with_kill(fleet: Fleet, role: str, number: int) -> Kill:
    """`number` decides how it is sampled. The fleet has another member of this role, which can be used."""
    question = Question(
        prompt="A fast draft",
        sampling=next(draw_questions(number, 1)).sampling,
        max_tokens=NUM_TOKENS,
        mode=Mode.PIPELINED,
        asks_elsewhere=role == "coordinator",
    )
    outcome = Outcome(question=question)
    asking = asyncio.create_task(ask(outcome, fleet.client_addresses))
    await _reaches(outcome, BEFORE_SEEN)
    victim = await _at_work(fleet, outcome, role)
    await _reaches(outcome, BEFORE_KILL)
    assert not outcome.is_over, f"it was over before anybody could be killed: {outcome}"
    killed_s = time.monotonic()
    victim.note(is_ready=False)
    victim.signal(signal.SIGKILL)
    is_replaced = await _is_replaced(fleet, victim, outcome)
    await asking
    return Kill(outcome=outcome, role=role, killed_s=killed_s, is_replaced=is_replaced)


def check_whole(kill: Kill, judge: Judge) -> None:
    """Raises AssertionError unless the answer is complete and right, and drafting went on where it was lost.

    Whether a guess is accepted then is for the machine to say: on a busy one the target is sooner, again and again.
    """
    outcome = kill.outcome
    told = f"a {kill.role} was killed in the middle: {outcome}"
    problems = judge.check([outcome])
    assert not problems, f"{told}\n{problems}"
    assert outcome.error is None, told
    assert len(outcome.answer.token_ids) == NUM_TOKENS, told
    assert kill.is_replaced or kill.role != "draft-worker", f"no other worker was asked to draft; {told}"


async def _reaches(outcome: Outcome, num_tokens: int) -> None:
    await wait_until(lambda: outcome.is_over or len(outcome.answer.token_ids) >= num_tokens, timeout_s=READY_TIMEOUT_S)


async def _at_work(fleet: Fleet, outcome: Outcome, role: str) -> Member:
    """Of this role, who works on the one answer there is."""
    members = fleet.of(role)
    if role == "coordinator":
        return members[outcome.question.first_place]
    at_work: list[Member] = []

    async def is_known() -> bool:
        at_work[:] = [member for member in members if (await fleet.info(member)).heartbeat.num_sessions]
        return bool(at_work) or outcome.is_over

    await wait_until(is_known, timeout_s=READY_TIMEOUT_S)
    assert at_work, f"no {role} ever worked on it: {outcome}"
    return at_work[0]


async def _is_replaced(fleet: Fleet, victim: Member, outcome: Outcome) -> bool:
    """Watched until it is, until the answer is over, or until the victim is back. False for a coordinator."""
    others = [member for member in fleet.workers if member.role == victim.role and member.is_usable]
    is_replaced = False

    async def is_decided() -> bool:
        nonlocal is_replaced
        for other in others:
            is_replaced = is_replaced or (await fleet.info(other)).heartbeat.num_sessions > 0
        return is_replaced or outcome.is_over or victim.is_usable

    await wait_until(is_decided, timeout_s=4 * READY_TIMEOUT_S)
    return is_replaced
