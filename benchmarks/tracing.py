"""What tracing costs: CPU time of every part of it, set against the CPU time of a round over all processes.

    python -m benchmarks.tracing [--target DIR --draft DIR] [--num-prompts 10] [--max-tokens 128] [--level round]

The workers are processes of their own, as in a service; the coordinator runs here, where each entry into tracing is
timed by the clock of its thread (the export's thread too); client and collector are processes of their own. Workers'
reports are timed apart, as `benchmarks.reports` does, and counted as often as they were told. Every tenth request is
sampled, or all. Prompts and tokens are those of `benchmarks.modes`.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import multiprocessing
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import grpc
import psutil
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from benchmarks.modes import prompts
from benchmarks.reports import cpu_us, draft_step, target_round
from coordinator.driver import Coordinator
from coordinator.request_trace import RequestTrace
from coordinator.service import SERVICE_NAMES, App
from coordinator.tracing import Tracing
from specpipe import demo
from specpipe.client import GenerateClient, GenerateRequest
from specpipe.codec_reports import report_from_pb, report_to_pb
from specpipe.config import CoordinatorConfig, ServerConfig, TelemetryConfig
from specpipe.launcher import LocalService, ServiceConfig
from specpipe.recording import StepRun
from specpipe.reports import Report
from specpipe.rpc.v1 import worker_pb2
from specpipe.server import create_server
from specpipe.spans import Span
from specpipe.telemetry.export import SpanExport

ENTRIES: Final = {
    RequestTrace: ("tokenized", "refuse", "submit", "place", "observe", "hear", "session_over", "note"),
    Tracing: ("begin", "tick", "ending"),
}
SAMPLED: Final = {"none": 0, "1 in 10": 10, "all": 1}


class Meter:
    """CPU seconds of threads inside the functions that it wraps; a nested call counts once."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside = threading.local()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "is_inside", False):
                return function(*args, **kwargs)
            self._inside.is_inside = True
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - started
                self._inside.is_inside = False

        return run

    def watch(self) -> None:
        for kind, names in ENTRIES.items():
            for name in names:
                setattr(kind, name, self.timed("spans made", getattr(kind, name)))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request: Any, context: Any) -> Any:  # noqa: ARG002, N802
        return trace_service_pb2.ExportTraceServiceResponse()


def collect(address: Any) -> None:
    """A collector as a process: takes everything, keeps nothing."""
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    address.send(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    server.wait_for_termination()


def ask(address: str, texts: Sequence[str], max_tokens: int, sampled_every: int, told: Any) -> None:
    """A client as a process: tells rounds and its own CPU seconds."""

    async def run() -> int:
        rounds = 0
        async with GenerateClient(address) as client:
            for number, text in enumerate(texts):
                is_sampled = bool(sampled_every) and number % sampled_every == 0
                context = f"00-{number + 1:032x}-{1:016x}-{int(is_sampled):02x}"
                request = GenerateRequest(prompt=text, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
                answer = await client.answer(request, traceparent=context)
                assert answer.finished is not None
                rounds += answer.finished.speculation.rounds
        return rounds

    started = time.process_time()
    told.send((asyncio.run(run()), time.process_time() - started))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pass over all prompts. Seconds are CPU time."""

    rounds: int
    all_s: float
    made_s: float
    exported_s: float
    spans: Counter[str]

    def report_s(self, report_us: dict[str, float]) -> float:
        told = report_us["target"] * self.spans["verify"] + report_us["draft"] * self.spans["draft"]
        return 1e-6 * told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(demo.target_folder()))
    parser.add_argument("--draft", default=str(demo.draft_folder()))
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--level", default="round", choices=["request", "round", "debug"])
    arguments = parser.parse_args()
    runs = asyncio.run(measure(arguments))
    report_us = {"target": report_cost_us(target_round), "draft": report_cost_us(draft_step)}
    for name, run in runs.items():
        sys.stdout.write(f"{name:<8} {summary(run, report_us)}\n")
    return 0


def report_cost_us(create: Callable[[StepRun], Callable[[], Report]]) -> float:
    """One report: made, sent and received."""
    make = create(StepRun(number=123_456, start_s=100.0, end_s=100.04, num_sessions=1, num_rows=16, rank_ms=[]))
    data = report_to_pb(make()).SerializeToString()
    made_us = cpu_us(lambda: report_to_pb(make()).SerializeToString(), 5000)
    return made_us + cpu_us(lambda: report_from_pb(worker_pb2.Report.FromString(data)), 5000)


async def measure(arguments: argparse.Namespace) -> dict[str, Run]:
    meter = Meter()
    meter.watch()
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    collector = spawn.Process(target=collect, args=(there,), daemon=True)
    collector.start()
    texts = prompts(arguments.num_prompts)
    runs: dict[str, Run] = {}
    async with LocalService(ServiceConfig(target=arguments.target, draft=arguments.draft)) as service:
        await service.start()
        pids = {process.role: process.pid for process in service.processes}
        addresses = {process.role: process.address for process in service.processes}
        config = CoordinatorConfig(
            targets=(str(addresses["target-worker"]),),
            drafts=(str(addresses["draft-worker"]),),
            tokenizer=arguments.target,
            telemetry=TelemetryConfig(otlp_endpoint=await asyncio.to_thread(here.recv), trace_level=arguments.level),
        )
        exporter = SpanExport(config.telemetry.otlp_endpoint)
        exporter._exporter.export = meter.timed("spans exported", exporter._exporter.export)  # type: ignore[method-assign]
        tracing = Tracing(config.telemetry, exporter=exporter)
        app = App(config, create_server(ServerConfig(), SERVICE_NAMES), Coordinator(config, tracing=tracing))
        workers = [psutil.Process(pid) for role, pid in pids.items() if role != "coordinator"]
        async with app.running():
            await app.wait_ready()
            await one_run(app, texts[:2], arguments.max_tokens, 1, meter, workers)
            for name, every in SAMPLED.items():
                runs[name] = await one_run(app, texts, arguments.max_tokens, every, meter, workers)
    collector.kill()
    return runs


async def one_run(
    app: App, texts: Sequence[str], max_tokens: int, every: int, meter: Meter, workers: Sequence[psutil.Process]
) -> Run:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    client = spawn.Process(target=ask, args=(app.server.address, texts, max_tokens, every, there))
    spans: Counter[str] = Counter()
    tracing = app.coordinator.tracing
    count = count_spans(tracing, spans)
    meter.seconds.clear()
    before_s = cpu_s(workers)
    client.start()
    rounds, client_s = await asyncio.to_thread(here.recv)
    while tracing.num_open or tracing.num_pending:  # noqa: ASYNC110 - a benchmark may look again and again
        await asyncio.sleep(0.05)
    all_s = cpu_s(workers) - before_s + client_s
    await asyncio.to_thread(client.join)
    count()
    return Run(
        rounds=rounds,
        all_s=all_s,
        made_s=meter.seconds["spans made"],
        exported_s=meter.seconds["spans exported"],
        spans=spans,
    )


def count_spans(tracing: Tracing, spans: Counter[str]) -> Callable[[], None]:
    """Counts what is exported from now on, until the result is called."""
    exporter = tracing._exporter
    assert exporter is not None
    put = exporter.put

    def counted(batch: Sequence[Span]) -> None:
        spans.update(span.name for span in batch)
        put(batch)

    exporter.put = counted  # type: ignore[method-assign]

    def stop() -> None:
        exporter.put = put  # type: ignore[method-assign]

    return stop


def cpu_s(workers: Sequence[psutil.Process]) -> float:
    """Of the workers, and of this process: the coordinator."""
    times = [worker.cpu_times() for worker in workers]
    return time.process_time() + sum(one.user + one.system for one in times)


def summary(run: Run, report_us: dict[str, float]) -> str:
    report_s = run.report_s(report_us)
    traced_s = run.made_s + run.exported_s + report_s

    def us(seconds: float) -> str:
        return f"{1e6 * seconds / run.rounds:6.1f}"

    parts = [
        f"{run.rounds} rounds of {1e3 * run.all_s / run.rounds:.2f} ms CPU",
        f"{sum(run.spans.values()) / run.rounds:.2f} spans a round",
        f"made {us(run.made_s)} us",
        f"exported {us(run.exported_s)} us",
        f"reports {us(report_s)} us",
        f"tracing {100 * traced_s / run.all_s:.2f} %",
    ]
    return "  ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
