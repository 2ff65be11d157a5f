"""Ranks that share memory: sums and columns are whole and stay until one's own next call; a lost peer is an error."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specpipe.engine.parallel import shared_memory
from specpipe.engine.parallel.collective import Collective
from specpipe.engine.parallel.mesh import create_mesh
from specpipe.engine.parallel.shared_memory import SharedMemory, open_end
from specpipe.engine.parallel.table import vocabulary_range
from specpipe.errors import WorkerUnavailableError

NUM_RANKS = 3


@pytest.fixture
def ends() -> Iterator[list[SharedMemory]]:
    opened = [open_end(end, rank) for rank, end in enumerate(create_mesh(NUM_RANKS))]
    yield opened
    for end in opened:
        end.close()


def on_all(work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """What `work` returns on each rank, run at the same time."""
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(work, range(NUM_RANKS)))


@pytest.mark.parametrize("area_bytes", [64, 400, 1 << 20])
def test_sums_are_the_same_bits_on_each_rank(
    ends: list[SharedMemory], area_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "AREA_BYTES", area_bytes)
    parts = torch.randn(5, NUM_RANKS, 7, 9)

    def work(rank: int) -> torch.Tensor:
        return torch.stack([ends[rank].sum(part[rank].clone()) for part in parts])

    sums = on_all(work)
    torch.testing.assert_close(sums[0], parts.sum(dim=1))
    assert all(torch.equal(found, sums[0]) for found in sums)


@pytest.mark.parametrize("num_columns", [2, 4, 97])
@pytest.mark.parametrize("max_rows", [1, 2, 100])
def test_columns_are_joined_also_where_they_do_not_divide_or_fit(
    ends: list[SharedMemory], num_columns: int, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "MATRIX_BYTES", max_rows * num_columns * 4)
    whole = torch.randn(5, num_columns)

    def work(rank: int) -> torch.Tensor:
        collective = Collective(None, rank, NUM_RANKS, torch.device("cpu"), ends[rank])
        first, end = vocabulary_range(num_columns, rank, NUM_RANKS)
        none = collective.gather_columns(whole[:0, first:end], num_columns)
        assert none.shape[0] == 0
        return collective.gather_columns(whole[:, first:end], num_columns).clone()

    assert torch.equal(on_all(work)[0], whole)


def test_what_was_joined_stays_while_peers_go_on() -> None:
    """Rank 0 still reads when the other has published its next part already."""
    mine, other = (open_end(end, rank) for rank, end in enumerate(create_mesh(2)))
    with ThreadPoolExecutor(1) as pool:
        going_on = pool.submit(lambda: [other.join_columns(torch.full((4, 3), float(i)), 3, 6) for i in range(1, 4)])
        for i in range(1, 4):
            joined = mine.join_columns(torch.full((4, 3), -float(i)), 0, 6)
            if i < 3:
                assert select.select([mine._peers[1]], [], [], 30)[0]  # told: the next part is written
            assert joined.tolist() == [[-float(i)] * 3 + [float(i)] * 3] * 4
        going_on.result()
    mine.close()
    other.close()


def test_a_silent_peer_is_lost_after_the_limit(ends: list[SharedMemory]) -> None:
    ends[0].limit_time(0.2)
    with pytest.raises(WorkerUnavailableError, match=r"rank 1 did not answer within 0\.2 s"):
        ends[0].sum(torch.ones(3))


def test_a_peer_that_is_gone_is_lost_at_once(ends: list[SharedMemory]) -> None:
    ends[1].close()
    with pytest.raises(WorkerUnavailableError, match="rank 1 is gone"):
        ends[0].sum(torch.ones(3))


def test_a_waiting_rank_sleeps(ends: list[SharedMemory]) -> None:
    """Ranks may outnumber cores: who waits must leave the core to those who compute."""
    for end in ends:
        end.limit_time(0.5)
    before = time.thread_time()
    with pytest.raises(WorkerUnavailableError):
        ends[0].sum(torch.ones(3))
    assert time.thread_time() - before < 0.1
