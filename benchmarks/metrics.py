"""What counting costs: CPU time of everything that is counted for a step, and of a scrape.

    python -m benchmarks.metrics [--step-ms 6]

Each call is repeated and the best of several runs is told, by the clock of the thread. A target step of one session is
told of once, with one round at the coordinator, one extension and one wait. A draft step is told of once, with one
extension. Messages are weighed on both sides of both streams.
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence

from coordinator.metric_sums import RoundMetrics
from coordinator.metrics import CoordinatorMetrics
from specpipe.rpc_metrics import RpcMetrics
from specpipe.spans import Role
from specpipe.telemetry.instruments import Instruments
from specpipe.telemetry.provider import Provider
from specpipe.telemetry.resources import own_process, resource_of
from specpipe.telemetry.worker_metrics import WorkerMetrics
from specpipe.types import Commit, Mode, Origin, RoundStats

REPEATS = 5
CALLS = 20_000
SCRAPES = 50


def cpu_us(call: Callable[[], object], num_calls: int = CALLS) -> float:
    """Of one call, the best run of several."""
    return min(_run_us(call, num_calls) for _ in range(REPEATS))


def _run_us(call: Callable[[], object], num_calls: int) -> float:
    started_s = time.thread_time()
    for _ in range(num_calls):
        call()
    return 1e6 * (time.thread_time() - started_s) / num_calls


def worker_costs() -> dict[str, float]:
    metrics = WorkerMetrics("target", Instruments())
    return {
        "a step": cpu_us(lambda: metrics.step(0.006, num_sessions=1, num_rows=9, num_prefill_rows=0, num_nodes=8)),
        "a wait before it": cpu_us(lambda: metrics.idle("extension")),
        "an extension": cpu_us(lambda: metrics.extension("grafted", num_nodes=8, lag_s=0.004)),
    }


def commit_cost() -> float:
    sums = RoundMetrics(Instruments())
    stats = RoundStats(num_rounds=1, num_drafted=8, num_verified=8, num_hits=1, num_judged=3, num_first_ranked=2)
    origins = (Origin.ACCEPTED, Origin.ACCEPTED, Origin.RECOVERED)
    commit = Commit(session=1, round=2, base=9, tokens=(1, 2, 3), origins=origins, stats=stats)
    return cpu_us(lambda: sums.add(commit, Mode.PIPELINED))


def message_cost() -> float:
    sizes = RpcMetrics(Instruments()).sizes
    return cpu_us(lambda: sizes.record(300, "specpipe.rpc.v1.TargetService/Connect", "sent"))


def scrape_ms() -> float:
    """Of a coordinator's page, in the process that is scraped: its client included, so at most so much."""
    instruments = Instruments()
    CoordinatorMetrics(instruments).rounds.add(
        Commit(session=1, round=1, base=1, tokens=(1,), origins=(Origin.PLAIN,)), Mode.OFF
    )
    resource = resource_of(own_process(Role.COORDINATOR))
    provider = Provider(instruments, resource, host="127.0.0.1", port=0, otlp_endpoint="")
    try:
        started_s = time.process_time()
        for _ in range(SCRAPES):
            with urllib.request.urlopen(f"http://{provider.address}/metrics") as page:
                page.read()
        return 1000 * (time.process_time() - started_s) / SCRAPES
    finally:
        provider.close()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=6.0, help="of a target step, to compare with")
    step_ms = parser.parse_args(arguments).step_ms
    worker, message_us, commit_us = worker_costs(), message_cost(), commit_cost()
    target_us = sum(worker.values()) + 2 * message_us
    for name, us in {**worker, "a message": message_us, "a round, at the coordinator": commit_us}.items():
        write(name, us, "us")
    write("a scrape", scrape_ms(), "ms")
    write("a step's share of all that", target_us, "us")
    write(f"of {step_ms:g} ms", target_us / (10 * step_ms), "%")
    return 0


def write(what: str, value: float, unit: str) -> None:
    sys.stdout.write(f"{what:<30} {value:6.2f} {unit}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
