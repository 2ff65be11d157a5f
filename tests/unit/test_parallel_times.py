"""How long each rank worked on a step reaches rank 0 with the step itself, without the ranks' waits for one another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_cases import Driver
from engine_folders import save_model
from parallel_ranks import parallel_model
from target_simulator import Answer, create_open

from specpipe.config import EngineConfig, TargetWorkerConfig
from specpipe.engine.parallel import shared_memory
from specpipe.engine.parallel.mesh import create_mesh
from specpipe.engine.parallel.shared_memory import SharedMemory, open_end
from specpipe.reports import StepKind
from specpipe.types import Commit, Mode, SessionMessage
from target_worker.worker import TargetLoop


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Clocks:
    """A clock for each thread, moved by the test alone."""

    def __init__(self) -> None:
        self._times = threading.local()

    def perf_counter(self) -> float:
        return getattr(self._times, "now", 1000.0)

    def pass_ms(self, count: float) -> None:
        self._times.now = self.perf_counter() + count / 1e3


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(shared_memory, "time", SimpleNamespace(perf_counter=clocks.perf_counter))
    return clocks


def beside(work: Callable[[SharedMemory], None], rank_0: Callable[[SharedMemory], None]) -> None:
    """Run both ranks' work at the same time, rank 0's here."""
    mine, other = (open_end(end, rank) for rank, end in enumerate(create_mesh(2)))
    thread = threading.Thread(target=work, args=(other,))
    thread.start()
    rank_0(mine)
    thread.join()
    mine.close()
    other.close()


def test_each_rank_is_told_by_its_own_clock_step_by_step(clocks: Clocks) -> None:
    told: list[list[float]] = []
    announced = threading.Semaphore(0)

    def follow(end: SharedMemory) -> None:
        for step in range(1, 4):
            announced.acquire()  # as a rank does: no step begins before rank 0 has ended the one before it
            end.begin_step()
            for _ in range(5):
                clocks.pass_ms(10.0 * step)
                end.sum(torch.ones(3))
            clocks.pass_ms(500.0)  # after its part of the last collective: no part of what rank 0 waits for

    def lead(end: SharedMemory) -> None:
        for step in range(1, 4):
            clocks.pass_ms(7000.0)  # between two steps
            announced.release()
            end.begin_step()
            for _ in range(5):
                clocks.pass_ms(1.0 * step)
                end.sum(torch.ones(3))
            clocks.pass_ms(0.5)
            told.append(end.end_step())

    beside(follow, lead)
    for step, times in enumerate(told, start=1):
        assert times == pytest.approx([5.0 * step + 0.5, 50.0 * step])


def test_waits_for_another_rank_are_no_work(monkeypatch: pytest.MonkeyPatch, clocks: Clocks) -> None:
    hear = SharedMemory._hear

    def late(end: SharedMemory, rank: int, peer: object) -> None:
        hear(end, rank, peer)  # type: ignore[arg-type]
        clocks.pass_ms(300.0)

    monkeypatch.setattr(SharedMemory, "_hear", late)
    told: list[list[float]] = []

    def follow(end: SharedMemory) -> None:
        end.begin_step()
        clocks.pass_ms(2.0)
        end.join_columns(torch.ones(1, 2), 2, 4)

    def lead(end: SharedMemory) -> None:
        end.begin_step()
        clocks.pass_ms(3.0)
        end.join_columns(torch.ones(1, 2), 0, 4)
        told.append(end.end_step())

    beside(follow, lead)
    assert told == [pytest.approx([3.0, 2.0])]


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared memory", "with the logits"])
def test_a_step_tells_what_each_rank_worked_and_no_more_than_it_took(tmp_path: Path, is_shared: bool) -> None:
    save_model(tmp_path, "llama")
    with parallel_model(tmp_path, 2, is_shared=is_shared) as model:
        assert list(model.rank_ms) == []
        driver = Driver(model, seed=3)  # type: ignore[arg-type]
        session = driver.open(21)
        for count in (13, 7, 1):
            started_s = time.perf_counter()
            driver.step(driver.rows(session, count))
            step_ms = (time.perf_counter() - started_s) * 1e3
            assert len(model.rank_ms) == 2
            assert all(0.0 < rank_ms < step_ms for rank_ms in model.rank_ms)


def test_every_record_of_a_worker_with_two_ranks_has_both_times(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    opened = create_open(1, [3 * i % 23 for i in range(40)], max_tokens=8, mode=Mode.OFF, wants_reports=True)
    answer = Answer(opened, list(opened.tokens))
    with parallel_model(tmp_path, 2) as model:
        engine = EngineConfig(model="tiny", max_batch_tokens=16)

        def take(_: int, message: SessionMessage) -> None:
            answer.take(message)

        loop = TargetLoop(model, TargetWorkerConfig(engine=engine), take)
        loop.receive(1, opened)
        while answer.finish_reason is None:
            loop.run_once()
    assert isinstance(answer.commits[-1], Commit)
    assert {step.kind for step in answer.book.steps} == {StepKind.PREFILL, StepKind.VERIFY}
    for step in answer.book.steps:
        assert len(step.rank_ms) == 2
        assert all(0.0 < rank_ms <= step.forward_ms for rank_ms in step.rank_ms)
    assert len({step.rank_ms for step in answer.book.steps}) == len(answer.book.steps)
