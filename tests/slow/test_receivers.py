"""Two thousand requests, all traced, whatever their receiver does: answers, memory, drops and the end (case R2)."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import findings
import pytest
from coordinator_cluster import DEMO, VOCAB_SIZE, Worker, draft_model, target_model
from otlp_receiver import OtlpReceiver, otlp_receiver
from running import environment
from scraping import scrape
from slow_scale import scaled
from tally import ask_all
from waiting import wait_until

from specpipe.client import Answer, GenerateRequest
from specpipe.telemetry.export import MAX_BATCH, MAX_QUEUE

pytestmark = pytest.mark.slow

NUM_REQUESTS = scaled(2000, least=40)
NUM_LAST = 20  # asked just before the end
MAX_TOKENS = 8
IN_FLIGHT = 8
MAX_EXPORT_S = 5.0  # what an export may add to the end of a process, as docs/tracing.md says
MAX_REST_S = 5.0  # for the rest of that end, on a machine that does other work as well
MAX_UNTOLD = 1000  # spans of the requests that ended last, which may come after the drops were read
MAX_GROWTH_BYTES = 8 * 2**20
PATIENCE_S = 120.0


@dataclass(kw_only=True)
class Coordinator:
    """A coordinator as a process of its own, over workers in this one."""

    process: asyncio.subprocess.Process
    address: str
    metrics: str
    log: Path

    async def dropped(self) -> Counter[str]:
        """Spans that it has counted as lost so far, by cause."""
        page = await asyncio.to_thread(scrape, self.metrics)
        return Counter({c: int(n) for c, n in page.by("cause", "specpipe_spans_dropped_total").items()})

    @property
    def anonymous_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return sum(int(kilobytes) * 1024 for kilobytes in re.findall(r"(?:RssAnon|VmSwap):\s*(\d+) kB", status))

    async def stop(self) -> float:
        """SIGTERM. Returns how long it took to end, in seconds."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(self.process.wait(), PATIENCE_S) == 0
        return time.monotonic() - started

    @property
    def told_lost(self) -> Counter[str]:
        """Spans that it said at its end to have lost, by cause."""
        (said,) = re.findall(r"\d+ spans were not exported to \S+: (\{.*\})", self.log.read_text())
        return Counter({cause: int(count) for cause, count in re.findall(r"'([^']+)': (\d+)", said)})


@asynccontextmanager
async def coordinator(log: Path, endpoint: str) -> AsyncIterator[Coordinator]:
    workers = [Worker("target", target_model()), Worker("draft", draft_model())]
    for worker in workers:
        await worker.start()
    target, draft = (worker.address for worker in workers)
    flags = ("--target", target, "--draft", draft, "--tokenizer", str(DEMO), "--metrics-port", "0")
    with log.open("w") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specpipe", "coordinator", *flags, "--otlp-endpoint", endpoint),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=environment(),
        )
    try:
        assert process.stdout is not None
        address, *words = (await process.stdout.readline()).decode().split()
        (metrics,) = [word.removeprefix("metrics=") for word in words if word.startswith("metrics=")]
        yield Coordinator(process=process, address=address, metrics=metrics, log=log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        for worker in workers:
            await worker.end()


@contextmanager
def receiver(mode: Any) -> Iterator[tuple[str, OtlpReceiver]]:
    """Its address, where nobody listens if it is dead."""
    with otlp_receiver("silent" if mode == "dead" else mode) as running, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        yield f"127.0.0.1:{nobody.getsockname()[1]}" if mode == "dead" else running.address, running


def requests(first: int, count: int) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            prompt=[(7 * number + i) % (VOCAB_SIZE - 1) + 1 for i in range(4)],
            request_id=f"r{number}",
            seed=number,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
        )
        for number in range(first, first + count)
    ]


async def ask(service: Coordinator, first: int, count: int) -> list[Answer]:
    answers = await ask_all(service.address, requests(first, count), in_flight=IN_FLIGHT)
    assert {len(answer.token_ids) for answer in answers} == {MAX_TOKENS}
    return answers


def num_rounds(answers: list[Answer]) -> int:
    return sum(answer.finished.speculation.rounds for answer in answers if answer.finished is not None)


@pytest.mark.parametrize(
    ("mode", "count"), [("silent", NUM_REQUESTS), *((mode, NUM_REQUESTS // 4) for mode in ("dead", "refusing", "slow"))]
)
async def test_no_receiver_harms_answers_memory_or_the_end_and_what_it_does_not_take_is_counted(
    log_folder: Path, mode: str, count: int
) -> None:
    half = count // 2
    with receiver(mode) as (address, running):
        async with coordinator(log_folder / f"receiver-{mode}.log", address) as service:
            answers = await ask(service, 0, half)
            before, was_full = service.anonymous_bytes, (await service.dropped())["queue full"] > 0
            answers += await ask(service, half, count - half)
            growth = service.anonymous_bytes - before
            dropped = await service.dropped()
            exit_s = await service.stop()
            lost = service.told_lost
    taken = len(running.spans)
    num_made = lost.total() + taken
    findings.record(
        f"{count} requests, {num_made} spans, {taken} taken, lost {dict(lost)}; "
        f"end {exit_s:.1f} s; growth of the second half {growth // 1024} KB"
    )
    assert num_made >= 3 * count + 2 * num_rounds(answers), "each request's own, and two of each round"
    assert num_made - taken - dropped.total() <= MAX_QUEUE + MAX_BATCH + MAX_UNTOLD, "so many waited"
    assert was_full or num_made < 2 * MAX_QUEUE
    assert growth <= MAX_GROWTH_BYTES or not was_full, "a full queue takes no more room"
    assert exit_s < MAX_EXPORT_S + MAX_REST_S


async def test_with_a_healthy_receiver_no_span_of_a_request_that_has_ended_is_lost(log_folder: Path) -> None:
    with receiver("healthy") as (address, running):
        async with coordinator(log_folder / "receiver-healthy.log", address) as service:
            first = NUM_REQUESTS - NUM_LAST
            answers = await ask(service, 0, first)
            await wait_until(lambda: len(running.named("generate")) == first, timeout_s=PATIENCE_S)
            answers += await ask(service, first, NUM_LAST)
            exit_s = await service.stop()
    spans = running.spans
    names = Counter(span.name for span in spans)
    findings.record(f"{NUM_REQUESTS} requests, {len(spans)} spans: {dict(names)}; end {exit_s:.1f} s")
    told = {span.attributes["specpipe.request_id"] for span in spans if span.name == "generate"}
    assert told == {f"r{number}" for number in range(NUM_REQUESTS)}
    assert names["generate"] == names["queue"] == names["tokenize"] == NUM_REQUESTS
    assert names["verify"] == names["round"] == num_rounds(answers)
    known = {span.span_id for span in spans}
    assert len(known) == len(spans), "none came twice"
    assert all(span.parent_id in known for span in spans if span.name != "generate")
    assert all(link in known for span in spans for link in span.links)
    assert "spans were not exported" not in service.log.read_text()
    assert exit_s < MAX_EXPORT_S + MAX_REST_S
