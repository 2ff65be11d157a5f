"""With the prefix cache hot, answers of real models are those of a cold worker, token for token (float32).

Sharing changes where a prefill is cut, and so the last bits of keys and values. The random models here have logits far
enough apart that this decides nothing; near ties are the subject of docs/decisions/0009-prefix-sharing.md.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from engine_cases import VOCAB, create_model, create_runner
from engine_folders import save_model
from parallel_ranks import parallel_model
from target_simulator import create_open

from specpipe.config import EngineConfig, TargetWorkerConfig
from specpipe.engine.interface import StepBatch, StepModel
from specpipe.types import Close, Commit, Failed, Mode, Open, SessionMessage
from target_worker.worker import TargetLoop

MODES = [Mode.OFF, Mode.PIPELINED]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Worker:
    """A target loop over a real model: opens in, whole answers out. Time is the number of times that it was asked."""

    def __init__(self, model: StepModel, *, has_prefix_cache: bool = True) -> None:
        self.num_rows = 0
        self.answers: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self._finished: set[int] = set()
        self._model = model
        engine = EngineConfig(model="tiny", max_batch_tokens=32, has_prefix_cache=has_prefix_cache)
        ticks = itertools.count()
        self.info, self.num_slots, self.clear_slots = model.info, model.num_slots, model.clear_slots
        self.rank_ms = model.rank_ms
        self.loop = TargetLoop(self, TargetWorkerConfig(engine=engine), self._take, lambda: next(ticks) * 1e-4)

    def forward(self, batch: StepBatch) -> object:
        self.num_rows += batch.num_rows
        return self._model.forward(batch)

    def open(self, opened: Open) -> None:
        self.answers[opened.session] = []
        self.loop.receive(1, opened)

    def step(self) -> None:
        self.loop.run_once()
        self.loop.check()

    def cancel(self, session: int) -> None:
        self._finished.add(session)
        self.loop.receive(1, Close(session=session))

    def run(self) -> None:
        while self.answers.keys() - self._finished:
            self.step()

    def ask(self, opened: Open) -> list[int]:
        self.open(opened)
        self.run()
        return self.answers[opened.session]

    def _take(self, link: int, message: SessionMessage) -> None:
        assert not isinstance(message, Failed), message
        if isinstance(message, Commit):
            self.answers[message.session] += message.tokens
            self.cached.setdefault(message.session, message.stats.num_cached)
            if message.finish_reason is not None:
                self._finished.add(message.session)


def question(session: int, tokens: Iterable[int], mode: Mode, max_tokens: int = 12) -> Open:
    """Greedy or sampled by turns; drafts are looked up in the text."""
    drafter = "none" if mode is Mode.OFF else "ngram"
    temperature = 0.9 * (session % 2)
    return create_open(
        session, list(tokens), mode=mode, drafter=drafter, temperature=temperature, seed=4, max_tokens=max_tokens
    )


def converse(worker: Worker, mode: Mode) -> list[list[int]]:
    """Answers to prompts that share: the same again, another ending, the next turn, a beginning."""
    prompt = [i * i % 50 + 2 for i in range(70)]
    first = worker.ask(question(1, prompt, mode))
    prompts = [prompt, [*prompt[:-1], 1], [*prompt, *first, 3, 4], prompt[:33], [*prompt, *first[:5], 6], prompt]
    return [first, *(worker.ask(question(session, tokens, mode)) for session, tokens in enumerate(prompts, start=2))]


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("llama", Mode.OFF),
        ("llama", Mode.PIPELINED),
        ("mistral", Mode.PIPELINED),
        ("gemma3", Mode.OFF),
        ("gpt2", Mode.PIPELINED),
    ],
)
def test_hot_answers_equal_cold_ones(family: str, mode: Mode) -> None:
    hot = Worker(create_runner(create_model(family)))
    cold = Worker(create_runner(create_model(family)), has_prefix_cache=False)
    assert converse(hot, mode) == converse(cold, mode)
    assert list(cold.cached.values()) == [0] * 7
    assert list(hot.cached.values()) == [0, 69, 69, 81, 32, 75, 69]
    assert hot.num_rows == cold.num_rows - sum(hot.cached.values())


@pytest.mark.parametrize("seed", range(2))
def test_eviction_preemption_and_cancels_change_no_token(seed: int) -> None:
    chance = random.Random(seed)
    beginnings = [[i * k % VOCAB for i in range(60)] for k in (3, 5)]
    opens = []
    for session in range(1, 13):
        tokens = beginnings[chance.randrange(2)][: chance.choice([30, 60])]
        tokens = [*tokens, *(chance.randrange(VOCAB) for _ in range(chance.choice([0, 2])))]
        opens.append(question(session, tokens, chance.choice(MODES), max_tokens=chance.randint(5, 50)))
    hot = Worker(create_runner(create_model("llama"), num_slots=170))
    cold = Worker(create_runner(create_model("llama")), has_prefix_cache=False)
    cancelled = set()
    for opened in opens:
        hot.open(opened)
        for _ in range(chance.randint(0, 12)):
            hot.step()
        if chance.random() < 0.2:
            cancelled.add(opened.session)
            hot.cancel(opened.session)
    hot.run()
    assert hot.loop.sharing.num_shares > 0
    assert hot.loop.sharing.num_evicted_slots > 0
    for opened in opens:
        expected, answer = cold.ask(opened), hot.answers[opened.session]
        assert answer == (expected[: len(answer)] if opened.session in cancelled else expected)


def test_ranks_share_as_one(tmp_path: Path) -> None:
    """A session's first announcement names slots that another one computed, on every rank."""
    save_model(tmp_path, "llama")
    cold = Worker(create_runner(create_model("llama")), has_prefix_cache=False)
    expected = converse(cold, Mode.PIPELINED)
    with parallel_model(tmp_path, 2) as model:
        hot = Worker(model)
        assert converse(hot, Mode.PIPELINED) == expected
        assert list(hot.cached.values()) == [0, 69, 69, 81, 32, 75, 69]


def test_ranks_keep_up_with_eviction_and_preemption(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    opens = [question(i, [(3 + i % 3) * j % VOCAB for j in range(40)], Mode.PIPELINED, 40) for i in range(1, 9)]
    with parallel_model(tmp_path, 2, num_slots=190) as model:
        hot = Worker(model)
        for opened in opens:
            hot.open(opened)
        hot.run()
    assert hot.loop._room.num_preempted > 0
    assert hot.loop.sharing.num_shares > 0
    assert hot.loop.sharing.num_evicted_slots > 0
    cold = Worker(create_runner(create_model("llama")), has_prefix_cache=False)
    assert [hot.answers[opened.session] for opened in opens] == [cold.ask(opened) for opened in opens]
