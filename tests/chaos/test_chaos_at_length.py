"""Many faults over many requests; the same over network namespaces; an hour of requests; what faults cost in time.

With SPECPIPE_CHAOS_SEED the runs are those of that seed; without, of any, which a failure prints.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import findings
import pytest
from chaos import check_end, chosen_seed, run_chaos
from faults import HARMLESS, Kind, Way
from fleet import Fleet, RelayNetwork, running_fleet
from health_watch import TRUE_WITHIN_S, is_serving
from judge import Judge
from kills import answer_with_kill, check_whole
from namespaces import namespaces, obstacle
from oracle import Oracle
from questions import Load, Outcome, ask, draw_questions
from reach import Span, unexplained
from run_in_namespaces import NAMES
from running import READY_TIMEOUT_S
from slow_scale import SCALE, scaled
from tiny_models import TinyPair, make_pair
from usage import Usage, usages
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]

SOAK_S = 3600.0
NUM_SAMPLES = 12  # of the soak; the first quarter is for warming up
MAX_GROWTH_BYTES = 8 * 2**20
SETTLE_S = 120.0  # gRPC's pool lets a thread go after some idle time
SOON = 5  # chunks


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return make_pair(tmp_path_factory.mktemp("chaos"), max_positions=2048)


@pytest.fixture(scope="module")
def oracle(pair: TinyPair) -> Oracle:
    return Oracle(pair.target)


@pytest.fixture
def seed() -> int:
    return chosen_seed()


@pytest.fixture
async def fleet(pair: TinyPair, tmp_path: Path, seed: int) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(running_fleet(RelayNetwork(stack, seed), pair, tmp_path))


async def test_three_hundred_faults_over_two_thousand_requests_change_no_answer(
    fleet: Fleet, oracle: Oracle, seed: int
) -> None:
    numbers = {"num_faults": scaled(300, least=20), "num_requests": scaled(2000, least=130)}
    report = await run_chaos(fleet, oracle, seed=seed, **numbers, watches_health=True)
    findings.record(str(report))


def test_partitions_loss_and_slow_networks_between_namespaces_change_no_answer(tmp_path: Path, seed: int) -> None:
    if reason := obstacle():
        pytest.skip(reason)
    numbers = map(str, (seed, scaled(60, least=12), scaled(400, least=80)))
    with namespaces(NAMES) as spaces:
        script = Path(__file__).parent / "run_in_namespaces.py"
        done = subprocess.run(
            [*spaces.command("client"), sys.executable, str(script), spaces.prefix, str(tmp_path), *numbers],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    findings.record(done.stdout.splitlines()[-1])


# What is true is told


async def test_health_tells_within_five_seconds_that_no_answer_is_possible_and_that_one_is_again(
    fleet: Fleet, oracle: Oracle
) -> None:
    coordinators, targets = fleet.of("coordinator"), fleet.of("target-worker")
    links = [f"{coordinator.name}>{target.name}" for coordinator in coordinators for target in targets]

    async def all_say(serving: bool) -> bool:
        return [await is_serving(one) for one in coordinators] == [serving] * len(coordinators)

    async def told_after(change: str, *, serving: bool) -> None:
        began_s = time.monotonic()
        await wait_until(lambda: all_say(serving), timeout_s=READY_TIMEOUT_S)
        took_s = time.monotonic() - began_s
        findings.record(f"{change}: health is true after {took_s:.1f} s")
        assert took_s <= TRUE_WITHIN_S + 0.5, f"{change}: {took_s:.1f} s"

    for link in links:
        await fleet.network.begin(Kind.HOLD, link, tuple(Way))
    await told_after("all links held", serving=False)
    for link in links:
        await fleet.network.end(link)
    await told_after("all links released", serving=True)
    await fleet.become_whole()
    for target in targets:
        target.signal(signal.SIGSTOP)
    await told_after("all target workers frozen", serving=False)
    for target in targets:
        target.signal(signal.SIGCONT)
    await told_after("all target workers go on", serving=True)
    await fleet.become_whole()
    for target in targets:
        target.note(is_ready=False)
        target.signal(signal.SIGKILL)
    await told_after("all target workers killed", serving=False)
    await wait_until(lambda: any(target.is_usable for target in targets), timeout_s=4 * READY_TIMEOUT_S)
    await told_after("a target worker is back", serving=True)
    await check_end(fleet, oracle)


# What faults cost


async def test_a_worker_that_is_killed_costs_a_pause_and_no_more(fleet: Fleet, oracle: Oracle) -> None:
    judge, count = Judge(oracle), scaled(12, least=3)
    rounds_s: list[float] = []
    pauses_s: dict[str, list[float]] = {"target-worker": [], "draft-worker": []}
    costs_s: dict[str, list[float]] = {"target-worker": [], "draft-worker": []}
    for role in pauses_s:
        for number in range(count):
            await fleet.become_whole()
            kill = await answer_with_kill(fleet, role, number)
            check_whole(kill, judge)
            before_s, after_s = _gaps(kill.outcome, kill.killed_s)
            pauses_s[role].append(max(after_s))
            costs_s[role].append(max(after_s) - _usual_pause(before_s))
            rounds_s += before_s
    await fleet.become_whole()
    prefill_s = await _prefill_s(fleet)
    round_s = statistics.median(rounds_s)
    target_s, draft_s = (statistics.median(pauses) for pauses in pauses_s.values())
    target_cost_s, draft_cost_s = (statistics.median(costs) for costs in costs_s.values())
    findings.record(
        f"median pause when a target worker is killed {target_s:.2f} s (prefill of a longer text {prefill_s:.2f} s), "
        f"when a draft worker is killed {1000 * draft_s:.0f} ms; longer than the longest of as many rounds before by "
        f"{1000 * target_cost_s:.0f} and {1000 * draft_cost_s:.0f} ms (a round: {1000 * round_s:.0f} ms in the median, "
        f"{1000 * statistics.quantiles(rounds_s, n=20)[-1]:.0f} ms at p95); {count} kills of each"
    )
    assert target_s <= prefill_s + 2.0
    assert draft_cost_s <= round_s


def _gaps(outcome: Outcome, killed_s: float) -> tuple[list[float], list[float]]:
    """Between chunks: those over before that moment, and the `SOON` from there on.

    What was on its way may come first, so a pause may be any of the latter.
    """
    gaps = [(later, later - earlier) for earlier, later in itertools.pairwise(outcome.arrivals_s)]
    before_s = [gap for end_s, gap in gaps if end_s <= killed_s]
    return before_s, [gap for end_s, gap in gaps if end_s > killed_s][:SOON]


def _usual_pause(gaps_s: Sequence[float]) -> float:
    """The longest of `SOON` gaps in a row, in the median: what chance alone makes of them."""
    return statistics.median(max(gaps_s[i : i + SOON]) for i in range(len(gaps_s) - SOON + 1))


async def _prefill_s(fleet: Fleet) -> float:
    """Of a text that no worker has seen; longer than those above."""
    times = []
    for number in range(3):
        question = next(question for question in draw_questions(1000 + number, 4) if question.is_long)
        outcome = Outcome(question=question)
        await ask(outcome, fleet.client_addresses)
        assert outcome.answer.finished is not None
        times.append(outcome.answer.finished.timing.ttft_ms / 1000)
    return statistics.median(times)


# An hour


async def test_an_hour_of_requests_over_bad_links_leaves_every_process_as_it_was(
    fleet: Fleet, oracle: Oracle, seed: int
) -> None:
    """No process is ended, so that each can be compared with itself; links are cut, held, slow and shuffled."""
    judge, samples, end_s = Judge(oracle), [], time.monotonic() + SOAK_S * SCALE
    part_s, number = SOAK_S * SCALE / NUM_SAMPLES, 0
    suffered: dict[str, list[Span]] = {link: [] for link in fleet.links}
    while time.monotonic() < end_s:
        until_s = time.monotonic() + part_s
        while time.monotonic() < until_s:
            number += 1
            await _ask_over_bad_links(fleet, judge, suffered, seed + number, number)
        await fleet.become_whole()
        await wait_until(fleet.is_idle, timeout_s=READY_TIMEOUT_S)
        samples.append(usages(fleet))
    _check_flat(samples, judge)
    await _settles(lambda: usages(fleet), samples[len(samples) // 4])
    await check_end(fleet, oracle)


async def _ask_over_bad_links(
    fleet: Fleet, judge: Judge, suffered: dict[str, list[Span]], seed: int, number: int
) -> None:
    """Forty requests, and meanwhile one link suffers. `suffered` is added to: when nothing could pass it."""
    link = fleet.links[number % len(fleet.links)]
    kinds = (*fleet.network.link_kinds, *([Kind.SHUFFLE] if link in fleet.network.shuffled() else []))
    kind = kinds[number % len(kinds)]
    async with Load(fleet.client_addresses, draw_questions(seed, 40)) as load:
        load.let_go(40)
        await wait_until(lambda: len(load.outcomes) > 8, timeout_s=READY_TIMEOUT_S)
        begun_s = time.monotonic()
        await fleet.network.begin(kind, link, tuple(Way))
        await wait_until(lambda: len(load.outcomes) > 24, timeout_s=READY_TIMEOUT_S)
        await fleet.network.end(link)
        if kind not in HARMLESS:
            suffered[link].append((begun_s, time.monotonic()))
        await load.end()
        problems = await asyncio.to_thread(judge.check, load.outcomes)
        problems += unexplained(load.outcomes, fleet.reaches(suffered))
    assert not problems, f"SPECPIPE_CHAOS_SEED={seed - number}, part {number}: {problems}\n{fleet.last_lines()}"


def _check_flat(samples: list[dict[str, Usage]], judge: Judge) -> None:
    before, after = samples[len(samples) // 4], samples[-1]
    growth = {name: after[name].anonymous_bytes - before[name].anonymous_bytes for name in before}
    told = {name: f"{size // 1024} KB" for name, size in growth.items()}
    minutes = SOAK_S * SCALE / 60
    findings.record(f"soak of {minutes:.0f} min: {dict(judge.counts)}; growth after the first quarter: {told}")
    assert before.keys() == after.keys()
    assert max(growth.values()) <= MAX_GROWTH_BYTES, told


async def _settles(look: Callable[[], dict[str, Usage]], before: dict[str, Usage]) -> None:
    """No process keeps more threads or descriptors than it had."""

    def kept() -> dict[str, tuple[Usage, Usage]]:
        return {name: (before[name], now) for name, now in look().items() if now.exceeds(before[name])}

    try:
        await wait_until(lambda: not kept(), timeout_s=SETTLE_S)
    except TimeoutError:
        raise AssertionError(f"threads or descriptors are kept, before and now: {kept()}") from None
