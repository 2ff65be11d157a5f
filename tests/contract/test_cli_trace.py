"""`specpipe trace` and `generate --trace` as processes, against a service that keeps the trace each test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from running import environment, specpipe
from timeline_traces import four_rounds, long_trace

from coordinator.codec import event_to_pb
from specpipe.answers import Chunk, Finished, SpeculationStats, Started, Timing
from specpipe.cli.trace import MORE
from specpipe.codec_trace import trace_to_pb
from specpipe.config import ServerConfig
from specpipe.errors import TraceNotFoundError
from specpipe.rpc.v1 import generate_pb2, generate_pb2_grpc, trace_pb2, trace_pb2_grpc
from specpipe.server import create_server
from specpipe.spans import KeptTrace
from specpipe.types import FinishReason, Mode, Origin, Rule

SERVICE = "specpipe.rpc.v1.GenerateService"
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


class KeepingService(generate_pb2_grpc.GenerateServiceServicer, trace_pb2_grpc.TraceServiceServicer):
    """Answers a prompt with itself; its request id is the prompt. Keeps the traces that it is given."""

    def __init__(self) -> None:
        self.traces: dict[str, list[KeptTrace]] = {}  # what is told the first time, the second ...; the last for ever
        self.are_traced: list[bool] = []

    async def Generate(  # noqa: N802 (the name is the RPC's)
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        self.are_traced.append(request.trace)
        text = request.prompt
        yield event_to_pb(Started(request_id=text, model="m", prompt_tokens=1, seed=3))
        yield event_to_pb(Chunk(token_ids=(1,), text=text, origins=(Origin.PLAIN,), round=1, text_lengths=(len(text),)))
        timing = Timing(ttft_ms=1.0, tpot_ms=None, total_ms=1.0)
        yield event_to_pb(
            Finished(
                finish_reason=FinishReason.LENGTH,
                prompt_tokens=1,
                completion_tokens=1,
                timing=timing,
                speculation=STATS,
            )
        )

    async def GetTrace(  # noqa: N802
        self, request: trace_pb2.GetTraceRequest, context: Any
    ) -> trace_pb2.GetTraceResponse:
        kept = self.traces.get(request.request_id)
        if kept is None:
            raise TraceNotFoundError(f"no trace is kept of request {request.request_id!r}")
        return trace_to_pb(kept.pop(0) if len(kept) > 1 else kept[0])


class Rig:
    def __init__(self, service: KeepingService, address: str) -> None:
        self.service = service
        self.address = address

    async def run(self, *arguments: str) -> tuple[int | None, str, str]:
        """A command that asks the service. Returns its exit code, stdout and stderr."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *specpipe(*arguments, "--connect", self.address), stdout=pipe, stderr=pipe, env=environment()
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def serving(*, keeps_traces: bool) -> AsyncIterator[Rig]:
    server, service = create_server(ServerConfig(), [SERVICE]), KeepingService()
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(service, server.grpc_server)
    if keeps_traces:
        trace_pb2_grpc.add_TraceServiceServicer_to_server(service, server.grpc_server)
    await server.start()
    try:
        yield Rig(service, server.address)
    finally:
        await server.stop()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with serving(keeps_traces=True) as it:
        yield it


async def test_a_trace_is_drawn_on_stdout_without_colours_where_that_is_no_terminal(rig: Rig) -> None:
    rig.service.traces["r-1"] = [four_rounds()]
    code, out, err = await rig.run("trace", "r-1")
    assert (code, err) == (0, "")
    assert out.startswith("request r-1 · demo · pipelined\n")
    assert "╍ miss ╍" in out
    assert "\x1b" not in out
    assert all(len(line) <= 80 for line in out.splitlines())


async def test_rounds_can_be_asked_for_and_what_is_left_out_is_said(rig: Rig) -> None:
    rig.service.traces["r-long"] = [long_trace(200)]
    code, out, _ = await rig.run("trace", "r-long")
    assert (code, MORE in " ".join(out.split())) == (0, True)
    code, out, _ = await rig.run("trace", "r-long", "--rounds", "41-43")
    assert (code, "rounds 41 to 43" in out) == (0, True)
    code, out, err = await rig.run("trace", "r-long", "--rounds", "300-400")
    assert (code, out) == (2, "")
    assert err == "error: --rounds 300-400: the request has rounds 1 to 200\n"


@pytest.mark.parametrize(("name", "start"), [("t.html", "<!doctype html>"), ("t.SVG", "<svg ")])
async def test_a_trace_goes_to_a_file_of_the_kind_that_its_name_says(
    rig: Rig, tmp_path: Path, name: str, start: str
) -> None:
    rig.service.traces["r-1"] = [four_rounds()]
    assert await rig.run("trace", "r-1", "--output", str(tmp_path / name)) == (0, "", "")
    assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)


async def test_as_json_a_trace_is_one_object(rig: Rig) -> None:
    rig.service.traces["r-1"] = [four_rounds()]
    code, out, _ = await rig.run("trace", "r-1", "--json")
    told = json.loads(out)
    assert code == 0
    assert set(told) == {"request_id", "trace_id", "is_complete", "totals", "rounds", "spans"}
    assert len(told["spans"]) == len(four_rounds().spans)


async def test_a_request_of_which_nothing_is_kept_is_said_in_one_sentence(rig: Rig) -> None:
    assert await rig.run("trace", "nobody") == (1, "", "error: no trace is kept of request 'nobody'\n")


async def test_a_service_that_keeps_no_traces_says_so_and_its_answers_are_shown_all_the_same() -> None:
    async with serving(keeps_traces=False) as rig:
        reason = f"{rig.address} keeps no traces: an older version, or no coordinator"
        assert await rig.run("trace", "x") == (1, "", f"error: {reason}\n")
        code, out, err = await rig.run("generate", "hello", "--trace")
        assert (code, out.startswith("hello\n")) == (1, True)
        assert err.endswith(f"error: the trace cannot be shown: {reason}\n")


async def test_an_answer_s_trace_follows_it_on_stderr_once_it_is_complete(rig: Rig) -> None:
    part = KeptTrace(trace_id=four_rounds().trace_id, is_complete=False, spans=four_rounds().spans[:2])
    rig.service.traces["hello"] = [part, part, four_rounds()]
    code, out, err = await rig.run("generate", "hello", "--trace", "--json")
    assert (code, json.loads(out)["text"]) == (0, "hello")
    assert err.startswith("request r-1 · demo · pipelined\n")
    assert rig.service.are_traced == [True]


async def test_without_the_flag_no_trace_is_asked_for(rig: Rig) -> None:
    code, _, err = await rig.run("generate", "hello", "--json")
    assert (code, err, rig.service.are_traced) == (0, "", [False])


async def test_several_answers_have_a_file_each(rig: Rig, tmp_path: Path) -> None:
    rig.service.traces = {"a": [four_rounds()], "b": [long_trace(3)]}
    code, out, err = await rig.run("generate", "a", "b", "--json", "--trace-file", str(tmp_path / "t.svg"))
    assert (code, len(out.splitlines()), err) == (0, 2, "")
    first, second = (tmp_path / f"t-{number}.svg" for number in (1, 2))
    assert "request r-1" in first.read_text(encoding="utf-8")
    assert "request r-long" in second.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("trace", "r", "--output", "t.png"), "--output needs a name that ends in .html or .svg, got 't.png'"),
        (("trace", "r", "--output", "no/such/t.svg"), "--output: there is no folder for 'no/such/t.svg', or it is one"),
        (("trace", "r", "--json", "--output", "t.svg"), "--json and --output cannot be used together"),
        (("trace", "r", "--rounds", "9-2"), "--rounds must go up, from 1 at least, got '9-2'"),
        (
            ("trace", "r", "--rounds", "1-2", "--json"),
            "--rounds is for the terminal and for .svg: a page and --json have all rounds",
        ),
        (("generate", "x", "--trace-file", "t"), "--trace-file needs a name that ends in .html or .svg, got 't'"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_asked(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from specpipe.cli.app import run

    assert run([*arguments, "--connect", "127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_the_service_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    from specpipe.cli.app import run

    assert run(["trace", "r"]) == 2
    assert capsys.readouterr().err == "error: give the service that answered the request with --connect HOST:PORT\n"
