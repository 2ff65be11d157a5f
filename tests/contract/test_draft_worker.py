"""A draft worker as its coordinator sees it: the real service over gRPC with a tiny random Llama."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specpipe.demo
from draft_worker.service import serve
from specpipe.codec import RelayedExtension
from specpipe.config import DraftWorkerConfig, EngineConfig, ServerConfig
from specpipe.errors import ConfigError
from specpipe.reports import SessionEventKind, StepKind
from specpipe.tree import DraftTree
from specpipe.types import (
    Batch,
    Close,
    Closed,
    Commit,
    Extension,
    Failed,
    Mode,
    Open,
    Origin,
    SamplingParams,
    SpeculationParams,
    StopRules,
)
from specpipe.worker_client import WorkerLink

PROMPT = (11, 12, 13, 14)
NUM_SLOTS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft")
    tokenizer = Path(specpipe.demo.__file__).parent / "models" / "draft"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, path / name)
    torch.manual_seed(0)
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


@asynccontextmanager
async def worker(folder: Path, **engine: int) -> AsyncIterator[str]:
    """A running draft worker; yields its address."""
    read_fd, write_fd = os.pipe()
    config = DraftWorkerConfig(
        server=ServerConfig(ready_fd=write_fd),
        engine=EngineConfig(model=str(folder), num_slots=NUM_SLOTS, dtype="float32", **engine),
    )
    task = asyncio.create_task(serve(config))
    with os.fdopen(read_fd) as ready:
        line = asyncio.create_task(asyncio.to_thread(ready.readline))
        await asyncio.wait([task, line], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            os.close(write_fd)
            await task
        try:
            yield (await line).strip()
        finally:
            task.cancel()
            await asyncio.wait([task])


class Reader:
    """Messages of one link, one at a time."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link
        self._waiting: list[object] = []

    async def next(self) -> object:
        while not self._waiting:
            self._waiting = _messages(await anext(self._link))
        return self._waiting.pop(0)

    async def until(self, kind: type, session: int) -> list[object]:
        """All messages up to the first of this kind for this session."""
        messages = []
        while True:
            messages.append(message := await self.next())
            if isinstance(message, kind) and message.session == session:
                return messages

    async def tree(self, tokens: list[int], depth: int) -> DraftTree:
        """Session 1's tree below these tokens, read until it is `depth` deep."""
        tree = DraftTree(base=len(tokens))
        while max((node.depth for node in tree.nodes()), default=0) < depth:
            message = await self.next()
            if isinstance(message, Extension) and message.session == 1:
                tree.graft(message, tokens)
        return tree


def _messages(batch: Batch) -> list[object]:
    extensions = [relayed.read() for relayed in batch.extensions if isinstance(relayed, RelayedExtension)]
    return [*extensions, *batch.need_tokens, *batch.failures, *batch.closed]


def open_message(session: int = 1, *, mode: Mode = Mode.PIPELINED) -> Open:
    return Open(
        session=session,
        request_id=f"r{session}",
        tokens=PROMPT,
        num_prompt_tokens=len(PROMPT),
        sampling=SamplingParams(temperature=0.0),
        stops=StopRules(max_length=200),
        speculation=SpeculationParams(mode=mode, drafter="model"),
    )


def commit_message(base: int, tokens: list[int]) -> Commit:
    return Commit(
        session=1, round=1, base=base, tokens=tuple(tokens), origins=(Origin.PLAIN,) * len(tokens), next_budget=16
    )


def greedy(folder: Path, tokens: list[int], count: int) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.inference_mode():
        for _ in range(count):
            tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
    return tokens[-count:]


def first_path(tree: DraftTree, count: int) -> list[int]:
    path, node = [], tree.root
    while node.children and len(path) < count:
        node = next(iter(node.children.values()))
        path.append(node.token)
    return path


async def test_a_session_from_open_to_closed(folder: Path) -> None:
    """Extensions come unasked, follow commits, and all slots are free after Closed."""
    text = greedy(folder, list(PROMPT), 12)
    async with worker(folder) as address, WorkerLink.connect(address, "draft", 1) as link, asyncio.timeout(60):
        assert link.hello.model is not None
        assert (link.hello.model.vocab_size, link.hello.num_slots) == (4096, NUM_SLOTS)
        reader = Reader(link)
        link.send(open_message())
        tokens = list(PROMPT)
        tree = await reader.tree(tokens, 3)
        assert first_path(tree, 3) == text[:3]
        link.send(commit_message(4, text[:5]))
        tokens += text[:5]
        tree = await reader.tree(tokens, 3)
        assert first_path(tree, 3) == text[5:8]
        link.send(Close(session=1))
        assert await reader.until(Closed, 1)
        while link.heartbeat.num_free_slots != NUM_SLOTS - 1 or link.heartbeat.num_sessions:
            await anext(link)


async def test_every_draft_step_is_reported_before_its_extension(folder: Path) -> None:
    async with worker(folder) as address, WorkerLink.connect(address, "draft", 1) as link, asyncio.timeout(60):
        assert link.hello.process.pid == os.getpid()
        link.send(replace(open_message(), wants_reports=True))
        steps: dict[int, float] = {}  # share of each, by its number
        told: set[int] = set()
        events: list[SessionEventKind] = []
        told_ms, num_extensions, is_closed = 0.0, 0, False
        while not is_closed:
            batch = await anext(link)
            for report in batch.reports:
                steps |= {step.step: step.share_ms for step in report.steps if step.kind is StepKind.DRAFT}
                events += [event.kind for event in report.events]
            for extension in batch.extensions:
                assert extension.draft_step in steps
                told.add(extension.draft_step)
                told_ms += extension.draft_share_ms
                num_extensions += 1
            if num_extensions >= 5 and SessionEventKind.RESTARTED not in events:
                link.send(commit_message(4, [4095]))
            elif SessionEventKind.RESTARTED in events:
                link.send(Close(session=1))
            is_closed = bool(batch.closed)
        assert link.num_rejected == 0
        last = max(told)
        assert sum(share for step, share in steps.items() if step <= last) == pytest.approx(told_ms)


async def test_a_miss_restarts_from_the_committed_text(folder: Path) -> None:
    async with worker(folder) as address, WorkerLink.connect(address, "draft", 1) as link, asyncio.timeout(60):
        reader = Reader(link)
        link.send(open_message())
        tree = await reader.tree(list(PROMPT), 2)
        stranger = next(token for token in range(100, 4096) if token not in tree.root.children)
        link.send(commit_message(4, [stranger]))
        tokens = [*PROMPT, stranger]
        tree = await reader.tree(tokens, 2)
        assert first_path(tree, 2) == greedy(folder, tokens, 2)


async def test_sync_gets_one_chain_for_each_base(folder: Path) -> None:
    async with worker(folder) as address, WorkerLink.connect(address, "draft", 1) as link, asyncio.timeout(60):
        reader = Reader(link)
        link.send(open_message(mode=Mode.SYNC))
        (extension,) = await reader.until(Extension, 1)
        assert isinstance(extension, Extension)
        assert list(extension.tokens) == greedy(folder, list(PROMPT), 4)
        assert extension.is_exhausted
        link.send(Close(session=1))
        assert await reader.until(Closed, 1) == [Closed(session=1, length=4)]


async def test_refusals_name_the_reason_and_neighbours_go_on(folder: Path) -> None:
    async with (
        worker(folder, max_sessions=1) as address,
        WorkerLink.connect(address, "draft", 1) as link,
        asyncio.timeout(60),
    ):
        reader = Reader(link)
        link.send(open_message(1))
        await reader.tree(list(PROMPT), 1)
        link.send(open_message(2))
        messages = await reader.until(Closed, 2)
        failures = [message for message in messages if isinstance(message, Failed)]
        assert [(failed.session, failed.is_retryable) for failed in failures] == [(2, True)]
        link.send(commit_message(4, [7]))
        await reader.tree([*PROMPT, 7], 1)


async def test_a_link_that_ends_frees_its_sessions_and_the_next_one_works(folder: Path) -> None:
    async with worker(folder) as address, asyncio.timeout(60):
        for incarnation in (1, 2):
            async with WorkerLink.connect(address, "draft", incarnation) as link:
                while link.heartbeat.num_free_slots != NUM_SLOTS - 1:
                    await anext(link)
                link.send(open_message())
                await Reader(link).tree(list(PROMPT), 1)


async def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        async with worker(tmp_path / "nothing"):
            pass
