"""What a receiver of traces costs the answers, whatever it does: latency side by side, in one table.

    python -m benchmarks.collectors [--target DIR --draft DIR] [--num-prompts 4] [--num-passes 6] [--max-tokens 128]

One pair of workers, and a coordinator as a process of its own for each case: nothing is traced (the default), every
request is laid out and not exported (`--trace-sample 1`), and every request is exported to a receiver that is healthy,
dead (nobody listens), refusing (UNAVAILABLE) or silent (never answers). Each pass asks all prompts of one case after
the other, one at a time, then of the next case; which goes first changes with the pass, and between two cases spans
have time to leave. A ratio is that of one prompt in one pass to the same with nothing traced; of ratios there are
median and quartiles. Workers keep no prefixes, so that no case profits from an earlier one. About 3 minutes with the
demo pair.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import re
import signal
import socket
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from benchmarks.modes import prompts
from specpipe import demo
from specpipe.answers import Chunk
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.launcher import LocalService, ServiceConfig

NOTHING: Final = "nothing traced"
LAID_OUT: Final = "laid out, not exported"
RECEIVERS: Final = ("healthy", "dead", "refusing", "silent")
SERVICES: Final = ("trace.v1.TraceService", "metrics.v1.MetricsService")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One answer."""

    token_ids: tuple[int, ...]
    first_ms: float  # until its first token, as the client sees it
    all_ms: float  # until its end


@dataclass(slots=True, kw_only=True)
class Case:
    """A coordinator, and what it answered: every prompt of the first pass, of the second ..."""

    name: str
    process: asyncio.subprocess.Process
    client: GenerateClient
    metrics: str  # HOST:PORT
    asked: list[Asked] = field(default_factory=list)
    spans: tuple[int, int] = (0, 0)  # exported, lost; before the end
    end_s: float = 0.0  # from SIGTERM to the end


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(demo.target_folder()))
    parser.add_argument("--draft", default=str(demo.draft_folder()))
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--num-passes", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--pause-s", type=float, default=1.5, help="between two cases")
    cases = asyncio.run(measure(parser.parse_args()))
    sys.stdout.write(
        f"{'':<24}{'answer ms':>10}{'ratio (quartiles)':>22}{'first ms':>10}{'ratio (quartiles)':>22}"
        f"{'equal':>8}{'exported':>10}{'lost':>8}{'end s':>7}\n"
    )
    for case in cases:
        sys.stdout.write(f"{case.name:<24}{summary(case, cases[0])}\n")
    return 0


async def measure(arguments: argparse.Namespace) -> list[Case]:
    config = ServiceConfig(target=arguments.target, draft=arguments.draft, has_prefix_cache=False)
    texts = prompts(arguments.num_prompts)
    async with AsyncExitStack() as stack:
        receivers = {kind: stack.enter_context(receiver(kind)) for kind in RECEIVERS}
        service = await stack.enter_async_context(LocalService(config))
        await service.start()
        workers = {process.role: str(process.address) for process in service.processes}
        common = ["--target", workers["target-worker"], "--draft", workers["draft-worker"]]
        common += ["--tokenizer", arguments.target, "--metrics-port", "0", "--log-level", "error"]
        flags = {NOTHING: [], LAID_OUT: ["--trace-sample", "1"]}
        flags |= {f"receiver {kind}": ["--otlp-endpoint", address] for kind, address in receivers.items()}
        cases = [await stack.enter_async_context(coordinator(name, [*common, *own])) for name, own in flags.items()]
        for case in cases:
            await ask(case.client, texts[0], arguments.max_tokens)
        for number in range(arguments.num_passes):
            for case in cases[number % len(cases) :] + cases[: number % len(cases)]:
                await asyncio.sleep(arguments.pause_s)
                case.asked += [await ask(case.client, text, arguments.max_tokens) for text in texts]
        for case in cases:
            await end(case)
    return cases


async def ask(client: GenerateClient, text: str, max_tokens: int) -> Asked:
    request = GenerateRequest(prompt=text, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    answer, started_s, first_s = Answer(), time.perf_counter(), 0.0
    async for event in client.generate(request):
        answer.add(event)
        if isinstance(event, Chunk) and not first_s:
            first_s = time.perf_counter()
    all_ms = 1e3 * (time.perf_counter() - started_s)
    return Asked(token_ids=tuple(answer.token_ids), first_ms=1e3 * (first_s - started_s), all_ms=all_ms)


# The cases


@asynccontextmanager
async def coordinator(name: str, flags: Sequence[str]) -> AsyncIterator[Case]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specpipe", "coordinator", *flags), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address, *words = (await process.stdout.readline()).decode().split()
        (metrics,) = [word.removeprefix("metrics=") for word in words if word.startswith("metrics=")]
        async with GenerateClient(address) as client:
            yield Case(name=name, process=process, client=client, metrics=metrics)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def end(case: Case) -> None:
    case.spans = await asyncio.to_thread(count_spans, case.metrics)
    started_s = time.perf_counter()
    case.process.send_signal(signal.SIGTERM)
    await case.process.wait()
    case.end_s = time.perf_counter() - started_s


def count_spans(metrics: str) -> tuple[int, int]:
    """Exported, and lost so far."""
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10) as answer:
        page = answer.read().decode()

    def total(name: str) -> int:
        return sum(int(float(value)) for value in re.findall(rf"^specpipe_spans_{name}_total.* (\S+)$", page, re.M))

    return total("exported"), total("dropped")


@contextmanager
def receiver(kind: str) -> Iterator[str]:
    """The address of one, as a process of its own."""
    if kind == "dead":
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            yield f"127.0.0.1:{nobody.getsockname()[1]}"
        return
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=receive, args=(kind, there), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def receive(kind: str, address: Any) -> None:
    """Reads nothing of what comes: what a receiver does with it is not to be measured here."""

    def export(_request: bytes, context: grpc.ServicerContext) -> bytes:
        if kind == "refusing":
            context.abort(grpc.StatusCode.UNAVAILABLE, "come back later")
        if kind == "silent":
            is_over = threading.Event()
            context.add_callback(is_over.set)
            is_over.wait()
        return b""

    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server = grpc.server(ThreadPoolExecutor(8))
    for name in SERVICES:
        full = f"opentelemetry.proto.collector.{name}"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(full, handlers),))
    address.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    server.wait_for_termination()


# The table


def summary(case: Case, base: Case) -> str:
    pairs = list(zip(case.asked, base.asked, strict=True))
    exported, lost = case.spans
    return "".join(
        [
            f"{statistics.median(asked.all_ms for asked in case.asked):10.1f}",
            f"{spread([ours.all_ms / theirs.all_ms for ours, theirs in pairs]):>22}",
            f"{statistics.median(asked.first_ms for asked in case.asked):10.1f}",
            f"{spread([ours.first_ms / theirs.first_ms for ours, theirs in pairs]):>22}",
            f"{f'{sum(ours.token_ids == theirs.token_ids for ours, theirs in pairs)}/{len(pairs)}':>8}",
            f"{exported:10}{lost:8}{case.end_s:7.1f}",
        ]
    )


def spread(ratios: Sequence[float]) -> str:
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{median:.3f} ({lower:.2f} to {upper:.2f})"


if __name__ == "__main__":
    sys.exit(main())
