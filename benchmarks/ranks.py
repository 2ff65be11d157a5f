"""What ranks on a CPU pay to work together: sums, logits gathered, and what sending candidates instead would take.

Owns: the figures of docs/decisions/0010 and 0017. Must not know: models, requests. It reports CPU time of the rank's
thread, which a busy machine disturbs least, and the time that passes; minima are those of the undisturbed call.

Run: python -m benchmarks.ranks [--size 2] [--rows 16] [--vocab 151936] [--hidden 1536] [--network]

`--network`: as ranks of several hosts do, here over loopback, and without the candidates.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from specpipe.engine.parallel.collective import Collective, create_store
from specpipe.engine.parallel.meeting import LOOPBACK
from specpipe.engine.parallel.mesh import MeshEnd, create_mesh
from specpipe.engine.parallel.shared_memory import open_end
from specpipe.engine.parallel.table import vocabulary_range
from specpipe.sampling.coupled import Chooser
from specpipe.types import SamplingParams

NUM_CALLS = 40
NUM_POSITIONS = 4  # of the rows of one step: nodes of equal depth share a position and its noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("size", 2), ("rows", 16), ("vocab", 151_936), ("hidden", 1536)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--network", action="store_true")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--fds", type=int, nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank > 0:
        end = MeshEnd(arguments.fds[0], arguments.fds[1:]) if arguments.fds else None
        measure_collectives(arguments, end, create_store(LOOPBACK, arguments.port) if arguments.port else None)
        return
    ends = [] if arguments.network else create_mesh(arguments.size)
    store = create_store(LOOPBACK) if arguments.network else None
    others = [start_rank(rank, ends[rank] if ends else None, store) for rank in range(1, arguments.size)]
    measure_collectives(arguments, ends[0] if ends else None, store)
    for other in others:
        other.wait()
    if not arguments.network:
        measure_candidates(arguments)


def start_rank(rank: int, end: MeshEnd | None, store: Any) -> subprocess.Popen[bytes]:
    meeting = ["--fds", *map(str, (end.memory_fd, *end.peer_fds))] if end else ["--port", str(store.port)]
    command = [sys.executable, "-m", "benchmarks.ranks", *sys.argv[1:], "--rank", str(rank), *meeting]
    other = subprocess.Popen(command, pass_fds=end.fds if end else ())
    if end:
        end.close()
    return other


def measure_collectives(arguments: argparse.Namespace, end: MeshEnd | None, store: Any) -> None:
    rank, size, num_columns = arguments.rank, arguments.size, arguments.vocab
    collective = Collective(store, rank, size, torch.device("cpu"), open_end(end, rank) if end else None)
    first, last = vocabulary_range(num_columns, rank, size)
    own = torch.randn(arguments.rows, last - first)
    for num_rows in (1, arguments.rows):
        x = torch.randn(num_rows, arguments.hidden)
        report(f"rank {rank}: sum of [{num_rows}, {arguments.hidden}]", lambda x=x: collective.sum(x))
    report(
        f"rank {rank}: gather of [{arguments.rows}, {num_columns}]", lambda: collective.gather_columns(own, num_columns)
    )


def measure_candidates(arguments: argparse.Namespace) -> None:
    """The least that a rank must do to know which tokens of its part can still be chosen, without sending them."""
    num_columns = vocabulary_range(arguments.vocab, 0, arguments.size)[1]
    rows = torch.randn(arguments.rows, num_columns).numpy() * 3
    report("a rank's own candidates, temperature 0", lambda: [row.argmax() for row in rows])
    for name, params in (("temperature 1", SamplingParams()), ("temperature 1, top-p 0.9", SamplingParams(top_p=0.9))):

        def choose(params: SamplingParams = params) -> None:
            chooser = Chooser(params, num_columns)
            for i, row in enumerate(rows):
                chooser.choose(row, i % NUM_POSITIONS)

        report(f"a rank's own candidates, {name}", choose)


def report(what: str, call: Callable[[], object]) -> None:
    """Of calls after three that do not count."""
    cpu_ms, passed_ms = [], []
    with torch.inference_mode():
        for _ in range(NUM_CALLS + 3):
            start, start_cpu = time.perf_counter(), time.thread_time()
            call()
            cpu_ms.append((time.thread_time() - start_cpu) * 1e3)
            passed_ms.append((time.perf_counter() - start) * 1e3)
    told = [f"median {statistics.median(times[3:]):.3f}, least {min(times[3:]):.3f}" for times in (cpu_ms, passed_ms)]
    sys.stdout.write(f"{what:<50} CPU ms: {told[0]} | ms: {told[1]}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
