"""What Prometheus reads of a whole service is what its answers say of themselves, to the token."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from coordinator_cluster import Cluster, Reading, Worker, ask, cluster, draft_model, plain, target_model
from scraping import Scrape, scrape
from waiting import wait_until

from coordinator.events import Kind
from coordinator.metric_sums import MAX_DEPTH
from coordinator.metrics import CoordinatorMetrics
from specpipe.answers import SpeculationStats
from specpipe.client import Answer
from specpipe.config import TelemetryConfig
from specpipe.errors import DeadlineExceededError, InvalidRequestError
from specpipe.spans import Role
from specpipe.telemetry.metrics import ProcessMetrics
from specpipe.telemetry.worker_telemetry import WorkerTelemetry
from specpipe.types import Mode, Origin

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOMEWHERE = TelemetryConfig(metrics_port=0)
SUMS = ("draft_ms", "exposed_draft_ms", "hidden_draft_ms", "wasted_draft_ms")


@dataclass
class Counted:
    service: Cluster
    pages: dict[str, str]  # by role: coordinator, target, draft

    async def look(self, role: str = "coordinator") -> Scrape:
        return await asyncio.to_thread(scrape, self.pages[role])

    async def answer(self, **options: Any) -> tuple[Answer, Scrape]:
        """One answer, and what it added at the coordinator."""
        before = await self.look()
        answer = await self.service.client.answer(ask(**options), timeout_s=60)
        return answer, (await self.look()).since(before)

    async def idle(self) -> None:
        await wait_until(lambda: self.service.is_idle)


@asynccontextmanager
async def counted(agreement: float = 0.8, *, num_targets: int = 1) -> AsyncIterator[Counted]:
    """A service whose parts count what they do, each on a page of its own (of several targets the last has one)."""
    process = ProcessMetrics(Role.COORDINATOR, SOMEWHERE, "127.0.0.1")
    targets = [
        Worker("target", target_model(), telemetry=WorkerTelemetry("target", SOMEWHERE, "127.0.0.1"))
        for _ in range(num_targets)
    ]
    draft = Worker("draft", draft_model(agreement), telemetry=WorkerTelemetry("draft", SOMEWHERE, "127.0.0.1"))
    metrics = CoordinatorMetrics(process.instruments)
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(cluster(targets, [draft], metrics=metrics, rpc=process.rpc))
        process.watch(service.app.server)
        pages = {"coordinator": await stack.enter_async_context(process.told())}
        for worker in service.workers:
            assert worker.telemetry is not None
            worker.telemetry.watch_service(worker.thread, worker.service, worker.server)
            pages[worker.kind] = await stack.enter_async_context(worker.telemetry.told())
        yield Counted(service, pages)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def counting() -> AsyncIterator[Counted]:
    async with counted() as running:
        yield running


def rounds_of(origins: Sequence[Origin]) -> list[int]:
    """Accepted tokens of each round, by hand: it ends with its only token that is not accepted, or is cut."""
    rounds, accepted = [], 0
    for origin in origins:
        if origin is Origin.ACCEPTED:
            accepted += 1
        else:
            rounds.append(accepted)
            accepted = 0
    return rounds + [accepted] * bool(accepted)


def stats_of(answer: Answer) -> SpeculationStats:
    assert answer.finished is not None
    return answer.finished.speculation


def check_rates(added: Scrape, stats: SpeculationStats) -> None:
    """Of one answer."""
    rounds = added.by("outcome", "specpipe_rounds_total", mode=stats.mode.value)
    num_hits, num_counted = rounds["hit"] + rounds["lookup"], sum(rounds.values()) - rounds["uncounted"]
    assert stats.hit_rate == (num_hits / num_counted if num_counted else None)
    assert stats.lookup_rate == (rounds["lookup"] / num_counted if num_counted else None)
    guesses = added.by("outcome", "specpipe_guesses_total")
    judged = sum(guesses.values())
    assert stats.acceptance_rate == (guesses["right"] / judged if judged else None)


def check_against(added: Scrape, answers: Sequence[Answer]) -> None:
    """Everything that these answers say of themselves, and that can be counted by hand from their ids."""
    finished = [answer.finished for answer in answers if answer.finished is not None]
    rounds = [accepted for answer in answers for accepted in rounds_of(answer.origins)]
    origins = Counter(origin.value for answer in answers for origin in answer.origins)
    assert added.sum("specpipe_rounds_total") == sum(stats_of(a).rounds for a in answers) == len(rounds)
    assert added.sum("specpipe_drafted_tokens_total") == sum(stats_of(a).drafted_tokens for a in answers)
    assert added.sum("specpipe_verified_tokens_total") == sum(stats_of(a).verified_tokens for a in answers)
    assert added.sum("specpipe_accepted_tokens_total") == sum(stats_of(a).accepted_tokens for a in answers)
    assert added.sum("specpipe_accepted_tokens_total") == origins["accepted"] == sum(rounds)
    for depth in range(1, MAX_DEPTH):
        deep = sum(accepted >= depth for accepted in rounds)
        assert added.sum("specpipe_accepted_tokens_by_depth_total", depth=str(depth)) == deep
    assert added.sum("specpipe_accepted_tokens_by_depth_total") == sum(rounds)
    committed = added.by("origin", "specpipe_committed_tokens_total")
    assert committed == {origin.value: origins[origin.value] for origin in Origin}
    assert added.sum("specpipe_completion_tokens_total") == sum(f.completion_tokens for f in finished)
    assert added.sum("gen_ai_client_token_usage_sum", gen_ai_token_type="output") == sum(origins.values())
    num_prompt, num_cached = sum(f.prompt_tokens for f in finished), sum(f.cached_prompt_tokens or 0 for f in finished)
    assert added.sum("gen_ai_client_token_usage_sum", gen_ai_token_type="input") == num_prompt
    assert added.sum("specpipe_prompt_tokens_total") == num_prompt
    assert added.sum("specpipe_prompt_tokens_total", state="cached") == num_cached
    for name in SUMS:
        metric = f"specpipe_{name.removesuffix('_ms').replace('draft', 'draft_time')}_seconds_total"
        told = sum(getattr(f.speculation, name) for f in finished) / 1000
        assert added.sum(metric) == pytest.approx(told, abs=1e-9), name
    assert added.sum("gen_ai_server_request_duration_seconds_count") == len(finished)
    assert added.sum("gen_ai_server_time_to_first_token_seconds_sum") == pytest.approx(
        sum(f.timing.ttft_ms for f in finished) / 1000
    )
    assert added.sum("specpipe_requests_total", outcome="finished") == len(finished)


# Q1: acceptance above 1, tokens after the end, time per round


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("agreement", [1.0, 0.0], ids=["self", "random"])
async def test_a_draft_like_its_target_is_always_right_and_a_random_one_hardly_ever(
    agreement: float, mode: Mode
) -> None:
    async with counted(agreement) as counting:
        counting.service.targets[0].gated.delay_s = 0.01  # a table answers sooner than any draft can come
        answer, added = await counting.answer(mode=mode, num_speculative_tokens=3)
        check_against(added, [answer])
        check_rates(added, stats_of(answer))
        right = added.sum("specpipe_guesses_total", outcome="right")
        judged = added.sum("specpipe_guesses_total")
        if mode is Mode.OFF:
            assert (judged, added.sum("specpipe_drafted_tokens_total")) == (0, 0)
            assert added.by("origin", "specpipe_committed_tokens_total")["plain"] == 60
        elif agreement == 1.0:
            assert right == judged > 0
            assert right / judged == stats_of(answer).acceptance_rate == 1.0
        else:
            assert right <= 0.1 * judged
            assert judged > 0 or mode is Mode.PIPELINED, "what is hardly ever right is not worth a row there"
        if mode is Mode.SYNC and agreement == 1.0:
            # After the first round each has its 3 accepted tokens and one of the target's, until 60 are reached.
            assert rounds_of(answer.origins) == [0, *(3,) * 14, 2]
            assert added.by("outcome", "specpipe_rounds_total", mode="sync")["hit"] == 15


@pytest.mark.parametrize("position", range(8))
async def test_nothing_is_counted_beyond_a_stop_token_at_any_place_of_a_block(counting: Counted, position: int) -> None:
    """The 8th token and those after it: in sync with K = 3 a block has four, so that each place of two is met."""
    tokens = await plain(counting.service)
    at = next(i for i in range(7 + position, 60) if tokens[i] not in tokens[:i])
    answer, added = await counting.answer(
        mode=Mode.SYNC, num_speculative_tokens=3, stop_token_ids=(tokens[at],), ignore_eos=False
    )
    assert answer.token_ids == tokens[: at + 1]
    check_against(added, [answer])
    assert added.by("finish_reason", "specpipe_completion_tokens_total") == {
        "stop": at + 1,
        "length": 0,
        "failed": 0,
        "cancelled": 0,
    }


async def test_a_stop_string_inside_a_commit_is_counted_as_far_as_it_was_delivered(counting: Counted) -> None:
    whole = await counting.service.client.answer(ask(mode=Mode.SYNC, num_speculative_tokens=6), timeout_s=60)
    for start in (20, 31, 44):
        answer, added = await counting.answer(
            mode=Mode.SYNC, num_speculative_tokens=6, stop=(whole.text[start : start + 4],)
        )
        check_against(added, [answer])


async def test_fifty_requests_at_once_add_what_their_statistics_say(counting: Counted) -> None:
    before = await counting.look()
    answers = await asyncio.gather(
        *(
            counting.service.client.answer(
                ask(prompt=(7, 8, 9 + i % 5), seed=i, max_tokens=6 + i % 20, mode=list(Mode)[i % 3]), timeout_s=120
            )
            for i in range(50)
        )
    )
    added = (await counting.look()).since(before)
    check_against(added, answers)
    for mode in Mode:
        of_mode = [a for a in answers if stats_of(a).mode is mode]
        assert added.sum("specpipe_rounds_total", mode=mode.value) == sum(stats_of(a).rounds for a in of_mode)
    await counting.idle()
    assert added.sum("specpipe_queue_duration_seconds_count") == 50


# While answers run


async def test_counters_only_grow_and_accepted_is_never_more_than_verified_nor_that_than_drafted(
    counting: Counted,
) -> None:
    readings = [Reading(counting.service, ask(seed=i)) for i in range(4)]
    before = {role: await counting.look(role) for role in counting.pages}
    while not all(reading.task.done() for reading in readings):
        for role in counting.pages:
            now = await counting.look(role)
            shrunk = {key for key, value in before[role].counters.items() if now.counters.get(key, -1) < value}
            assert not shrunk
            before[role] = now
        for mode in Mode:
            drafted, verified, accepted = (
                before["coordinator"].sum(f"specpipe_{what}_tokens_total", mode=mode.value)
                for what in ("drafted", "verified", "accepted")
            )
            assert accepted <= verified <= drafted
    check_depths = before["coordinator"].by("depth", "specpipe_accepted_tokens_by_depth_total")
    assert all(check_depths[str(d)] >= check_depths[str(d + 1)] for d in range(1, MAX_DEPTH - 1))


async def test_gauges_are_zero_again_when_nothing_is_asked(counting: Counted) -> None:
    model = counting.service.targets[0].gated
    model.delay_s = 0.05  # so that the first is not done before the last has begun
    readings = [Reading(counting.service, ask(seed=i, max_tokens=120)) for i in range(3)]
    for reading in readings:
        await reading.has(4)
    busy, target = await counting.look(), await counting.look("target")
    model.delay_s = 0.0
    assert busy.sum("specpipe_requests_running") == 3
    assert busy.sum("specpipe_worker_sessions", kind="target") == 3
    assert target.sum("specpipe_sessions", state="running") == 3
    assert target.sum("specpipe_slots", state="used") >= 3 * (3 + 4 - 1) - 2 * 3, "the prompt may be shared"
    await asyncio.gather(*(reading.task for reading in readings))
    await counting.idle()
    coordinator = await counting.look()
    for name in ("queued", "running", "undrafted"):
        assert coordinator.sum(f"specpipe_requests_{name}") == 0
    assert coordinator.sum("specpipe_worker_sessions") == 0
    for role in ("target", "draft"):
        worker = await counting.look(role)
        for name in ("specpipe_sessions", "specpipe_tree_nodes", "specpipe_mailbox_sessions"):
            assert worker.sum(name) == 0, (role, name)
        slots = worker.by("state", "specpipe_slots")
        assert slots["used"] == 0
        assert slots["cached"] + slots["free"] == 20_000 - 1
        assert worker.sum("specpipe_serving") == 0, "this test serves them itself, without health"


async def test_a_workers_steps_are_what_its_rounds_were(counting: Counted) -> None:
    before = {role: await counting.look(role) for role in counting.pages}
    answer = await counting.service.client.answer(ask(prompt=(1, 2, 3, 4), seed=77), timeout_s=60)
    await counting.idle()
    added = {role: (await counting.look(role)).since(page) for role, page in before.items()}
    target, stats = added["target"], stats_of(answer)
    assert target.sum("specpipe_step_rows_total", type="node") == stats.verified_tokens
    assert target.sum("specpipe_step_rows_total") == target.sum("specpipe_step_tokens_sum")
    assert target.sum("specpipe_step_duration_seconds_count") == target.sum("specpipe_step_sessions_total")
    assert target.sum("specpipe_step_sessions_total") >= stats.rounds
    assert added["draft"].sum("specpipe_extensions_total", outcome="pushed") > 0
    extensions = target.by("outcome", "specpipe_extensions_total")
    assert extensions["late"] >= added["coordinator"].sum("specpipe_late_extensions_total")
    assert extensions["stale"] >= added["coordinator"].sum("specpipe_stale_extensions_total")
    assert stats.exposed_draft_ms == 0 or target.sum("specpipe_idle_time_seconds_total", cause="extension") > 0


# Ends that are no answers


async def test_a_request_that_is_cancelled_counts_what_it_had(counting: Counted) -> None:
    before = await counting.look()
    reading = Reading(counting.service, ask(max_tokens=400, seed=91))
    await reading.has(30)
    reading.task.cancel()
    await counting.idle()
    added = (await counting.look()).since(before)
    assert added.by("outcome", "specpipe_requests_total") == {
        "finished": 0,
        "failed": 0,
        "cancelled": 1,
        "refused": 0,
    }
    num_tokens = added.sum("specpipe_committed_tokens_total")
    assert num_tokens >= 30
    assert added.by("finish_reason", "specpipe_completion_tokens_total")["cancelled"] == num_tokens
    assert added.sum("gen_ai_server_request_duration_seconds_count", error_type="CANCELLED") == 1
    assert added.sum("gen_ai_server_time_to_first_token_seconds_count") == 0, "of answers only"
    draft, hidden = (added.sum(f"specpipe_{what}draft_time_seconds_total") for what in ("", "hidden_"))
    assert hidden > 0
    assert draft >= hidden - 1e-9, "both are sums of the same times"


async def test_requests_that_are_refused_or_late_say_why(counting: Counted) -> None:
    before = await counting.look()
    with pytest.raises(InvalidRequestError):
        await counting.service.client.answer(ask(temperature=-1.0), timeout_s=10)
    counting.service.targets[0].gate.clear()
    with pytest.raises(DeadlineExceededError):
        await counting.service.client.answer(ask(seed=92), timeout_s=0.3)
    counting.service.targets[0].gate.set()
    await counting.idle()
    added = (await counting.look()).since(before)
    outcomes = added.by("outcome", "specpipe_requests_total")
    assert outcomes["refused"] == 1
    assert outcomes["failed"] + outcomes["cancelled"] == 1, "the deadline, or the client that acted on it"
    errors = added.by("error_type", "gen_ai_server_request_duration_seconds_count")
    assert errors["INVALID_ARGUMENT"] == 1
    assert added.by("rpc_response_status_code", "rpc_server_call_duration_seconds_count")["INVALID_ARGUMENT"] == 1


async def test_a_lost_draft_worker_is_seen_with_what_it_led_to() -> None:
    async with counted() as counting:
        service, draft = counting.service, counting.service.drafts[0]
        reading = Reading(service, ask(max_tokens=120))
        await reading.has(20)
        service.targets[0].gate.clear()
        await draft.stop()
        await wait_until(lambda: not len(service.coordinator.pools[Kind.DRAFT]))
        lost = await counting.look()
        assert lost.by("state", "specpipe_worker_state", kind="draft") == {"connected": 0, "silent": 0, "lost": 1}
        assert lost.by("state", "specpipe_worker_state", kind="target")["connected"] == 1
        assert lost.sum("specpipe_worker_losses_total", kind="draft") == 1
        assert lost.sum("specpipe_session_moves_total", kind="draft") == 1
        assert lost.by("cause", "specpipe_fallbacks_total") == {"unplaced": 0, "lost": 1, "failed": 0, "closed": 0}
        assert lost.sum("specpipe_requests_undrafted") == 1
        await draft.start()
        await wait_until(lambda: draft.num_sessions == 1)
        service.targets[0].gate.set()
        await reading.task
        back = await counting.look()
        assert back.by("state", "specpipe_worker_state", kind="draft")["connected"] == 1
        assert back.sum("specpipe_fallbacks_total") == 1
        assert back.sum("specpipe_requests_undrafted") == 0


async def test_an_answer_that_moves_to_another_target_is_counted_once() -> None:
    async with counted(num_targets=2) as counting:
        service = counting.service
        before = await counting.look()
        readings = [Reading(service, ask(seed=seed, max_tokens=120)) for seed in range(4)]
        for reading in readings:
            await reading.has(30)
        await service.targets[0].stop()
        answers = [await reading.task for reading in readings]
        added = (await counting.look()).since(before)
        num_moved = added.sum("specpipe_session_moves_total", kind="target")
        assert num_moved > 0
        assert added.sum("specpipe_worker_losses_total", kind="target") == 1
        check_against(added, answers)
        for answer in answers:
            stats = stats_of(answer)
            assert stats.accepted_tokens <= stats.verified_tokens <= stats.drafted_tokens
        await service.targets[0].start()


async def test_calls_are_timed_and_messages_weighed_on_both_sides_of_a_stream(counting: Counted) -> None:
    before = await counting.look()
    target_before = await counting.look("target")
    await counting.service.client.answer(ask(seed=5), timeout_s=60)
    added = (await counting.look()).since(before)
    generate = "specpipe.rpc.v1.GenerateService/Generate"
    assert added.sum("rpc_server_call_duration_seconds_count", rpc_method=generate, rpc_response_status_code="OK") == 1
    assert added.sum("specpipe_rpc_message_size_bytes_count", rpc_method=generate, direction="received") == 1
    assert added.sum("specpipe_rpc_message_size_bytes_count", rpc_method=generate, direction="sent") >= 3
    assert added.sum("specpipe_rpc_message_size_bytes_sum", rpc_method=generate, direction="received") > 10
    stream = (await counting.look("target")).since(target_before)
    for direction in ("received", "sent"):
        connect = {"rpc_method": "specpipe.rpc.v1.TargetService/Connect", "direction": direction}
        assert stream.sum("specpipe_rpc_message_size_bytes_count", **connect) >= 1
