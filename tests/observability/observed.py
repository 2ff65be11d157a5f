"""A service that has answered, and what it told of itself to those who look at it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from collector import NoCollectorError, running_collector
from metrics_sink import MetricsSink, metrics_sink
from otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from running import RunningService, running_service
from tiny_models import TinyPair

from specpipe.answers import Chunk
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.types import Mode

NUM_REQUESTS = 8
MODES = (Mode.PIPELINED, Mode.PIPELINED, Mode.SYNC, Mode.OFF)
PROMPT = "def tokens(line): return [part for part in line.split() if part]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A service that has answered, and where what it told of itself came out."""

    service: RunningService
    spans: OtlpReceiver
    metrics: MetricsSink
    no_collector: str  # why there is none between the two; empty: there is
    answers: dict[str, Answer]  # by request id
    cancelled: str  # request id of one that its client left

    @property
    def pipelined(self) -> list[str]:
        return [
            request_id for number, request_id in enumerate(self.answers) if MODES[number % len(MODES)] is Mode.PIPELINED
        ]

    def trace_of(self, request_id: str) -> list[ReceivedSpan]:
        """All spans that have come of the trace whose `generate` has this id; empty until that one has."""
        spans = self.spans.spans
        traces = {span.trace_id for span in spans if span.attributes.get("specpipe.request_id") == request_id}
        return [span for span in spans if span.trace_id in traces]

    def ask(self, num_requests: int) -> None:
        asyncio.run(ask(self.service.address, [f"more-{number}" for number in range(num_requests)]))


@contextmanager
def observed_service(pair: TinyPair, folder: Path) -> Iterator[Observed]:
    """The service, a collector between it and a sink of ours, and a few requests that have ended."""
    with ExitStack() as stack:
        spans, metrics = stack.enter_context(otlp_receiver()), stack.enter_context(metrics_sink())
        receiver, no_collector = spans.address, ""
        try:
            collector = running_collector(folder, spans_to=spans.address, metrics_to=metrics.address)
            receiver = stack.enter_context(collector)
        except NoCollectorError as error:
            no_collector = str(error)
        models = ("--target", str(pair.target), "--draft", str(pair.draft))
        telemetry = ("--otlp-endpoint", receiver, "--metrics-port", "0")
        service = stack.enter_context(running_service(folder / "observed.log", *models, *telemetry))
        ids = [f"observed-{number}" for number in range(NUM_REQUESTS)]
        answers = asyncio.run(ask(service.address, ids))
        asyncio.run(leave(service.address, "left"))
        yield Observed(
            service=service,
            spans=spans,
            metrics=metrics,
            no_collector=no_collector,
            answers=answers,
            cancelled="left",
        )


async def ask(address: str, request_ids: list[str]) -> dict[str, Answer]:
    """All at once."""
    async with GenerateClient(address) as client:

        async def one(number: int, request_id: str) -> Answer:
            request = GenerateRequest(
                prompt=PROMPT[number:],
                request_id=request_id,
                max_tokens=40,
                ignore_eos=True,
                temperature=0.0,
                mode=MODES[number % len(MODES)],
            )
            answer = Answer()
            async for event in client.generate(request, timeout_s=60):
                answer.add(event)
            return answer

        answers = await asyncio.gather(*(one(number, each) for number, each in enumerate(request_ids)))
    return dict(zip(request_ids, answers, strict=True))


async def leave(address: str, request_id: str) -> None:
    """Ask for much and go after the first piece."""
    async with GenerateClient(address) as client:
        request = GenerateRequest(prompt=PROMPT, request_id=request_id, max_tokens=400, ignore_eos=True)
        events = client.generate(request, timeout_s=60)
        async for event in events:
            if isinstance(event, Chunk):
                break
        await events.aclose()
