"""The coordinator as a process of its own: no torch in it, clear refusals at start, an orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

import pytest
from coordinator_process import running_coordinator, workers
from tcp_relay import is_listening
from waiting import wait_until

from specpipe.answers import ChatMessage
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.errors import WorkerUnavailableError
from specpipe.types import Mode


async def test_a_running_coordinator_has_no_torch() -> None:
    async with running_coordinator(*workers()) as running:
        await wait_until(lambda: running.is_ready, timeout_s=60)
        async with GenerateClient(running.address) as client:
            for prompt in ("def add(left, right):", (ChatMessage(role="user", content="Hello"),)):
                answer = await client.answer(
                    GenerateRequest(prompt=prompt, max_tokens=8, mode=Mode.SYNC, stop=("never",)), timeout_s=30
                )
                assert answer.finished is not None
        mapped = await asyncio.to_thread(Path(f"/proc/{running.process.pid}/maps").read_text)
        assert "tokenizers" in mapped
        assert "torch" not in mapped
        running.process.send_signal(signal.SIGTERM)
        assert await running.end() == 0
        assert "PyTorch" not in running.log
        assert "Traceback" not in running.log


async def test_sigterm_lets_answers_end_and_closes_the_port_to_new_ones() -> None:
    """Their client makes another connection, which leads to another coordinator where there is one."""
    target, draft = workers()
    async with running_coordinator(target, draft) as running:
        await wait_until(lambda: running.is_ready, timeout_s=60)
        async with GenerateClient(running.address) as client:
            target.gate.clear()
            events = client.generate(GenerateRequest(prompt=(5, 6), max_tokens=40, ignore_eos=True), timeout_s=30)
            first = asyncio.ensure_future(anext(events))
            await wait_until(lambda: (target.thread.num_pending(1) == 0 and target.num_sessions == 1) or first.done())
            running.process.send_signal(signal.SIGTERM)
            await wait_until(lambda: not is_listening(running.address))
            with pytest.raises(WorkerUnavailableError, match="nothing listens there"):
                await client.answer(GenerateRequest(prompt=(5, 6)), timeout_s=10)
            target.gate.set()
            answer = Answer()
            answer.add(await first)
            async for event in events:
                answer.add(event)
            assert len(answer.token_ids) == 40
            assert answer.finished is not None
        assert await running.end() == 0


@pytest.mark.parametrize(("grace_s", "num_signals"), [(0.3, 1), (0.0, 1), (60.0, 2)])
async def test_an_answer_longer_than_the_grace_ends_with_an_error_and_exit_code_zero(
    grace_s: float, num_signals: int
) -> None:
    """No grace at all, and a second signal, end it as soon."""
    target, draft = workers()
    async with running_coordinator(target, draft, grace_s=grace_s) as running:
        await wait_until(lambda: running.is_ready, timeout_s=60)
        async with GenerateClient(running.address) as client:
            target.gate.clear()
            answering = asyncio.ensure_future(client.answer(GenerateRequest(prompt=(5, 6)), timeout_s=30))
            await wait_until(lambda: target.thread.heartbeat().num_sessions == 1 or "request" in running.log)
            await asyncio.sleep(0)
            running.process.send_signal(signal.SIGTERM)
            if num_signals > 1:
                await wait_until(lambda: "not serving" in running.log)
                running.process.send_signal(signal.SIGTERM)
            with pytest.raises(WorkerUnavailableError, match="the service is stopping"):
                await answering
        assert await running.end() == 0
        assert "Traceback" not in running.log
        target.gate.set()


async def test_a_port_in_use_is_named_and_exits_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = int(taken.getsockname()[1])
        async with running_coordinator(*workers(), port=port) as running:
            assert await running.end() == 2
            assert f"port {port}" in running.log
            assert "Traceback" not in running.log


async def test_a_draft_with_another_tokenizer_ends_the_start_in_one_sentence() -> None:
    async with running_coordinator(*workers(tokenizer_fingerprint="other")) as running:
        assert await running.end() == 1
        assert "their tokenizers differ" in running.log
        assert "Traceback" not in running.log


async def test_a_missing_tokenizer_ends_the_start_in_one_sentence(tmp_path: Path) -> None:
    async with running_coordinator(*workers(), tokenizer=tmp_path) as running:
        assert await running.end() == 2
        assert "no tokenizer could be loaded" in running.log
        assert "Traceback" not in running.log
