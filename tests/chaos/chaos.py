"""One run: faults from a seed over a load from the same seed, then the verdict.

Owns: the order of a run, its report. A failure prints the seed and the faults, so that it can be run again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from faults import Fault, draw_faults
from fleet import Fleet
from health_watch import HealthWatch
from judge import Judge
from kills import answer_with_kill, check_whole
from oracle import Oracle, Sampling
from questions import Load, Outcome, Question, ask, draw_questions
from reach import unexplained
from running import READY_TIMEOUT_S
from strikes import Striker
from waiting import wait_until

from specpipe.types import Mode

ONE_AFTER_THE_OTHER = ("draft-worker", "target-worker", "coordinator")  # none is waited for: the next can do without
MIN_ANSWERED = 0.75  # of the requests whose clients stayed; 0.97 on a quiet machine


def chosen_seed(default: int | None = None) -> int:
    """SPECPIPE_CHAOS_SEED, to run a failure again; else the default, else any."""
    return int(os.environ.get("SPECPIPE_CHAOS_SEED", secrets.randbits(32) if default is None else default))


@dataclass(kw_only=True)
class Report:
    seed: int
    begun_s: float = field(default_factory=time.monotonic)
    faults: list[Fault] = field(default_factory=list)
    story: list[str] = field(default_factory=list)  # what happened when
    num_missed: int = 0  # faults whose phase had passed before they struck
    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    num_ties: int = 0
    wrong_health_s: float = 0.0  # the longest that any health was wrong, where it was watched

    def tell(self, text: str) -> None:
        num_over = sum(outcome.is_over for outcome in self.outcomes)
        self.story.append(f"{time.monotonic() - self.begun_s:.1f} s, {num_over} of {len(self.outcomes)} over: {text}")

    def hear(self, watch: HealthWatch) -> None:
        self.problems += watch.problems
        self.wrong_health_s = watch.longest_s

    def too_few(self) -> list[str]:
        """However many failures faults explain: a service that seldom answers is none."""
        num_stayed = len(self.outcomes) - self.counts["left"]
        if self.counts["answered"] >= MIN_ANSWERED * num_stayed:
            return []
        return [f"{self.counts['answered']} of {num_stayed} requests were answered"]

    def __str__(self) -> str:
        kinds = Counter(fault.kind.name for fault in self.faults)
        counts = ", ".join(f"{count} {how}" for how, count in sorted(self.counts.items()))
        longest = max((outcome.longest_pause_s for outcome in self.outcomes), default=0.0)
        return (
            f"seed {self.seed}: {len(self.faults)} faults ({', '.join(f'{n} {k}' for k, n in sorted(kinds.items()))}; "
            f"{self.num_missed} out of phase) over {len(self.outcomes)} requests: {counts}; "
            f"{len(self.problems)} wrong, {self.num_ties} ties; longest pause {longest:.1f} s, "
            f"longest that health was wrong {self.wrong_health_s:.1f} s"
        )


async def run_chaos(
    fleet: Fleet, oracle: Oracle, *, seed: int, num_faults: int, num_requests: int, watches_health: bool = False
) -> Report:
    """With `watches_health`, health is an invariant too.

    Raises AssertionError, with all that is needed to run it again, if an invariant does not hold.
    """
    report = Report(seed=seed, faults=draw_faults(seed, num_faults, fleet.victims()))
    try:
        async with Load(fleet.client_addresses, draw_questions(seed, num_requests)) as load:
            report.outcomes = load.outcomes
            striker = await _strike_all(fleet, load, report, num_requests, watches_health=watches_health)
            await load.end()
            report.tell("all requests are over")
        judge = Judge(oracle)
        report.problems += await asyncio.to_thread(judge.check, report.outcomes)
        report.problems += unexplained(report.outcomes, fleet.reaches(striker.suffered()))
        report.counts, report.num_ties = judge.counts, judge.num_ties
        report.problems += report.too_few()
        await check_end(fleet, oracle)
        report.tell("whole and idle")
        report.problems += striker.unprompted()
        report.problems += await kill_in_the_middle(fleet, Judge(oracle))
        report.tell("somebody of each kind was killed in the middle of an answer")
        assert not report.problems, "\n".join(report.problems)
    except (AssertionError, TimeoutError) as error:
        told = "\n".join(report.story)
        again = f"SPECPIPE_CHAOS_SEED={seed}"
        raise AssertionError(f"{error}\n{again}\n{report}\n{told}\n{fleet.last_lines()}") from error
    return report


async def _strike_all(fleet: Fleet, load: Load, report: Report, num_requests: int, *, watches_health: bool) -> Striker:
    """The requests are let go in equal shares, one before each fault, and the rest after the last."""
    num_faults = len(report.faults)
    async with AsyncExitStack() as stack:
        striker = await stack.enter_async_context(Striker(fleet))
        watch = HealthWatch(fleet, striker.suffering)
        if watches_health:
            await stack.enter_async_context(watch)
        for number, fault in enumerate(report.faults):
            await striker.wait_for_turn(fault)
            load.let_go(num_requests * (number + 1) // (num_faults + 1) - num_requests * number // (num_faults + 1))
            report.num_missed += not await load.reaches(fault.phase)
            await asyncio.sleep(fault.delay_s)
            await striker.strike(fault)
            report.tell(str(fault))
        load.let_go(num_requests - num_requests * num_faults // (num_faults + 1))
    report.hear(watch)
    return striker


async def check_end(fleet: Fleet, oracle: Oracle) -> None:
    """After the last fault: all is whole without a hand, each coordinator answers, and nothing is held any more."""
    await fleet.become_whole()
    judge = Judge(oracle)

    async def answers(place: int) -> bool:
        """A machine that stood still a moment ago may make a worker seem silent once more."""
        outcome = Outcome(question=plain_question(place))
        await ask(outcome, fleet.client_addresses)
        problems = judge.check([outcome])
        assert not problems, problems
        return outcome.error is None

    for place, address in enumerate(fleet.client_addresses):
        try:
            await wait_until(lambda place=place: answers(place), timeout_s=READY_TIMEOUT_S)
        except TimeoutError:
            raise AssertionError(f"no plain request is answered at {address} after all faults") from None
    try:
        await wait_until(fleet.is_idle, timeout_s=READY_TIMEOUT_S)
    except TimeoutError:
        held = await fleet.holdings()
        raise AssertionError(f"sessions or slots are kept: {held}") from None


async def kill_in_the_middle(fleet: Fleet, judge: Judge) -> list[str]:
    """Of a whole fleet, each time somebody who is at work: chance may never strike them. Returns what is wrong."""
    problems = []
    for number, role in enumerate(ONE_AFTER_THE_OTHER):
        kill = await answer_with_kill(fleet, role, number)
        try:
            check_whole(kill, judge)
        except AssertionError as error:
            problems.append(str(error))
    return problems


def plain_question(place: int) -> Question:
    return Question(
        prompt="def",
        sampling=Sampling(),
        max_tokens=24,
        mode=Mode.PIPELINED,
        first_place=place,
        asks_elsewhere=False,
    )
