"""`specpipe generate --connect` as a process, against a service that says what each test wants it to say."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from running import environment, specpipe, write_lines
from waiting import wait_until

from coordinator.codec import event_to_pb
from specpipe.answers import AnswerEvent, Chunk, Finished, SpeculationStats, Started, Timing
from specpipe.config import ServerConfig
from specpipe.errors import CapacityError
from specpipe.rpc.v1 import generate_pb2, generate_pb2_grpc
from specpipe.server import Server, create_server
from specpipe.types import FinishReason, Mode, Origin, Rule

README = Path(__file__).parents[2] / "README.md"
SERVICE = "specpipe.rpc.v1.GenerateService"
STARTED = Started(request_id="r", model="m", prompt_tokens=1, seed=3)
STATS = SpeculationStats(
    mode=Mode.OFF,
    rule=Rule.COUPLED,
    rounds=1,
    drafted_tokens=0,
    verified_tokens=0,
    accepted_tokens=0,
    mean_acceptance_length=1.0,
    acceptance_rate=None,
    hit_rate=None,
    lookup_rate=None,
    draft_ms=0.0,
    exposed_draft_ms=0.0,
    hidden_draft_ms=0.0,
    wasted_draft_ms=0.0,
    target_step_ms=1.0,
    draft_step_ms=None,
    step_gap_ms=None,
)
FINISHED = Finished(
    finish_reason=FinishReason.LENGTH,
    prompt_tokens=1,
    completion_tokens=1,
    timing=Timing(ttft_ms=1.0, tpot_ms=None, total_ms=1.0),
    speculation=STATS,
)


def chunk(text: str) -> Chunk:
    return Chunk(token_ids=(1,), text=text, origins=(Origin.PLAIN,), round=1, text_lengths=(len(text),))


class ScriptedService(generate_pb2_grpc.GenerateServiceServicer):
    """Answers "fail" with an error, "forever" with a stream that does not end, everything else with itself."""

    def __init__(self) -> None:
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.num_running = 0

    async def Generate(  # noqa: N802 (the name is the RPC's)
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        self.requests.append(request)
        self.num_running += 1
        try:
            async for event in self._events(request.prompt):
                yield event_to_pb(event)
        finally:
            self.num_running -= 1

    async def _events(self, prompt: str) -> AsyncIterator[AnswerEvent]:
        yield STARTED
        if prompt == "fail":
            raise CapacityError("full")
        yield chunk(f"<{prompt}>")
        while prompt == "forever":
            await asyncio.sleep(0.05)
            yield chunk(".")
        yield FINISHED


class Rig:
    def __init__(self, server: Server, service: ScriptedService) -> None:
        self.server = server
        self.service = service

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        """`specpipe generate` with these, asking the service."""
        return await start("generate", "--connect", self.server.address, *arguments)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serving(
        lambda server, service: generate_pb2_grpc.add_GenerateServiceServicer_to_server(service, server)
    ) as it:
        yield it


@asynccontextmanager
async def serving(add: Callable[[Any, ScriptedService], None]) -> AsyncIterator[Rig]:
    server, service = create_server(ServerConfig(), [SERVICE]), ScriptedService()
    add(server.grpc_server, service)
    await server.start()
    try:
        yield Rig(server, service)
    finally:
        await server.stop()


async def start(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*specpipe(*arguments), stdout=pipe, stderr=pipe, env=environment())


async def end_of(process: asyncio.subprocess.Process, timeout_s: float = 30.0) -> tuple[int | None, str, str]:
    out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    return process.returncode, out.decode(), err.decode()


async def test_a_prompt_that_fails_has_its_error_in_its_place_and_the_others_go_on(rig: Rig) -> None:
    code, out, err = await end_of(await rig.start("--json", "a", "fail", "b"))
    a, failed, b = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (1, "")
    assert (a["text"], b["text"]) == ("<a>", "<b>")
    assert failed == {"prompt": "fail", "error": {"code": "RESOURCE_EXHAUSTED", "message": "full"}}


async def test_a_finished_answer_is_on_stdout_while_a_later_one_still_runs(rig: Rig) -> None:
    process = await rig.start("--json", "a", "forever", "b")
    assert process.stdout is not None
    assert json.loads(await asyncio.wait_for(process.stdout.readline(), 30))["prompt"] == "a"
    process.send_signal(signal.SIGINT)
    code, out, err = await end_of(process)
    assert (code, out, err) == (130, "", "")  # no half object, and none out of order


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_while_text_streams_ends_the_command_and_the_request(
    rig: Rig, number: signal.Signals, expected: int
) -> None:
    process = await rig.start("forever")
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readexactly(12), 30) == b"<forever>..."
    process.send_signal(number)
    code, out, err = await end_of(process)
    assert (code, out.strip("."), err) == (expected, "", "")
    await wait_until(lambda: rig.service.num_running == 0)


async def test_a_service_that_goes_while_it_answers_is_no_end_of_an_answer(rig: Rig) -> None:
    process = await rig.start("forever", "--json")
    await wait_until(lambda: rig.service.num_running == 1, timeout_s=30)
    await rig.server.stop()
    code, out, err = await end_of(process)
    (failed,) = [json.loads(line) for line in out.splitlines()]
    assert (code, err, failed["error"]["code"]) == (1, "", "UNAVAILABLE")
    assert failed["error"]["message"] == f"{rig.server.address}: it is stopping"


async def test_a_server_of_another_kind_is_named(rig: Rig) -> None:
    async with serving(lambda server, service: None) as other:
        code, out, err = await end_of(await other.start("a"))
    assert (code, out) == (1, "")
    assert err == (
        f"error: {other.server.address}: it is no specpipe service of the kind that was asked: check the address\n"
    )


async def test_a_peer_that_says_nothing_is_given_up_after_seconds() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        code, _, err = await end_of(await start("generate", "a", "--connect", address), timeout_s=40)
    assert code == 1
    assert err == f"error: {address}: it does not answer: it may still be starting, or the address is wrong\n"


async def test_the_python_example_of_the_readme_shows_an_answer_from_its_start_to_its_end(rig: Rig) -> None:
    example = README.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    script = example.replace("127.0.0.1:50051", rig.server.address)
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-W", "error", "-c", script)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment())
    code, out, err = await end_of(process)
    assert (code, err) == (0, "")
    assert out == "r 3\n<def parse(line):>\n FinishReason.LENGTH 1 None\n"


async def test_a_file_of_prompts_is_asked_as_it_says(rig: Rig, tmp_path: Path) -> None:
    lines = ({"prompt_token_ids": [4, 5], "temperature": 0}, {"prompt": "b", "rule": "rejection", "top_k": 2})
    path = write_lines(tmp_path / "prompts.jsonl", *lines)
    code, out, err = await end_of(await rig.start("--json", "--prompts", path, "--temperature", "0.5"))
    assert (code, err) == (0, "")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == [[4, 5], "b"]
    by_ids, by_text = sorted(rig.service.requests, key=lambda request: request.prompt)
    assert list(by_ids.prompt_token_ids.ids) == [4, 5]
    assert (by_ids.sampling.temperature, by_text.sampling.temperature) == (0, 0.5)
    assert by_text.speculation.rule == 2
    assert by_text.sampling.top_k == 2


async def test_a_broken_line_of_the_file_is_named_before_anything_is_asked(rig: Rig, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n')
    code, out, err = await end_of(await rig.start("--prompts", str(path)))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {path}, line 2: not JSON")
    assert err.count("\n") == 1
    assert not rig.service.requests
