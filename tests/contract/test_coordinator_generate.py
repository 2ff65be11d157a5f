"""GenerateService over real gRPC: what is streamed, what is refused, what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from coordinator_cluster import DEMO, EOS, FAST, Cluster, Worker, cluster, draft_model, target_model
from tcp_relay import is_listening
from waiting import wait_until

from coordinator.requests import Question
from coordinator.tokenization import Tokenization, load_tokenization
from coordinator.validation import create_request
from specpipe.answers import ChatMessage, Chunk, Finished, Started
from specpipe.client import Answer, GenerateRequest
from specpipe.errors import (
    CapacityError,
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    ModelNotFoundError,
    RequestCancelledError,
    WorkerUnavailableError,
)
from specpipe.rpc.v1 import generate_pb2, generate_pb2_grpc
from specpipe.server import create_channel
from specpipe.types import FinishReason, Mode, Open, Origin, Rule

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = load_tokenization(str(DEMO))
PROMPT = "def add(left, right):\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service() -> AsyncIterator[Cluster]:
    async with cluster() as running:
        yield running


def ask(prompt: Any = PROMPT, **options: Any) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, **{"seed": 5, "max_tokens": 24, **options})


async def answer(service: Cluster, request: GenerateRequest, timeout_s: float = 30.0) -> Answer:
    return await service.client.answer(request, timeout_s=timeout_s)


# What is streamed


@pytest.mark.parametrize("mode", list(Mode))
async def test_started_chunks_finished(service: Cluster, mode: Mode) -> None:
    events = [event async for event in service.client.generate(ask(mode=mode, request_id=f"mine-{mode.value}"))]
    started, chunks, finished = events[0], events[1:-1], events[-1]
    assert isinstance(started, Started)
    assert (started.request_id, started.model, started.seed) == (f"mine-{mode.value}", "table-1", 5)
    assert started.prompt_tokens == len(TOKENS.encode(PROMPT))
    assert all(isinstance(chunk, Chunk) and len(chunk.origins) == len(chunk.token_ids) > 0 for chunk in chunks)
    assert isinstance(finished, Finished)
    token_ids = [token for chunk in chunks if isinstance(chunk, Chunk) for token in chunk.token_ids]
    assert finished.completion_tokens == len(token_ids) == 24
    assert "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk)) == TOKENS.decode(token_ids)
    stats = finished.speculation
    assert (stats.mode, stats.rule) == (mode, Rule.COUPLED)
    assert stats.accepted_tokens == sum(
        origin is Origin.ACCEPTED for chunk in chunks if isinstance(chunk, Chunk) for origin in chunk.origins
    )
    assert stats.mean_acceptance_length == pytest.approx(24 / stats.rounds)
    assert stats.accepted_tokens <= stats.verified_tokens <= stats.drafted_tokens or mode is Mode.PIPELINED
    assert 0 < finished.timing.ttft_ms <= finished.timing.total_ms
    if mode is Mode.OFF:
        assert (stats.acceptance_rate, stats.hit_rate, stats.draft_step_ms) == (None, None, None)
    if mode is Mode.SYNC:
        assert stats.accepted_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_the_answer_is_the_same_in_every_mode(service: Cluster, temperature: float) -> None:
    answers = [await answer(service, ask(mode=mode, temperature=temperature)) for mode in Mode for _ in range(2)]
    assert len({tuple(a.token_ids) for a in answers}) == 1
    assert len({a.text for a in answers}) == 1


async def test_seeds_are_drawn_and_reported(service: Cluster) -> None:
    first, second = await answer(service, ask(seed=None)), await answer(service, ask(seed=None))
    assert first.started is not None
    assert second.started is not None
    assert first.started.seed != second.started.seed
    assert first.token_ids != second.token_ids
    again = await answer(service, ask(seed=first.started.seed))
    assert again.token_ids == first.token_ids


async def test_request_ids_are_made_when_missing(service: Cluster) -> None:
    first, second = await answer(service, ask()), await answer(service, ask())
    assert first.started is not None
    assert second.started is not None
    assert first.started.request_id != second.started.request_id != ""


async def test_prompts_may_be_ids_or_a_chat(service: Cluster) -> None:
    text = await answer(service, ask())
    ids = await answer(service, ask(tuple(TOKENS.encode(PROMPT))))
    assert ids.token_ids == text.token_ids
    chat = [{"role": "user", "content": "Hello"}]
    rendered = await answer(service, ask(tuple(TOKENS.encode_chat(chat))))
    spoken = await answer(service, ask((ChatMessage(role="user", content="Hello"),)))
    assert spoken.token_ids == rendered.token_ids


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6])
async def test_exactly_max_tokens_are_delivered_and_counted(service: Cluster, max_tokens: int) -> None:
    got = await answer(service, ask(max_tokens=max_tokens, mode=Mode.SYNC))
    assert got.finished is not None
    assert len(got.token_ids) == got.finished.completion_tokens == max_tokens
    assert got.finished.finish_reason is FinishReason.LENGTH
    assert (got.finished.timing.tpot_ms is None) == (max_tokens < 2)


@pytest.mark.parametrize("max_tokens", [None, 10**9])
async def test_the_context_cuts_the_answer(service: Cluster, max_tokens: int | None) -> None:
    prompt = tuple([5, 6] * 250)
    got = await answer(service, ask(prompt, max_tokens=max_tokens, ignore_eos=True))
    assert len(got.token_ids) == 512 - 500
    assert got.finished is not None
    assert got.finished.finish_reason is FinishReason.LENGTH


async def test_the_default_is_256_tokens(service: Cluster) -> None:
    got = await answer(service, ask(max_tokens=None, ignore_eos=True, mode=Mode.SYNC))
    assert len(got.token_ids) == 256


@pytest.mark.parametrize("position", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
async def test_a_chosen_stop_token_ends_the_answer(service: Cluster, mode: Mode, position: int) -> None:
    plain = await answer(service, ask(mode=Mode.OFF))
    stop = plain.token_ids[position]
    expected = plain.token_ids[: plain.token_ids.index(stop) + 1]
    got = await answer(service, ask(mode=mode, stop_token_ids=(stop,)))
    assert got.token_ids == expected
    assert got.text == TOKENS.decode(expected[:-1])
    assert got.finished is not None
    assert got.finished.finish_reason is FinishReason.STOP
    assert got.finished.completion_tokens == len(expected)


@pytest.mark.parametrize("budget", [-1, 0, 1, 3])
async def test_of_a_stop_and_the_length_the_earlier_wins(service: Cluster, budget: int) -> None:
    plain = await answer(service, ask(mode=Mode.OFF))
    stop = plain.token_ids[7]
    place = plain.token_ids.index(stop) + 1
    got = await answer(service, ask(mode=Mode.SYNC, stop_token_ids=(stop,), max_tokens=place + budget))
    assert got.finished is not None
    assert got.finished.finish_reason is (FinishReason.LENGTH if budget < 0 else FinishReason.STOP)
    assert got.token_ids == plain.token_ids[: min(place, place + budget)]


@pytest.mark.parametrize("mode", list(Mode))
async def test_every_stop_string_cuts_where_a_plain_reader_would(service: Cluster, mode: Mode) -> None:
    plain = await answer(service, ask(mode=Mode.OFF))
    text = plain.text
    for start in range(0, len(text) - 3, 7):
        stop = text[start : start + 3]
        if "\N{REPLACEMENT CHARACTER}" in stop:
            continue
        got = await answer(service, ask(mode=mode, stop=(stop,)))
        used = next(n for n in range(1, 25) if stop in TOKENS.decode(plain.token_ids[:n]))
        assert got.token_ids == plain.token_ids[:used]
        assert got.text == text[: text.index(stop)]
        assert got.finished is not None
        assert got.finished.finish_reason is FinishReason.STOP
        assert got.finished.completion_tokens == used
        stats = got.finished.speculation
        assert stats.mean_acceptance_length is not None
        assert stats.mean_acceptance_length * stats.rounds == pytest.approx(used)


def prompt_that_ends_soon() -> tuple[tuple[int, int], list[int]]:
    """A prompt, and what the target says to it greedily up to the EOS."""
    model = target_model()
    for first in range(1, 4000):
        text = [first, first + 1]
        while len(text) < 60:
            text.append(int(model.logits_of(text).argmax()))
            if text[-1] == EOS:
                return (first, first + 1), text[2:]
    raise AssertionError("the target never says EOS")


async def test_eos_ends_the_answer_unless_ignored(service: Cluster) -> None:
    prompt, expected = prompt_that_ends_soon()
    options = {"max_tokens": 60, "temperature": 0.0}
    for mode in Mode:
        got = await answer(service, ask(prompt, mode=mode, **options))
        assert got.token_ids == expected
        assert got.text == TOKENS.decode(got.token_ids)
        assert got.finished is not None
        assert got.finished.finish_reason is FinishReason.STOP
    unending = await answer(service, ask(prompt, ignore_eos=True, **options))
    assert (unending.token_ids[: len(expected)], len(unending.token_ids)) == (expected, 60)


async def test_fifty_at_once_answer_as_one_at_a_time(service: Cluster) -> None:
    requests = [ask((10 + i, 20 + i), seed=i, max_tokens=16) for i in range(50)]
    together = await asyncio.gather(*(answer(service, request) for request in requests))
    for request, got in list(zip(requests, together, strict=True))[::7]:
        assert (await answer(service, request)).token_ids == got.token_ids
    await wait_until(lambda: service.is_idle)


# What is refused

BAD = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": ()}, "prompt"),
    ({"prompt": (1, 2, 4096)}, r"prompt_token_ids\[2\]: 4096"),
    ({"prompt": (2**32 - 1,)}, "prompt_token_ids"),
    ({"prompt": tuple([5] * 512)}, "512 tokens"),
    ({"prompt": "word " * 800}, "tokens"),
    ({"prompt": "x" * 2_000_000}, "2000000 bytes"),
    ({"prompt": (ChatMessage(role="user", content="x " * 1_000_000),)}, "20000.. bytes"),
    ({"prompt": (ChatMessage(role="user", content="x"),) * 100_000}, "100000 messages"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"min_p": -0.5}, "min_p"),
    ({"min_p": float("nan")}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"stop": ("",)}, r"stop\[0\]"),
    ({"stop": tuple("abcdefghijklmnopq")}, "stop"),
    ({"stop": ("fine", "x" * 1025)}, r"stop\[1\]"),
    ({"stop_token_ids": (4096,)}, r"stop_token_ids\[0\]: 4096"),
    ({"stop_token_ids": (3, -1)}, r"stop_token_ids\[1\]: -1"),
    ({"stop_token_ids": (2**62,)}, "stop_token_ids"),
    ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
    ({"num_speculative_tokens": 10**6}, "num_speculative_tokens"),
    ({"request_id": "x" * 257}, "request_id"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
async def test_bad_input_names_the_field_and_the_next_request_works(
    service: Cluster, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await answer(service, ask(**options))
    assert len((await answer(service, ask(max_tokens=2))).token_ids) == 2
    await wait_until(lambda: service.is_idle)


async def test_an_unknown_model_is_not_found(service: Cluster) -> None:
    with pytest.raises(ModelNotFoundError, match="gpt-5"):
        await answer(service, ask(model="gpt-5"))
    assert (await answer(service, ask(model="table-1"))).token_ids


async def test_missing_input_and_unknown_enum_values_are_refused(service: Cluster) -> None:
    bad_mode = generate_pb2.GenerateRequest(prompt="a")
    bad_mode.speculation.mode = 9  # type: ignore[assignment]
    empty_chat = generate_pb2.GenerateRequest(chat=generate_pb2.Chat())
    async with create_channel(service.address) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        for request in (generate_pb2.GenerateRequest(), bad_mode, empty_chat):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(request, timeout=10):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_id_of_a_live_request_is_refused_and_free_again_afterwards(service: Cluster) -> None:
    events = service.client.generate(ask(request_id="twin", max_tokens=400, ignore_eos=True))
    await anext(events)
    service.targets[0].gate.clear()
    with pytest.raises(DuplicateRequestError, match="twin"):
        await answer(service, ask(request_id="twin"))
    service.targets[0].gate.set()
    await events.aclose()
    assert (await answer(service, ask(request_id="twin", max_tokens=3))).token_ids


# Leaving


@pytest.mark.parametrize("num_events", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", list(Mode))
async def test_a_client_that_leaves_frees_everything(service: Cluster, mode: Mode, num_events: int) -> None:
    events = service.client.generate(ask(mode=mode, max_tokens=450, ignore_eos=True))
    task = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    if num_events == 0:
        task.cancel()
        await asyncio.wait([task])
    else:
        await task
        for _ in range(num_events - 1):
            await anext(events)
    await events.aclose()
    await wait_until(lambda: service.is_idle, timeout_s=5.0)


async def test_an_id_may_be_used_again_at_once_after_cancelling(service: Cluster) -> None:
    for number in range(30):
        expected = await answer(service, ask((30 + number, 9), max_tokens=5, mode=Mode.OFF))
        events = service.client.generate(ask(request_id="again", max_tokens=400, ignore_eos=True))
        for _ in range(1 + number % 3):
            await anext(events)
        await events.aclose()
        got = await answer(service, ask((30 + number, 9), max_tokens=5, request_id="again"))
        assert got.token_ids == expected.token_ids
    await wait_until(lambda: service.is_idle)


async def test_the_deadline_ends_a_long_request_on_time_everywhere(service: Cluster) -> None:
    service.targets[0].gate.clear()
    try:
        with pytest.raises(DeadlineExceededError):
            async with asyncio.timeout(5.0):
                await answer(service, ask(max_tokens=400), timeout_s=0.3)
        await wait_until(lambda: not service.coordinator._running)
    finally:
        service.targets[0].gate.set()
    await wait_until(lambda: service.is_idle)


@pytest.mark.parametrize("timeout_s", [2.5, 9.99, 20.0, 60.0, 99.95, 600.0, 5000.0])
async def test_every_hop_is_told_the_remaining_time_and_never_more_than_the_client_gave(
    service: Cluster, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    opens: dict[str, list[float]] = {"target": [], "draft": []}
    for worker in service.workers:
        loop = worker.thread._step_loop
        receive = loop.receive

        def spy(link: int, message: Any, receive: Any = receive, kind: str = worker.kind) -> None:
            if isinstance(message, Open) and message.remaining_ms is not None:
                opens[kind].append(message.remaining_ms)
            receive(link, message)

        monkeypatch.setattr(loop, "receive", spy)
    for _ in range(5):
        await answer(service, ask(max_tokens=3), timeout_s=timeout_s)
    assert len(opens["target"]) == 5
    assert 1 <= len(opens["draft"]) <= 5  # so short an answer may have ended before its Open left for the draft worker
    told = opens["target"] + opens["draft"]
    assert all(0 < ms <= 1000 * timeout_s for ms in told), told
    assert max(told) > 1000 * timeout_s - 2000 - 20 * timeout_s, told


# The queue


async def test_requests_wait_their_turn_and_the_queue_is_bounded() -> None:
    async with cluster(max_sessions=1, max_queue=3) as service:
        service.targets[0].gate.clear()
        running = asyncio.ensure_future(answer(service, ask(max_tokens=4)))
        await wait_until(lambda: len(service.coordinator._running) == 1)
        waiting = [asyncio.ensure_future(answer(service, ask(max_tokens=4, seed=i))) for i in range(3)]
        await wait_until(lambda: len(service.coordinator._queue) == 3)
        with pytest.raises(CapacityError, match="try again later"):
            await answer(service, ask())
        service.targets[0].gate.set()
        answers = await asyncio.gather(running, *waiting)
        assert all(len(got.token_ids) == 4 for got in answers)
        await wait_until(lambda: service.is_idle)


def never_called(*_: Any) -> None:
    raise AssertionError("there was no need to tokenize")


async def test_a_service_that_is_full_or_ends_refuses_before_it_tokenizes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(max_sessions=1, max_queue=0) as service:
        service.targets[0].gate.clear()
        running = asyncio.ensure_future(answer(service, ask(request_id="first")))
        await wait_until(lambda: len(service.coordinator._running) == 1)
        with pytest.raises(DuplicateRequestError):  # a request whose id is free in a moment would have room then
            await answer(service, ask(request_id="first"))
        monkeypatch.setattr(service.app._service, "_tokenize", never_called)
        with pytest.raises(CapacityError, match="1 requests run and 0 wait; try again later"):
            await answer(service, ask())
        service.coordinator.end_all(WorkerUnavailableError("the service is stopping"))
        with pytest.raises(WorkerUnavailableError, match="the service is stopping"):
            await answer(service, ask())
        service.targets[0].gate.set()
        with pytest.raises(WorkerUnavailableError):
            await running


async def test_a_prompt_that_is_far_too_long_is_not_tokenized_whole(
    service: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenization, "encode", never_called)
    monkeypatch.setattr(Tokenization, "encode_rendered", never_called)
    text = "words of all sorts, " * 1000
    for prompt in (text, (ChatMessage(role="user", content=text),)):
        with pytest.raises(InvalidRequestError, match=r"its first 8192 characters of 200\d\d are more than 512 tokens"):
            await answer(service, ask(prompt))


async def test_requests_cancelled_in_the_queue_never_run() -> None:
    async with cluster(max_sessions=1) as service:
        service.targets[0].gate.clear()
        running = asyncio.ensure_future(answer(service, ask(max_tokens=4)))
        await wait_until(lambda: len(service.coordinator._running) == 1)
        waiting = [asyncio.ensure_future(answer(service, ask(seed=i))) for i in range(20)]
        await wait_until(lambda: len(service.coordinator._queue) == 20)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await wait_until(lambda: not service.coordinator._queue)
        service.targets[0].gate.set()
        assert len((await running).token_ids) == 4
        await wait_until(lambda: service.is_idle)
        assert (await answer(service, ask(max_tokens=2))).token_ids


async def test_a_worker_is_never_given_more_sessions_than_it_takes() -> None:
    target = Worker("target", target_model(), max_sessions=3)
    async with cluster([target], [Worker("draft", draft_model(), max_sessions=2)]) as service:
        most = 0

        def watch() -> bool:
            nonlocal most
            most = max(most, target.num_sessions)
            return task.done()

        task = asyncio.gather(*(answer(service, ask(seed=i, max_tokens=30)) for i in range(12)))
        await wait_until(watch)
        assert all(got.finished for got in await task)
        assert 0 < most <= 3
        await wait_until(lambda: service.is_idle)


# The end


async def test_draining_closes_the_port_and_lets_answers_end() -> None:
    async with cluster() as service:
        events = service.client.generate(ask(max_tokens=60, ignore_eos=True))
        got = Answer()
        got.add(await anext(events))
        draining = asyncio.ensure_future(service.app.drain())
        await wait_until(lambda: not is_listening(service.address))
        with pytest.raises(WorkerUnavailableError, match="nothing listens there"):
            await answer(service, ask())
        async for event in events:
            got.add(event)
        assert len(got.token_ids) == 60
        await asyncio.wait_for(draining, 5)


async def test_what_outlives_the_grace_ends_with_an_explicit_error() -> None:
    async with cluster() as service:
        service.targets[0].gate.clear()
        task = asyncio.ensure_future(answer(service, ask()))
        await wait_until(lambda: len(service.coordinator._running) == 1)
        service.coordinator.end_all(WorkerUnavailableError("the service is stopping"))
        with pytest.raises(WorkerUnavailableError, match="stopping"):
            await task
        service.targets[0].gate.set()
        await wait_until(lambda: service.is_idle)


async def test_a_reader_that_takes_nothing_is_cancelled_and_frees_the_workers() -> None:
    async with cluster(settings=replace(FAST, max_reader_stall_s=0.3)) as service:
        facts = service.app._service._facts
        assert facts is not None
        request = create_request(Question(max_tokens=400, ignore_eos=True), (5, 6), facts)
        stream = service.coordinator.submit(request, TOKENS.create_answer())
        given_up = asyncio.Event()
        stream.give_up = given_up.set
        await asyncio.wait_for(given_up.wait(), 10)
        with pytest.raises(RequestCancelledError, match="took nothing"):
            async for _ in stream:
                pass
        stream.close()
        await wait_until(lambda: service.is_idle)
