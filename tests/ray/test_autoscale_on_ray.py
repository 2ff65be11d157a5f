"""Draft workers that come and go by themselves on a local Ray, under real load, while answers stream."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator
from typing import Any

import pytest
from findings import record
from local_ray import NEEDS_RAY, LocalCluster, local_cluster, short_folder

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
  down_after_s: 5
  settle_s: 2
"""


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with short_folder() as folder, local_cluster(folder, CLUSTER) as service:
        yield service


def test_a_second_draft_worker_comes_under_load_and_goes_after_it_and_no_answer_changes(cluster: LocalCluster) -> None:
    expected = cluster.answer("--mode", "off", num_tokens=NUM_TOKENS)
    answers: list[list[int]] = []
    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS + 1) as clients:
        both = clients.submit(cluster.wait_for, lambda now: num_drafts(now) == 2)
        while not both.done():
            answers += clients.map(lambda _: cluster.answer(num_tokens=NUM_TOKENS), range(NUM_CLIENTS))
        status = both.result()
        answers += clients.map(lambda _: cluster.answer(num_tokens=NUM_TOKENS), range(NUM_CLIENTS))
    assert (status["changes"][0]["before"], status["changes"][0]["after"]) == (1, 2)
    assert "busy" in status["changes"][0]["reason"] or "have no draft worker" in status["changes"][0]["reason"]
    status = cluster.wait_for(lambda now: num_drafts(now) == 1)
    assert (status["changes"][-1]["before"], status["changes"][-1]["after"]) == (2, 1)
    assert not any(replica["ends"] for replica in status["replicas"]), "nothing failed on the way"
    answers.append(cluster.answer(num_tokens=NUM_TOKENS))
    assert all(answer == expected for answer in answers)
    record(f"{len(answers)} equal answers; {'; '.join(change['reason'] for change in status['changes'])}")


def num_drafts(status: dict[str, Any]) -> int:
    return sum(replica["role"] == "draft-worker" for replica in status["replicas"])
