"""Faults of every kind under load: no answer is wrong, lost, doubled or cut silently, and all gets well by itself.

One fleet of real processes. `test_chaos_at_length.py` has the long runs.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import findings
import pytest
from chaos import chosen_seed, run_chaos
from fleet import RelayNetwork, running_fleet
from oracle import Oracle
from tiny_models import make_pair

SEED = 123  # all kinds of faults, and few restarts of what takes long to start


@pytest.mark.timeout(1800)
async def test_fifteen_faults_over_a_hundred_requests_change_no_answer(tmp_path: Path) -> None:
    seed = chosen_seed(SEED)
    pair = make_pair(tmp_path / "pair", max_positions=2048)
    oracle = Oracle(pair.target)
    async with AsyncExitStack() as stack:
        network = RelayNetwork(stack, seed)
        fleet = await stack.enter_async_context(running_fleet(network, pair, tmp_path))
        report = await run_chaos(fleet, oracle, seed=seed, num_faults=15, num_requests=100)
    findings.record(f"{report}; {network.num_mangled} messages lost, doubled or late")
