"""A target worker as its coordinator sees it: the real service over gRPC with a tiny random Llama."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import specpipe.demo
from specpipe.config import EngineConfig, ServerConfig, TargetWorkerConfig
from specpipe.errors import ConfigError, ErrorCode
from specpipe.reports import Report, StepKind
from specpipe.types import (
    Batch,
    Close,
    Closed,
    Commit,
    Extension,
    Failed,
    FinishReason,
    Mode,
    NeedTokens,
    Open,
    Origin,
    RoundStats,
    SamplingParams,
    SpeculationParams,
    StopRules,
)
from specpipe.worker_client import WorkerLink
from target_worker.service import serve

PROMPT = (11, 12, 13, 14)
NUM_SLOTS = 700
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    tokenizer = Path(specpipe.demo.__file__).parent / "models" / "target"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, path / name)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """What transformers' own generate says after the prompt."""
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    settings = GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return [int(token) for token in output[0, len(PROMPT) :]]


@asynccontextmanager
async def worker(folder: Path, **fields: int) -> AsyncIterator[WorkerLink]:
    """A running target worker and a link to it."""
    read_fd, write_fd = os.pipe()
    config = TargetWorkerConfig(
        server=ServerConfig(ready_fd=write_fd),
        engine=EngineConfig(model=str(folder), num_slots=NUM_SLOTS, dtype="float32"),
        **fields,
    )
    task = asyncio.create_task(serve(config))
    with os.fdopen(read_fd) as ready:
        line = asyncio.create_task(asyncio.to_thread(ready.readline))
        await asyncio.wait([task, line], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            os.close(write_fd)
            await task
        try:
            async with WorkerLink.connect((await line).strip(), "target", incarnation=1) as link:
                yield link
        finally:
            task.cancel()
            await asyncio.wait([task])


def create_open(session: int, *, mode: Mode = Mode.OFF, k: int | None = None, max_tokens: int = NUM_TOKENS) -> Open:
    return Open(
        session=session,
        request_id=f"r{session}",
        tokens=PROMPT,
        num_prompt_tokens=len(PROMPT),
        sampling=SamplingParams(temperature=0.0),
        stops=StopRules(max_length=len(PROMPT) + max_tokens),
        speculation=SpeculationParams(mode=mode, drafter="model", num_speculative_tokens=k),
    )


class Answers:
    """Reads a link; answers commits with a chain of the tokens that `script` says will come."""

    def __init__(self, link: WorkerLink, script: list[int] | None = None, length: int = 8) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.origins: list[Origin] = []
        self.messages: list[object] = []
        self._link = link
        self._script = script
        self._length = length

    def open(self, opened: Open) -> None:
        """The first draft comes with it, so that there is one however slow this process is."""
        self.tokens[opened.session] = []
        self._link.send(opened)
        self._draft(opened.session)

    async def until_closed(self, *sessions: int) -> None:
        left = set(sessions)
        while left:
            batch = await anext(self._link)
            self.messages += batch.reports
            for commit in batch.commits:
                self._take(commit)
            self.messages += _others(batch)
            left -= {closed.session for closed in batch.closed}

    def _take(self, commit: Commit) -> None:
        tokens = self.tokens[commit.session]
        assert commit.base == len(PROMPT) + len(tokens)
        tokens += commit.tokens
        self.origins += commit.origins
        self.messages.append(commit)
        if commit.finish_reason is not None:
            self._link.send(Close(session=commit.session))
        else:
            self._draft(commit.session)

    def _draft(self, session: int) -> None:
        if self._script is None:
            return
        num_told = len(self.tokens[session])
        chain = self._script[num_told : num_told + self._length]
        self._link.send(
            Extension(
                session=session,
                base=len(PROMPT) + num_told,
                parents=tuple(range(len(chain))),
                tokens=tuple(chain),
                confidences=(0.9,) * len(chain),
                is_exhausted=True,
            )
        )


def _others(batch: Batch) -> list[object]:
    return [*batch.failures, *batch.closed]


@pytest.mark.parametrize("mode", list(Mode))
async def test_the_answer_is_what_transformers_says(folder: Path, expected: list[int], mode: Mode) -> None:
    async with worker(folder) as link:
        answers = Answers(link, script=expected)
        answers.open(create_open(1, mode=mode, k=8))
        await answers.until_closed(1)
    assert answers.tokens[1] == expected
    assert (Origin.ACCEPTED in answers.origins) is (mode is not Mode.OFF)


@pytest.mark.parametrize("mode", list(Mode))
async def test_every_round_is_reported_before_its_commit(folder: Path, expected: list[int], mode: Mode) -> None:
    """Over the stream: commits merge, and so do reports, but a record never comes after what it led to."""
    async with worker(folder) as link:
        answers = Answers(link, script=expected)
        sent_s = time.perf_counter()
        answers.open(replace(create_open(1, mode=mode, k=8), wants_reports=True))
        await answers.until_closed(1)
        passed_ms = (time.perf_counter() - sent_s) * 1e3
        assert (link.hello.process.pid, link.hello.process.version) == (os.getpid(), specpipe.__version__)
        assert link.num_rejected == 0
    assert answers.tokens[1] == expected
    reports = [message for message in answers.messages if isinstance(message, Report)]
    rounds = [step for report in reports for step in report.steps if step.kind is StepKind.VERIFY]
    stats = sum((message.stats for message in answers.messages if isinstance(message, Commit)), RoundStats())
    assert [step.round for step in rounds] == list(range(1, stats.num_rounds + 1))
    assert sum(step.num_committed for step in rounds) == NUM_TOKENS
    assert sum(step.num_verified for step in rounds) == stats.num_verified
    assert sum(step.exposed_ms for step in rounds) == pytest.approx(stats.exposed_ms)
    assert sum(step.forward_ms for step in rounds) == pytest.approx(stats.step_ms)
    assert sum(report.num_lost for report in reports) == 0
    assert all(report.since_open_ms < passed_ms for report in reports), "counted from when Open came"
    assert rounds[0].since_open_ms < 0.5 * passed_ms
    told = 0
    for message in answers.messages:
        if isinstance(message, Report):
            told += sum(step.kind is StepKind.VERIFY for step in message.steps)
        elif isinstance(message, Commit):
            assert told >= message.round


async def test_reports_are_for_those_who_ask(folder: Path) -> None:
    async with worker(folder) as link:
        answers = Answers(link)
        answers.open(create_open(1))
        answers.open(replace(create_open(2), wants_reports=True))
        await answers.until_closed(1, 2)
    assert {message.session for message in answers.messages if isinstance(message, Report)} == {2}


async def test_sync_takes_as_few_rounds_as_there_can_be(folder: Path, expected: list[int]) -> None:
    async with worker(folder) as link:
        answers = Answers(link, script=expected, length=3)
        answers.open(create_open(1, mode=Mode.SYNC, k=3))
        await answers.until_closed(1)
    commits = [message for message in answers.messages if isinstance(message, Commit)]
    assert sum(commit.stats.num_rounds for commit in commits) <= NUM_TOKENS // 4 + 2
    assert answers.tokens[1] == expected


async def test_many_sessions_in_all_modes_at_once(folder: Path, expected: list[int]) -> None:
    wrong = [(token + 1) % 4096 for token in expected]
    async with worker(folder) as link:
        for script in (expected, wrong, None):
            answers = Answers(link, script=script)
            numbers = [100 * id(script) % 10**9 + i for i in range(9)]
            for i, number in enumerate(numbers):
                answers.open(create_open(number, mode=list(Mode)[i % 3], k=4, max_tokens=NUM_TOKENS - i))
            await answers.until_closed(*numbers)
            for i, number in enumerate(numbers):
                assert answers.tokens[number] == expected[: NUM_TOKENS - i]
        assert link.heartbeat.num_sessions in range(10)


async def test_a_refused_open_ends_itself_and_nothing_else(folder: Path, expected: list[int]) -> None:
    async with worker(folder) as link:
        answers = Answers(link)
        opened = create_open(1)
        answers.open(replace(opened, adapter="another"))
        answers.open(create_open(2))
        await answers.until_closed(1, 2)
    [failed] = [message for message in answers.messages if isinstance(message, Failed)]
    assert (failed.session, failed.code) == (1, ErrorCode.INVALID_ARGUMENT)
    assert answers.tokens[2] == expected


async def test_close_in_the_middle_and_need_tokens(folder: Path, expected: list[int]) -> None:
    async with worker(folder) as link:
        link.send(create_open(1))
        batch = await anext(link)
        while not batch.commits:
            batch = await anext(link)
        link.send(NeedTokens(session=1, have=len(PROMPT)))
        await _until(link, lambda batch: any(c.base == len(PROMPT) for c in batch.commits))
        link.send(Close(session=1, reason="client left"))
        closed = await _until(link, lambda batch: bool(batch.closed))
        assert closed.closed[0].session == 1
        answers = Answers(link)
        answers.open(create_open(2))
        await answers.until_closed(2)
        assert answers.tokens[2] == expected
    last = [message for message in answers.messages if isinstance(message, Commit)][-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert isinstance(answers.messages[-1], Closed)


async def _until(link: WorkerLink, condition) -> Batch:  # type: ignore[no-untyped-def]
    while True:
        batch = await anext(link)
        if condition(batch):
            return batch


def test_a_worker_has_at_least_one_rank(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        TargetWorkerConfig(engine=EngineConfig(model=str(folder)), tensor_parallel_size=0)
