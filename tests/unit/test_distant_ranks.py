"""A group whose ranks come over the network, here from threads: the same logits, and what of its command a rank keeps.

What the ranks compute goes through a process group, their control through a real rendezvous.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engine_cases import Driver
from engine_folders import save_model
from parallel_ranks import parallel_model

from specpipe.config import EngineConfig, RendezvousConfig
from specpipe.engine.parallel.channel import Channel
from specpipe.engine.parallel.distant import DistantRanks, claim_of
from specpipe.engine.parallel.distant_rank import merged
from specpipe.engine.parallel.group import RankGroup
from specpipe.engine.parallel.model import ParallelModel
from specpipe.engine.parallel.rank import Ending, Mailbox, RankHello, run
from specpipe.engine.parallel.rendezvous import join
from specpipe.errors import ConfigError, SpecpipeError, WorkerUnavailableError

TOKEN = "a secret of this group"
PATIENCE_S = 120.0
NEVER = threading.Event()


class DialledRank:
    """A rank of another host, on a thread."""

    def __init__(self, address: str, engine: EngineConfig, rank: int, size: int) -> None:
        self.endings: list[Ending] = []
        self.failures: list[str] = []
        self._place = (address, engine, rank, size)
        self.channel: Channel | None = None
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    def _main(self) -> None:
        address, engine, rank, size = self._place
        try:
            claim = claim_of(engine, rank, size)
            self.channel, payload = join(address, TOKEN, claim, patience_s=PATIENCE_S, is_over=NEVER)
            hello = RankHello.from_bytes(payload)
            run(Mailbox(self.channel, self.endings.append), hello, merged(engine, hello), has_one_host=False)
        except SpecpipeError as error:
            self.failures.append(str(error))


@contextmanager
def distant_model(folder: Path, size: int) -> Iterator[tuple[ParallelModel, list[DialledRank]]]:
    engine = EngineConfig(model=str(folder), num_slots=400)
    others = DistantRanks(engine, size, RendezvousConfig(rank=0, address="127.0.0.1:0", token=TOKEN))
    ranks: list[DialledRank] = []
    with RankGroup(engine, size, others) as group:
        group.start()
        address = f"127.0.0.1:{others.rendezvous.port}"
        own = EngineConfig(model=str(folder), max_sessions=3)
        ranks += [DialledRank(address, own, rank, size) for rank in reversed(range(1, size))]
        yield group.load(), ranks
    for rank in ranks:
        rank.thread.join(PATIENCE_S)
        assert rank.channel is not None
        rank.channel.close()


@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_those_of_ranks_that_share_memory(tmp_path: Path, size: int) -> None:
    save_model(tmp_path, "gpt2")
    with parallel_model(tmp_path, size) as model:
        expected = steps(model)
    with distant_model(tmp_path, size) as (model, ranks):
        found = steps(model)
        assert len(model.rank_ms) == size
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert [rank.endings for rank in ranks] == [[Ending.IN_ORDER]] * (size - 1)


def steps(model: ParallelModel) -> list[np.ndarray]:
    """Logits of a few, with rows of two sessions in one of them."""
    driver = Driver(model, seed=3)  # type: ignore[arg-type]
    sessions = [driver.open(21), driver.open(9)]
    driver.step(*(driver.rows(session, 8) for session in sessions))
    driver.step(driver.rows(sessions[0], 13))
    return [row.logits for row in driver.seen]


def test_what_steps_are_like_is_said_by_rank_0_and_what_is_on_a_host_by_its_own_command() -> None:
    rank_0 = EngineConfig(model="/a", dtype="bfloat16", num_slots=900, max_batch_tokens=32, num_threads=8, core=1)
    own = EngineConfig(model="/b", dtype="float32", num_slots=100, num_threads=2)
    config = merged(own, RankHello.create(1, 2, rank_0))
    assert (config.model, config.num_threads, config.core) == ("/b", 2, None)
    assert (config.dtype, config.num_slots, config.max_batch_tokens) == ("bfloat16", 900, 32)
    with pytest.raises(ConfigError, match="no configuration of ours"):
        merged(own, RankHello(rank=1, size=2, engine={"model": "/a", "more": 1}))


def test_a_rank_with_other_weights_is_refused_with_both_names_and_the_group_still_forms(tmp_path: Path) -> None:
    save_model(tmp_path / "right", "gpt2")
    save_model(tmp_path / "wrong", "llama")
    engine = EngineConfig(model=str(tmp_path / "right"))
    others = DistantRanks(engine, 2, RendezvousConfig(rank=0, address="127.0.0.1:0", token=TOKEN))
    with RankGroup(engine, 2, others) as group:
        group.start()
        address = f"127.0.0.1:{others.rendezvous.port}"
        wrong = claim_of(EngineConfig(model=str(tmp_path / "wrong")), 1, 2)
        with pytest.raises(ConfigError, match=r"rank 1 has the model wrong \(.*rank 0 has right \("):
            join(address, TOKEN, wrong, patience_s=PATIENCE_S, is_over=NEVER)
        channel, _ = join(address, TOKEN, claim_of(engine, 1, 2), patience_s=PATIENCE_S, is_over=NEVER)
        with pytest.raises(WorkerUnavailableError, match=r"rank 1 \(127.0.0.1\) has joined already"):
            join(address, TOKEN, claim_of(engine, 1, 2), patience_s=PATIENCE_S, is_over=NEVER)
        channel.close()


def test_a_rank_that_is_lost_is_told_by_its_number_and_host(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2")
    engine = EngineConfig(model=str(tmp_path))
    others = DistantRanks(engine, 3, RendezvousConfig(rank=0, address="127.0.0.1:0", token=TOKEN))
    lost: list[str] = []
    is_lost = threading.Event()

    def lose(error: SpecpipeError) -> None:
        lost.append(str(error))
        is_lost.set()

    with RankGroup(engine, 3, others) as group:
        group.start()
        group.watch(lose)
        address = f"127.0.0.1:{others.rendezvous.port}"
        first, _ = join(address, TOKEN, claim_of(engine, 1, 3), patience_s=PATIENCE_S, is_over=NEVER)
        second, _ = join(address, TOKEN, claim_of(engine, 2, 3), patience_s=PATIENCE_S, is_over=NEVER)
        endings: list[Ending] = []
        has_ended = threading.Event()
        Mailbox(first, lambda ending: (endings.append(ending), has_ended.set()))  # type: ignore[arg-type,func-returns-value]
        second.close()
        assert is_lost.wait(PATIENCE_S)
        assert has_ended.wait(PATIENCE_S), "a group that has lost a rank ends all of them"
    assert lost == ["rank 2 (127.0.0.1) ended"]
    assert endings == [Ending.GONE]
    first.close()
