"""The metrics of a whole service: where its ready line says, over OTLP, and after a worker has been started again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from otlp_receiver import OtlpReceiver, otlp_receiver
from running import RunningService, running_service
from scraping import Scrape, scrape
from tiny_models import TinyPair
from waiting import wait_until

from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.types import Mode, Origin

RESTART_TIMEOUT_S = 150.0  # a few seconds on a quiet machine
ROLES = ("coordinator", "target-worker", "draft-worker")


@dataclass
class Observed:
    service: RunningService
    receiver: OtlpReceiver
    first_port: int

    def page(self, role: str) -> Scrape:
        return scrape(next(p["metrics"] for p in self.service.processes if p["role"] == role))

    async def look(self, role: str = "coordinator") -> Scrape:
        return await asyncio.to_thread(self.page, role)


@pytest.fixture(scope="module")
def observed(tiny_pair: TinyPair, log_folder: Path) -> Iterator[Observed]:
    port = three_free_ports()
    models = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft))
    with ExitStack() as stack:
        receiver = stack.enter_context(otlp_receiver())
        telemetry = ("--metrics-port", str(port), "--otlp-endpoint", receiver.address, "--trace-level", "off")
        log = log_folder / "metrics.log"
        yield Observed(stack.enter_context(running_service(log, *models, *telemetry)), receiver, port)


def three_free_ports() -> int:
    """The first of three neighbours."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                for following in (port + 1, port + 2):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", following))
            except (OSError, OverflowError):
                continue
            return port


def ask(seed: int, **options: object) -> GenerateRequest:
    values = {"prompt": "def tokens(line):", "max_tokens": 40, "ignore_eos": True, "seed": seed, **options}
    return GenerateRequest(**values)  # type: ignore[arg-type]


async def answers_of(observed: Observed, requests: list[GenerateRequest]) -> list[Answer]:
    async with GenerateClient(observed.service.address) as client:
        return list(await asyncio.gather(*(client.answer(request, timeout_s=120) for request in requests)))


async def test_each_process_has_a_page_where_the_ready_line_says(observed: Observed) -> None:
    pages = {process["role"]: process["metrics"] for process in observed.service.processes}
    assert pages == {role: f"127.0.0.1:{observed.first_port + i}" for i, role in enumerate(ROLES)}
    for role in ROLES:
        page = await observed.look(role)
        assert page.sum("target_info", service_name=f"specpipe-{role}") == 1
        assert page.sum("specpipe_serving") == 1


async def test_metrics_of_an_engine_are_what_answers_say(observed: Observed) -> None:
    before = {role: await observed.look(role) for role in ROLES}
    requests = [ask(seed, mode=mode) for seed in range(4) for mode in Mode]
    answers = await answers_of(observed, requests)
    added = {role: (await observed.look(role)).since(page) for role, page in before.items()}
    finished = [answer.finished for answer in answers if answer.finished is not None]
    coordinator = added["coordinator"]
    for name in ("drafted", "verified", "accepted"):
        told = sum(getattr(one.speculation, f"{name}_tokens") for one in finished)
        assert coordinator.sum(f"specpipe_{name}_tokens_total") == told
    assert coordinator.sum("specpipe_rounds_total") == sum(one.speculation.rounds for one in finished)
    assert coordinator.sum("specpipe_committed_tokens_total") == sum(len(answer.token_ids) for answer in answers)
    origins = [origin for answer in answers for origin in answer.origins]
    assert coordinator.sum("specpipe_accepted_tokens_total") == origins.count(Origin.ACCEPTED)
    draft_ms = sum(one.speculation.draft_ms for one in finished)
    assert coordinator.sum("specpipe_draft_time_seconds_total") == pytest.approx(draft_ms / 1000)
    target = added["target-worker"]
    assert target.sum("specpipe_step_rows_total", type="node") >= coordinator.sum("specpipe_verified_tokens_total")
    assert added["draft-worker"].sum("specpipe_step_duration_seconds_sum") >= draft_ms / 1000 - 1e-6


async def test_a_worker_that_is_started_again_counts_from_nothing_and_the_coordinator_goes_on(
    observed: Observed,
) -> None:
    await answers_of(observed, [ask(50)])
    before, draft_before = await observed.look(), await observed.look("draft-worker")
    assert draft_before.sum("specpipe_step_duration_seconds_count") > 0
    os.kill(observed.service.pid("draft-worker"), signal.SIGKILL)

    async def is_back() -> bool:
        try:
            draft = await observed.look("draft-worker")
        except (urllib.error.URLError, ConnectionError):
            return False
        state = (await observed.look()).sum("specpipe_worker_state", kind="draft", state="connected")
        return state == 1 and draft.values != draft_before.values

    await wait_until(is_back, timeout_s=RESTART_TIMEOUT_S)
    after, draft_after = await observed.look(), await observed.look("draft-worker")
    assert draft_after.sum("specpipe_step_duration_seconds_count") == 0
    assert draft_after.sum("specpipe_extensions_total") == 0
    assert after.sum("specpipe_worker_losses_total", kind="draft") == 1
    assert all(after.counters[key] >= value for key, value in before.counters.items())


async def test_all_gauges_are_zero_in_the_end_and_all_processes_push_once_more(observed: Observed) -> None:
    await answers_of(observed, [ask(60)])

    async def is_idle() -> bool:
        sessions = [await observed.look(role) for role in ROLES[1:]]
        return not sum(page.sum("specpipe_sessions") for page in sessions)

    await wait_until(is_idle)
    pages = {role: await observed.look(role) for role in ROLES}
    for name in ("requests_queued", "requests_running", "requests_undrafted", "worker_sessions"):
        assert pages["coordinator"].sum(f"specpipe_{name}") == 0
    for role in ROLES[1:]:
        for name in ("tree_nodes", "mailbox_sessions"):
            assert pages[role].sum(f"specpipe_{name}") == 0
        assert pages[role].sum("specpipe_slots", state="used") == 0
    assert observed.service.terminate() == 0
    pushed = {(m.resource["service.name"], m.pb.name): m.pb for m in observed.receiver.metrics}
    steps = pushed["specpipe-target-worker", "specpipe.step.duration"].histogram.data_points[0]
    assert steps.count == pages["target-worker"].sum("specpipe_step_duration_seconds_count")
    requests = pushed["specpipe-coordinator", "specpipe.requests"].sum.data_points
    assert sum(point.as_int or point.as_double for point in requests) == pages["coordinator"].sum(
        "specpipe_requests_total"
    )
    assert ("specpipe-draft-worker", "specpipe.step.duration") in pushed
