"""What reports cost a worker and a coordinator, a round: CPU microseconds of making them, and of both codecs.

Owns: those figures. Must not know: models, requests, what a trace is. "No report" is the attribute test that every
round of every session pays.

Run: python -m benchmarks.reports [--rounds 20000] [--ranks 1]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from draft_worker.recording import DraftRecorder
from specpipe.codec_reports import report_from_pb, report_to_pb
from specpipe.recording import StepRun
from specpipe.reports import Report
from specpipe.rpc.v1 import worker_pb2
from specpipe.types import Commit, Origin, RoundStats
from target_worker.recording import RoundRecorder

NUM_REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    rank_ms = [40.0] * arguments.ranks if arguments.ranks > 1 else []
    run = StepRun(number=123_456, start_s=100.0, end_s=100.04, num_sessions=8, num_rows=64, rank_ms=rank_ms)
    for name, make in (("target round", target_round(run)), ("draft step", draft_step(run))):
        measure(name, make, arguments.rounds)
    write("no report", cpu_us(no_report(), arguments.rounds))


def measure(name: str, make: Callable[[], Report], count: int) -> None:
    data = report_to_pb(make()).SerializeToString()
    write(f"{name}: made", cpu_us(make, count))
    write(f"{name}: made and sent", cpu_us(lambda: report_to_pb(make()).SerializeToString(), count))
    write(f"{name}: received", cpu_us(lambda: report_from_pb(worker_pb2.Report.FromString(data)), count))
    write(f"{name}: bytes", len(data))


def write(what: str, value: float) -> None:
    sys.stdout.write(f"{what:<30} {value:6.1f}\n")


def target_round(run: StepRun) -> Callable[[], Report]:
    recorder = RoundRecorder(1 << 60, 90.0)
    commit = Commit(
        session=1 << 60,
        round=37,
        base=512,
        tokens=(1, 2, 3, 4),
        origins=(Origin.ACCEPTED,) * 3 + (Origin.BONUS,),
        verified_draft_steps=(41, 42, 43),
        stats=RoundStats(num_verified=15, num_accepted=3, num_hits=1, exposed_ms=0.7),
    )

    def make() -> Report:
        recorder.add_round(run, commit, num_rows=16, num_tree_nodes=180)
        report = recorder.take(100.05)
        assert report is not None
        return report

    return make


def draft_step(run: StepRun) -> Callable[[], Report]:
    recorder = DraftRecorder(1 << 60, 90.0)

    def make() -> Report:
        recorder.add_step(run, base=512, num_rows=8, num_tree_nodes=180, share_ms=5.0)
        report = recorder.take(100.05)
        assert report is not None
        return report

    return make


def no_report() -> Callable[[], None]:
    class Session:
        recorder = None

    session = Session()

    def test() -> None:
        if session.recorder is not None:
            raise AssertionError

    return test


def cpu_us(work: Callable[[], object], count: int) -> float:
    """CPU time of one call, the least of some repeats."""
    times = []
    for _ in range(NUM_REPEATS):
        started_s = time.thread_time()
        for _ in range(count):
            work()
        times.append((time.thread_time() - started_s) / count * 1e6)
    return min(times)


if __name__ == "__main__":
    main()
