"""The command line from outside: output, exit codes, and that nothing is left running."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from oracle import Oracle
from running import descendants, environment, run_command, running_service, specpipe, write_lines
from tiny_models import TinyPair
from waiting import wait_until

from specpipe.answers import Chunk
from specpipe.client import GenerateClient, GenerateRequest
from specpipe.errors import SpecpipeError, WorkerUnavailableError


def test_generate_answers_a_file_of_prompts_in_order_and_leaves_nothing_running(
    tiny_pair: TinyPair, oracle: Oracle, tmp_path: Path
) -> None:
    ids = oracle.encode("for index")
    prompts = write_lines(
        tmp_path / "prompts.jsonl",
        {"prompt": "def tokens(", "max_tokens": 30},
        {"prompt": ""},
        {"prompt_token_ids": ids, "max_tokens": 20, "mode": "sync", "num_speculative_tokens": 2},
        {"prompt": "x", "temperature": 1.0, "seed": 9, "max_tokens": 3},
    )
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    models = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft))
    done = run_command(
        "generate", "--json", "--prompts", prompts, *models, "--temperature", "0", "--ignore-eos", "--max-tokens", "7"
    )
    assert done.returncode == 1, done.stderr  # one prompt failed
    first, bad, by_ids, sampled = [json.loads(line) for line in done.stdout.splitlines()]
    assert first["prompt"] == "def tokens("
    assert first["token_ids"] == oracle.greedy(oracle.encode("def tokens("), 30)
    assert first["text"] == oracle.decode(first["token_ids"])
    assert first["finish_reason"] == "length"
    assert first["usage"] == {"prompt_tokens": len(oracle.encode("def tokens(")), "completion_tokens": 30}
    assert set(first["timing"]) == {"ttft_ms", "tpot_ms", "total_ms"}
    assert first["speculation"]["mode"] == "pipelined"
    assert bad["error"]["code"] == "INVALID_ARGUMENT"
    assert set(bad) == {"prompt", "error"}
    assert by_ids["prompt"] == ids
    assert by_ids["speculation"]["mode"] == "sync"
    assert by_ids["speculation"]["accepted_tokens"] > 0
    assert by_ids["token_ids"] == oracle.greedy(ids, 20)
    assert (sampled["seed"], len(sampled["token_ids"])) == (9, 3)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(tiny_pair.target) in (p.info["cmdline"] or []) and "--parent-fd" in p.info["cmdline"] and p.ppid() == 1
    ]


def test_ctrl_c_ends_everything_with_130(tiny_pair: TinyPair) -> None:
    models = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft))
    process = subprocess.Popen(
        specpipe("generate", "x", *models, "--max-tokens", "100000", "--ignore-eos"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 30
    while len(children) < 2 and time.monotonic() < deadline:
        children = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


async def test_sigterm_lets_answers_finish_and_exits_with_0(tiny_pair: TinyPair, log_folder: Path) -> None:
    with running_service(log_folder / "drain.log", "--target", str(tiny_pair.target), "--draft", "none") as service:
        children = descendants(service.process.pid)
        async with GenerateClient(service.address) as client:
            count = 0
            request = GenerateRequest(prompt="x", temperature=0, max_tokens=200, ignore_eos=True)
            async for event in client.generate(request):
                if isinstance(event, Chunk):
                    if not count:
                        service.process.send_signal(signal.SIGTERM)
                    count += len(event.token_ids)
            assert count == 200
            with pytest.raises(WorkerUnavailableError):
                await client.answer(request, timeout_s=60)
        assert await asyncio.to_thread(service.process.wait, 60) == 0
        assert not psutil.wait_procs(children, timeout=5)[1]


async def test_children_end_when_their_parent_is_killed(tiny_pair: TinyPair, log_folder: Path) -> None:
    models = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft))
    with running_service(log_folder / "killed.log", *models) as service:
        children = descendants(service.process.pid)
        assert len(children) == 3
        os.kill(service.process.pid, signal.SIGKILL)
        await wait_until(
            lambda: not any(child.is_running() and child.status() != "zombie" for child in children), timeout_s=5
        )


def test_a_port_in_use_is_named_and_exits_with_2(tiny_pair: TinyPair) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        done = run_command("serve", "--target", str(tiny_pair.target), "--mode", "off", "--port", str(port))
    assert done.returncode == 2, done.stderr
    assert str(port) in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("error: ")


async def test_a_coordinator_that_dies_ends_the_service_with_1(tiny_pair: TinyPair, log_folder: Path) -> None:
    with running_service(log_folder / "coordinator.log", "--target", str(tiny_pair.target), "--mode", "off") as service:
        os.kill(service.pid("coordinator"), signal.SIGKILL)
        assert await asyncio.to_thread(service.process.wait, 20) == 1
        async with GenerateClient(service.address) as client:
            with pytest.raises(SpecpipeError):
                await client.answer(GenerateRequest(prompt="x"), timeout_s=5)
