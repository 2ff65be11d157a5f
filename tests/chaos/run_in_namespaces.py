"""The part of a chaos run that must itself be in a network namespace, since it is the client: a process of its own.

    ip netns exec PREFIX-client python run_in_namespaces.py PREFIX FOLDER SEED NUM_FAULTS NUM_REQUESTS

Prints the report. Exit code 1, and why, if an invariant does not hold.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from chaos import run_chaos
from fleet import running_fleet
from namespaces import NamespaceNetwork, Namespaces
from oracle import Oracle
from tiny_models import make_pair

NAMES = ("client", "coordinator-1", "coordinator-2", "target-1", "target-group", "draft-1", "draft-2")


async def run(prefix: str, folder: Path, seed: int, num_faults: int, num_requests: int) -> str:
    network = NamespaceNetwork(Namespaces(prefix, NAMES))
    pair = make_pair(folder / "pair", max_positions=2048)
    oracle = Oracle(pair.target)
    async with running_fleet(network, pair, folder) as fleet:
        report = await run_chaos(fleet, oracle, seed=seed, num_faults=num_faults, num_requests=num_requests)
    return "\n".join([*report.story, str(report)])


def main(prefix: str, folder: str, *numbers: str) -> int:
    seed, num_faults, num_requests = map(int, numbers)
    try:
        told, code = asyncio.run(run(prefix, Path(folder), seed, num_faults, num_requests)), 0
    except AssertionError as error:
        told, code = str(error), 1
    sys.stdout.write(told + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
