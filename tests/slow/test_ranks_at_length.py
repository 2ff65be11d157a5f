"""Ranks that are processes of their own, four of them, and on networks that are cut: the same answers, and no orphan.

How long each end took is among the findings; what must hold is that all of them end.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import findings
import pytest
from oracle import Oracle, Sampling
from ranks_on_hosts import Host, RanksOnHosts, ranks_on_hosts
from running import READY_TIMEOUT_S
from tiny_models import TinyPair

sys.path.append(str(Path(__file__).parents[1] / "chaos"))

import namespaces
from faults import Kind, Way

PROMPT = "def tokens(line):"
NUM_TOKENS = 40

pytestmark = [pytest.mark.slow, pytest.mark.timeout(20 * READY_TIMEOUT_S)]


@pytest.fixture(scope="module")
def oracle(tiny_pair: TinyPair) -> Oracle:
    return Oracle(tiny_pair.target)


@pytest.fixture(scope="module")
def four(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RanksOnHosts]:
    with ranks_on_hosts(tmp_path_factory.mktemp("four"), tiny_pair.target, (Host(),) * 4) as found:
        yield found


def check_answer(group: RanksOnHosts, oracle: Oracle) -> None:
    """Through a coordinator that lives for this answer."""
    host = group.hosts[0]
    flags = ("--target", group.target, "--tokenizer", str(group.model), "--drafter", "ngram", "--host", host.address)
    coordinator = group.start("coordinator", host, "coordinator", *flags)
    asked = ("--temperature", "0", "--max-tokens", str(NUM_TOKENS), "--ignore-eos", "--json")
    asking = group.start("ask", host, "generate", "--connect", coordinator.address(), *asked, PROMPT)
    assert asking.process.stdout is not None
    told = asking.process.stdout.read()
    assert told, asking.said()
    token_ids = json.loads(told)["token_ids"]
    assert len(token_ids) == NUM_TOKENS
    oracle.check(oracle.encode(PROMPT), token_ids, Sampling())
    coordinator.signal(signal.SIGTERM)


def codes_at_the_end(group: RanksOnHosts, what: str, *, but: tuple[int, ...] = ()) -> list[int | None]:
    """Exit codes of all ranks but these, once they have ended."""
    began_s = time.monotonic()
    for rank, part in enumerate(group.ranks):
        if rank not in but:
            part.process.wait(READY_TIMEOUT_S)
    findings.record(f"{what}: all ranks had ended after {time.monotonic() - began_s:.1f} s")
    return [part.process.returncode for part in group.ranks]


def test_four_ranks_say_what_one_process_says_and_end_in_order_with_rank_0(four: RanksOnHosts, oracle: Oracle) -> None:
    four.form()
    check_answer(four, oracle)
    for rank in (3, 0):
        four.ranks[rank].signal(signal.SIGTERM)  # the first goes on until rank 0 has ended, too
    assert codes_at_the_end(four, "SIGTERM of rank 0") == [0, 0, 0, 0]


def test_a_killed_rank_takes_all_others_with_it(four: RanksOnHosts) -> None:
    four.form()
    four.ranks[2].signal(signal.SIGKILL)
    assert codes_at_the_end(four, "SIGKILL of rank 2") == [1, 1, -signal.SIGKILL, 1]
    assert "rank 2" in four.ranks[0].said()


def test_a_frozen_rank_0_is_left_and_ends_when_it_wakes(tiny_pair: TinyPair, tmp_path: Path) -> None:
    with ranks_on_hosts(tmp_path, tiny_pair.target, (Host(), Host())) as two:
        two.form()
        two.ranks[0].signal(signal.SIGSTOP)
        assert codes_at_the_end(two, "SIGSTOP of rank 0", but=(0,)) == [None, 1]
        assert "rank 0 has been silent" in two.ranks[1].said()
        two.ranks[0].signal(signal.SIGCONT)
        assert codes_at_the_end(two, "SIGCONT of rank 0") == [1, 1]


@pytest.mark.parametrize("ways", [tuple(Way), (Way.THERE,), (Way.BACK,)], ids=["both", "there", "back"])
def test_a_network_that_is_cut_ends_the_ranks_on_both_sides(
    tiny_pair: TinyPair, tmp_path: Path, oracle: Oracle, ways: tuple[Way, ...]
) -> None:
    if reason := namespaces.obstacle():
        pytest.skip(reason)
    names = ("rank-0", "rank-1")
    with namespaces.namespaces(names) as spaces:
        network = namespaces.NamespaceNetwork(spaces)
        hosts = [Host(address=spaces.address(name), prefix=spaces.command(name)) for name in names]
        with ranks_on_hosts(tmp_path, tiny_pair.target, hosts) as group:
            group.form()
            check_answer(group, oracle)
            asyncio.run(network.begin(Kind.HOLD, "rank-0>rank-1", ways))
            assert codes_at_the_end(group, f"packets dropped ({len(ways)} ways)") == [1, 1]
