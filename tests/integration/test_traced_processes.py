"""`serve --otlp-endpoint`: traces of real processes, killed and stopped, at a receiver that takes them or does not."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
from otlp_receiver import OtlpReceiver, otlp_receiver
from running import RunningService, running_service
from tiny_models import TinyPair
from waiting import wait_until

from specpipe.answers import Chunk
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.types import Origin

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SHORT = GenerateRequest(prompt="def f(x):", temperature=0, max_tokens=40, ignore_eos=True)
LONG = GenerateRequest(prompt="def f(x):", temperature=0, max_tokens=300, ignore_eos=True)
MAX_EXPORT_S = 5.0  # what the export of spans may add to the end of a process


async def stop(service: RunningService) -> float:
    """SIGTERM to the coordinator's service. Returns how long the coordinator took, in seconds."""
    coordinator = psutil.Process(service.pid("coordinator"))
    started = time.monotonic()
    service.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(coordinator.wait, 60)
    ended = time.monotonic()
    assert await asyncio.to_thread(service.process.wait, 60) == 0
    return ended - started


def check_links(receiver: OtlpReceiver) -> None:
    known = {span.span_id: span for span in receiver.spans}
    for span in receiver.spans:
        assert span.name == "generate" or span.parent_id in known
        for link in span.links:
            draft = known[link]
            assert draft.name == "draft"
            assert draft.pb.end_time_unix_nano <= span.pb.start_time_unix_nano


async def test_processes_killed_and_stopped_leave_whole_traces(tiny_pair: TinyPair, log_folder: Path) -> None:
    with otlp_receiver() as receiver:
        flags = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft), "--otlp-endpoint")
        with running_service(log_folder / "traced.log", *flags, receiver.address) as service:
            async with GenerateClient(service.address) as client:
                answer, killed_pid = Answer(), 0
                async for event in client.generate(LONG, traceparent=f"00-{TRACE}-{PARENT}-01"):
                    answer.add(event)
                    is_drafted = len(answer.token_ids) > 60 and Origin.ACCEPTED in answer.origins
                    if isinstance(event, Chunk) and is_drafted and not killed_pid:
                        killed_pid = service.pid("draft-worker")
                        os.kill(killed_pid, signal.SIGKILL)
                # ended a moment before the service: its spans wait to be exported
                await client.answer(SHORT, timeout_s=60)
                await stop(service)
    assert {span.resource["service.name"] for span in receiver.spans} == {
        "specpipe-coordinator",
        "specpipe-target-worker",
        "specpipe-draft-worker",
    }
    processes = {span.resource["service.name"]: span.resource["process.pid"] for span in receiver.spans}
    assert processes["specpipe-target-worker"] in {pid for pid, _ in service.workers("target-worker")}
    assert len(receiver.named("generate")) == 2
    check_links(receiver)
    generate = next(span for span in receiver.named("generate") if span.trace_id == TRACE)
    assert (generate.parent_id, "draft lost" in generate.events) == (PARENT, True)
    assert any(span.links for span in receiver.named("verify"))
    assert answer.finished is not None
    verified = [span for span in receiver.named("verify") if span.trace_id == TRACE]
    assert len(verified) == answer.finished.speculation.rounds


async def test_a_receiver_that_says_nothing_holds_neither_answers_nor_the_end(
    tiny_pair: TinyPair, log_folder: Path
) -> None:
    with otlp_receiver("silent") as receiver:
        flags = ("--target", str(tiny_pair.target), "--draft", "ngram", "--otlp-endpoint", receiver.address)
        with running_service(log_folder / "silent.log", *flags) as service:
            async with GenerateClient(service.address) as client:
                await client.answer(SHORT, timeout_s=60)
                await wait_until(lambda: receiver.num_calls > 0)
                await client.answer(SHORT, timeout_s=60)
            assert await stop(service) < MAX_EXPORT_S + 2.0  # a busy machine needs a moment for the rest
        assert not receiver.spans
    assert "spans were not exported" in (log_folder / "silent.log").read_text()
