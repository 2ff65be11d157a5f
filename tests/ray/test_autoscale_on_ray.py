"""Draft workers that come and go by themselves on a local Ray, under real load, while answers stream."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from findings import record
from local_ray import NEEDS_RAY, PROMPT, LocalCluster, local_cluster, short_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), *NEEDS_RAY]

NUM_CLIENTS = 4
NUM_TOKENS = 150
CLUSTER = """
name: scaled
grace_s: 5
autoscale:  # eager: any draft worker that has something to do is busy, and none guesses so well that it is enough
  draft_workers: {min: 1, max: 2, max_exposed_share: 0.0001, min_hit_rate: 1.0, busy_share: 0.02}
  every_s: 1
  up_after_s: 2
  down_after_s: 10
  settle_s: 2
"""
LOAD = """
import asyncio, json, sys
from specpipe.answers import Chunk
from specpipe.client import GenerateClient, GenerateRequest

async def ask(client, is_over, answers):
    while not is_over.done():
        request = GenerateRequest(
            prompt=sys.argv[2], temperature=0, max_tokens=int(sys.argv[3]), ignore_eos=True
        )
        answers.append([t async for e in client.generate(request) if isinstance(e, Chunk) for t in e.token_ids])

async def main():
    answers = []
    is_over = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    async with GenerateClient(sys.argv[1]) as client:
        await asyncio.gather(*(ask(client, is_over, answers) for _ in range(int(sys.argv[4]))))
    print(json.dumps(answers))

asyncio.run(main())
"""


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with short_folder() as folder, local_cluster(folder, CLUSTER) as service:
        yield service


def test_a_second_draft_worker_comes_under_load_and_goes_after_it_and_no_answer_changes(cluster: LocalCluster) -> None:
    expected = cluster.answer("--mode", "off", num_tokens=NUM_TOKENS)
    arguments = [cluster.address, PROMPT, str(NUM_TOKENS), str(NUM_CLIENTS)]
    with cluster.begin([sys.executable, "-c", LOAD, *arguments]) as load:
        both = cluster.wait_for(lambda now: len(drafts_of(now)) == 2)
        cluster.wait_for(lambda _: all(page["counts"]["draft_step_s"] for page in cluster.pages(drafts_of(both))))
        answers = json.loads(load.communicate()[0])
    assert both["changes"][0]["before"] == 1
    assert "busy" in both["changes"][0]["reason"]
    assert len(answers) >= NUM_CLIENTS
    assert all(answer == expected for answer in answers)
    alone = cluster.wait_for(lambda now: len(drafts_of(now)) == 1)
    assert (alone["changes"][-1]["before"], alone["changes"][-1]["after"]) == (2, 1)
    assert not any(replica["ends"] for replica in alone["replicas"]), "nothing failed on the way"
    assert cluster.answer(num_tokens=NUM_TOKENS) == expected
    record(f"{len(answers)} equal answers; {'; '.join(change['reason'] for change in alone['changes'])}")


def drafts_of(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [replica for replica in status["replicas"] if replica["role"] == "draft-worker"]
