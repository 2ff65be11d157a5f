"""Traces of real requests, as an OTLP receiver gets them: the coordinator and its workers over real gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from coordinator_cluster import Cluster, Reading, Worker, ask, cluster, draft_model, target_model
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from waiting import wait_until

from coordinator.trace_service import SERVICE_NAME
from draft_worker.worker import DraftLoop
from specpipe.answers import SpeculationStats
from specpipe.client import Answer, request_to_pb
from specpipe.config import TelemetryConfig
from specpipe.errors import InvalidRequestError, TraceNotFoundError, WorkerUnavailableError
from specpipe.rpc.v1 import generate_pb2_grpc
from specpipe.spans import KeptTrace
from specpipe.types import Mode, Open
from target_worker.worker import TargetLoop

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traceparent(flags: str = "01", trace: str = TRACE) -> str:
    return f"00-{trace}-{PARENT}-{flags}"


@pytest.fixture
def receiver() -> Any:
    with otlp_receiver() as running:
        yield running


@pytest.fixture
async def service(receiver: OtlpReceiver) -> AsyncIterator[Cluster]:
    async with cluster(telemetry=TelemetryConfig(otlp_endpoint=receiver.address)) as running:
        yield running


async def kept(service: Cluster, request_id: str) -> KeptTrace:
    """Its trace, once it is complete."""
    found: list[KeptTrace] = []

    async def is_complete() -> bool:
        found[:] = [await service.client.get_trace(request_id)]
        return found[0].is_complete

    await wait_until(is_complete)
    return found[0]


async def received(receiver: OtlpReceiver, num_requests: int) -> list[ReceivedSpan]:
    """All spans of so many requests."""
    await wait_until(lambda: len(receiver.named("generate")) >= num_requests, timeout_s=30)
    return receiver.spans


async def kept_all(service: Cluster) -> None:
    """Every span that began has ended and arrived."""
    tracing = service.coordinator.tracing
    await wait_until(lambda: not tracing.num_open and not tracing.num_pending, timeout_s=30)


def of_trace(spans: list[ReceivedSpan], trace_id: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.trace_id == trace_id]


def check_tree(spans: list[ReceivedSpan], root_parent: str) -> None:
    """One tree, whose root hangs under the caller's span; every link leads to a span of it."""
    known = {span.span_id: span for span in spans}
    assert len(known) == len(spans), "an id is used once"
    for span in spans:
        if span.name == "generate":
            assert span.parent_id == root_parent
        else:
            assert known[span.parent_id].name == {"verify": "round"}.get(span.name, known[span.parent_id].name)
        assert all(known[link].name == "draft" for link in span.links)
        assert span.pb.start_time_unix_nano <= span.pb.end_time_unix_nano


def sum_of(spans: list[Any], name: str) -> float:
    return float(sum(span.attributes[f"specpipe.{name}"] for span in spans if span.name == "round"))


def check_sums(spans: list[Any], statistics: SpeculationStats) -> None:
    rounds = [s for s in spans if s.name == "round" and s.attributes.get("specpipe.num_cut", 0) == 0]
    assert sum_of(spans, "draft_ms") == pytest.approx(statistics.draft_ms, rel=0.01, abs=0.01)
    assert sum_of(spans, "exposed_ms") == pytest.approx(statistics.exposed_draft_ms, rel=0.01, abs=0.01)
    assert sum_of(spans, "hidden_ms") == pytest.approx(statistics.hidden_draft_ms, rel=0.01, abs=0.01)
    assert len(rounds) == statistics.rounds


# R1: one trace, unbroken, the caller's


async def test_one_trace_of_every_process_under_the_callers_span(service: Cluster, receiver: OtlpReceiver) -> None:
    await service.client.answer(ask(), traceparent=traceparent(), timeout_s=60)
    spans = await received(receiver, 1)
    await kept_all(service)
    spans = of_trace(receiver.spans, TRACE)
    check_tree(spans, PARENT)
    by_process = {(span.resource["service.name"], span.name) for span in spans}
    assert by_process >= {
        ("specpipe-coordinator", "generate"),
        ("specpipe-coordinator", "queue"),
        ("specpipe-coordinator", "tokenize"),
        ("specpipe-coordinator", "round"),
        ("specpipe-target-worker", "prefill"),
        ("specpipe-target-worker", "verify"),
        ("specpipe-draft-worker", "draft"),
    }
    (generate,) = [span for span in spans if span.name == "generate"]
    assert generate.pb.kind == generate.pb.SPAN_KIND_SERVER
    assert {span.scope for span in spans} == {"specpipe"}


async def test_overlap_of_drafting_and_verifying_is_visible(service: Cluster, receiver: OtlpReceiver) -> None:
    await service.client.answer(ask(max_tokens=40), traceparent=traceparent(), timeout_s=60)
    await kept_all(service)
    drafts, verifies = receiver.named("draft"), receiver.named("verify")
    overlapping = [
        (draft, verify)
        for draft in drafts
        for verify in verifies
        if draft.pb.start_time_unix_nano < verify.pb.end_time_unix_nano
        and verify.pb.start_time_unix_nano < draft.pb.end_time_unix_nano
    ]
    assert overlapping


async def test_a_callers_state_is_kept_and_an_unsampled_caller_is_not_traced(
    service: Cluster, receiver: OtlpReceiver
) -> None:
    other = "1" * 32
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        for metadata in (
            (("traceparent", traceparent("00", other)),),
            (("traceparent", traceparent()), ("tracestate", "vendor=1,other=2")),
        ):
            async for _ in stub.Generate(request_to_pb(ask(max_tokens=4)), metadata=metadata, timeout=60):
                pass
    await received(receiver, 1)
    await kept_all(service)
    assert {span.trace_id for span in receiver.spans} == {TRACE}
    assert {span.pb.trace_state for span in receiver.spans} == {"vendor=1,other=2"}


@pytest.mark.parametrize("value", ["nonsense", "00-0-0-01", "ff-" + "1" * 32 + "-" + "1" * 16 + "-01"])
async def test_a_malformed_context_is_a_new_trace_and_no_error(
    service: Cluster, receiver: OtlpReceiver, value: str
) -> None:
    answer = await service.client.answer(ask(max_tokens=4), traceparent=value, timeout_s=60)
    assert answer.finished is not None
    (generate,) = [span for span in await received(receiver, 1) if span.name == "generate"]
    assert generate.parent_id == ""
    assert len(generate.trace_id) == 32


async def test_without_a_ratio_and_a_caller_nothing_is_exported(receiver: OtlpReceiver) -> None:
    config = TelemetryConfig(otlp_endpoint=receiver.address, trace_sample=0.0)
    async with cluster(telemetry=config) as service:
        await service.client.answer(ask(request_id="unasked"), timeout_s=60)
        await service.client.answer(ask(), traceparent=traceparent(), timeout_s=60)
        await received(receiver, 1)
        with pytest.raises(TraceNotFoundError, match="generate --trace"):
            await service.client.get_trace("unasked")
    assert {span.trace_id for span in receiver.spans} == {TRACE}


async def test_a_client_in_a_span_of_opentelemetry_is_the_parent(service: Cluster, receiver: OtlpReceiver) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    with TracerProvider(shutdown_on_exit=False).get_tracer("test").start_as_current_span("ask") as span:
        await service.client.answer(ask(max_tokens=4), timeout_s=60)
    (generate,) = [found for found in await received(receiver, 1) if found.name == "generate"]
    assert int(generate.trace_id, 16) == span.get_span_context().trace_id
    assert int(generate.parent_id, 16) == span.get_span_context().span_id


async def test_a_refused_request_has_a_span_with_the_reason(service: Cluster, receiver: OtlpReceiver) -> None:
    with pytest.raises(InvalidRequestError):
        await service.client.answer(ask(temperature=-1.0), traceparent=traceparent(), timeout_s=60)
    (generate,) = await received(receiver, 1)
    assert generate.pb.status.code == generate.pb.status.STATUS_CODE_ERROR
    assert "temperature" in generate.pb.status.message
    assert generate.attributes["error.type"] == "INVALID_ARGUMENT"


# Who is traced


async def test_workers_are_asked_for_reports_only_if_somebody_takes_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = opens(monkeypatch)
    async with cluster() as service:
        await service.client.answer(ask(request_id="unasked"), timeout_s=60)
        await service.client.answer(ask(), traceparent=traceparent(), timeout_s=60)
        assert [(message.wants_reports, message.trace_context) for message in opened] == [(False, "")] * 4
        assert service.coordinator.tracing.num_open == 0
        for unknown in ("unasked", TRACE):
            with pytest.raises(TraceNotFoundError, match=rf"{unknown}.*generate --trace.*--trace-sample 1"):
                await service.client.get_trace(unknown)
        opened.clear()
        await service.client.answer(ask(request_id="asked", trace=True), traceparent=traceparent("00"), timeout_s=60)
        assert [message.wants_reports for message in opened] == [True, True]
        assert (await kept(service, "asked")).spans == (await kept(service, TRACE)).spans


async def test_a_service_that_is_told_to_keeps_traces_of_requests_that_did_not_ask() -> None:
    async with cluster(telemetry=TelemetryConfig(trace_sample=1.0)) as service:
        answer = await service.client.answer(ask(request_id="unasked"), timeout_s=60)
        assert answer.finished is not None
        check_sums(list((await kept(service, "unasked")).spans), answer.finished.speculation)


def opens(monkeypatch: pytest.MonkeyPatch) -> list[Open]:
    """What workers are told when a session begins, from now on."""
    opened: list[Open] = []
    for loop in (TargetLoop, DraftLoop):

        def receive(self: Any, link: int, message: Any, original: Any = loop.receive) -> None:
            if isinstance(message, Open):
                opened.append(message)
            original(self, link, message)

        monkeypatch.setattr(loop, "receive", receive)
    return opened


# R3: all that began has ended


def assert_all_ended(service: Cluster, spans: list[ReceivedSpan], num_requests: int) -> None:
    """Of every request there is all that its state machine went through, once."""
    names = Counter((span.trace_id, span.name) for span in spans)
    traces = {span.trace_id for span in spans}
    assert len(traces) == num_requests
    for trace in traces:
        assert names[trace, "generate"] == 1
        check_tree(of_trace(spans, trace), PARENT)
    assert service.coordinator.tracing.num_open == 0


async def test_cancelled_at_any_stage_all_spans_are_ended_with_the_reason(
    service: Cluster, receiver: OtlpReceiver
) -> None:
    for i, num_tokens in enumerate((0, 1, 5, 20)):
        trace = f"{i + 1:032x}"
        call = service.client.generate(ask(max_tokens=200), traceparent=traceparent(trace=trace), timeout_s=60)
        answer = Answer()
        async for event in call:
            answer.add(event)
            if len(answer.token_ids) >= num_tokens:
                break
        await call.aclose()
    spans = await received(receiver, 4)
    await kept_all(service)
    spans = receiver.spans
    assert_all_ended(service, spans, 4)
    for generate in receiver.named("generate"):
        assert generate.pb.status.message == "the client has left"
        assert generate.attributes["error.type"] == "CANCELLED"
        own = [name for name in generate.events if name != "restarted"]  # a draft worker hears of it later
        assert own[-1] == "cancel"


async def test_a_killed_target_and_a_killed_draft_worker_are_told_and_leave_no_span_open(
    receiver: OtlpReceiver,
) -> None:
    targets = [Worker("target", target_model()) for _ in range(2)]
    drafts = [Worker("draft", draft_model()) for _ in range(2)]
    config = TelemetryConfig(otlp_endpoint=receiver.address)
    async with cluster(targets, drafts, telemetry=config) as service:
        reading = Reading(service, ask(max_tokens=300, request_id="moved"))
        await reading.has(20)
        await next(worker for worker in drafts if worker.num_sessions).stop()
        await reading.has(len(reading.answer.token_ids) + 20)
        await next(worker for worker in targets if worker.num_sessions).stop()
        answer = await reading.task
        trace = await kept(service, "moved")
        await kept_all(service)
    (generate,) = receiver.named("generate")
    assert {"draft lost", "session moved"} <= set(generate.events)
    assert generate.pb.status.code == generate.pb.status.STATUS_CODE_UNSET
    check_tree(receiver.spans, "")
    numbers = {span.attributes["specpipe.round"] for span in receiver.named("verify")}
    assert answer.finished is not None
    assert numbers >= set(range(1, answer.finished.speculation.rounds + 1))
    assert {span.span_id for span in trace.spans} == {int(span.span_id, 16) for span in receiver.spans}


async def test_a_request_that_no_worker_takes_ends_with_its_queue(receiver: OtlpReceiver) -> None:
    full = Worker("target", target_model(), max_sessions=1)
    config = TelemetryConfig(otlp_endpoint=receiver.address)
    async with cluster([full], [], telemetry=config, drafter="none", max_sessions=1) as service:
        first = Reading(service, ask(max_tokens=400, mode=Mode.OFF))
        await first.has(1)
        waiting = asyncio.ensure_future(
            service.client.answer(ask(), traceparent=traceparent(), timeout_s=0.3)  # its deadline comes first
        )
        with pytest.raises(Exception, match=r"deadline|time"):
            await waiting
        await wait_until(lambda: bool(of_trace(receiver.named("generate"), TRACE)))
        first.task.cancel()
        await asyncio.wait([first.task])
    (queue,) = [span for span in of_trace(receiver.spans, TRACE) if span.name == "queue"]
    assert queue.pb.status.code == queue.pb.status.STATUS_CODE_ERROR


async def test_a_stopping_coordinator_ends_every_span(service: Cluster, receiver: OtlpReceiver) -> None:
    reading = Reading(service, ask(max_tokens=400))
    await reading.has(10)
    service.coordinator.end_all(WorkerUnavailableError("the service is stopping"))
    with pytest.raises(WorkerUnavailableError):
        await reading.task
    await kept_all(service)
    (generate,) = receiver.named("generate")
    assert generate.pb.status.message == "the service is stopping"
    assert {span.pb.status.message for span in receiver.named("round")} <= {"", "the service is stopping"}
    check_tree(receiver.spans, "")


# What is kept


async def test_the_trace_that_is_kept_is_the_one_that_is_exported(service: Cluster, receiver: OtlpReceiver) -> None:
    answer = await service.client.answer(ask(request_id="mine", trace=True), timeout_s=60)
    trace = await kept(service, "mine")
    await kept_all(service)
    assert {span.span_id for span in trace.spans} == {int(span.span_id, 16) for span in receiver.spans}
    assert [span.start_unix_nanos for span in trace.spans] == sorted(span.start_unix_nanos for span in trace.spans)
    assert answer.finished is not None
    check_sums(list(trace.spans), answer.finished.speculation)


async def test_the_service_of_traces_is_told_by_reflection(service: Cluster) -> None:
    def names() -> list[str]:
        with grpc.insecure_channel(service.address) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert SERVICE_NAME in await asyncio.to_thread(names)


# Many at once


async def test_fifty_requests_at_once_have_all_their_rounds_links_and_sums(receiver: OtlpReceiver) -> None:
    config = TelemetryConfig(otlp_endpoint=receiver.address)
    async with cluster(telemetry=config) as service:
        answers = await asyncio.gather(
            *(
                service.client.answer(ask(request_id=f"r{i}", seed=i, max_tokens=24, mode=mode), timeout_s=110)
                for i, mode in enumerate([Mode.PIPELINED, Mode.SYNC] * 25)
            )
        )
        await received(receiver, 50)
        await kept_all(service)
        traces = [await kept(service, f"r{i}") for i in range(50)]
    num_linked = 0
    for answer, trace in zip(answers, traces, strict=True):
        spans = of_trace(receiver.spans, f"{trace.trace_id:032x}")
        check_tree(spans, "")
        assert answer.finished is not None
        statistics = answer.finished.speculation
        check_sums(spans, statistics)
        verifies = [span for span in spans if span.name == "verify"]
        assert len(verifies) == len({span.parent_id for span in verifies}) == statistics.rounds
        verified_ms = linked_share_ms(spans)
        assert verified_ms == pytest.approx(statistics.draft_ms - statistics.wasted_draft_ms, rel=0.01, abs=0.01)
        num_linked += sum(len(span.links) for span in verifies)
    assert num_linked > 0


def linked_share_ms(spans: list[ReceivedSpan]) -> float:
    """Draft time of the steps that some round is linked to: what the statistics do not call wasted."""
    linked = {link for span in spans for link in span.links}
    return float(sum(span.attributes["specpipe.share_ms"] for span in spans if span.span_id in linked))


async def test_no_context_is_lost_in_generators(service: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """OpenTelemetry says `Failed to detach context` where a generator is closed in another context."""
    with caplog.at_level(logging.WARNING):
        call = service.client.generate(ask(max_tokens=100), traceparent=traceparent(), timeout_s=60)
        async for _ in call:
            break
        await call.aclose()
        await wait_until(lambda: service.is_idle)
    assert "context" not in caplog.text
