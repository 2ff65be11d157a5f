"""Spans on their way out: a receiver that is dead, refuses, says nothing or is slow costs no answer and no shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from typing import Any

import pytest
from coordinator_cluster import ask, cluster
from otlp_receiver import otlp_receiver
from waiting import wait_until

from specpipe.config import TelemetryConfig
from specpipe.spans import Process, Role, Span, SpanEvent, SpanKind
from specpipe.telemetry import export
from specpipe.telemetry.export import SpanExport

PROCESS = Process(role=Role.TARGET_WORKER, address="worker:1", host="host", pid=7, version="1.0")
MAX_CLOSE_S = 5.0  # what a process may take to end, whatever the receiver does


def a_span(**changes: Any) -> Span:
    values: dict[str, Any] = {
        "name": "verify",
        "trace_id": 2**127 + 1,
        "span_id": 2**63 + 1,
        "parent_id": 5,
        "process": PROCESS,
        "start_unix_nanos": 10**18,
        "end_unix_nanos": 10**18 + 5,
    }
    return Span(**values | changes)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


async def closed(exporter: SpanExport) -> float:
    """Seconds that it took."""
    started = time.monotonic()
    await asyncio.to_thread(exporter.close)
    return time.monotonic() - started


# What arrives


async def test_a_span_arrives_as_it_is() -> None:
    span = a_span(
        kind=SpanKind.SERVER,
        attributes={
            "text": "ä",
            "number": 3,
            "real": 0.5,
            "truth": True,
            "texts": ("a", "b"),
            "reals": (1.0, 2.0),
            "too large": 2**64 - 1,
        },
        events=(SpanEvent(name="hit", unix_nanos=10**18 + 1, attributes={"base": 4}),),
        links=(9, 10),
        error="it broke",
        trace_state="a=1",
    )
    with otlp_receiver() as receiver:
        exporter = SpanExport(receiver.address)
        exporter.put([span])
        await closed(exporter)
        (found,) = receiver.spans
    assert (found.name, found.trace_id, found.span_id) == ("verify", f"{2**127 + 1:032x}", f"{2**63 + 1:016x}")
    assert found.parent_id == f"{5:016x}"
    assert found.attributes == {
        "text": "ä",
        "number": 3,
        "real": 0.5,
        "truth": True,
        "texts": ["a", "b"],
        "reals": [1.0, 2.0],
        "too large": str(2**64 - 1),
    }
    assert (found.events, found.links) == (["hit"], [f"{9:016x}", f"{10:016x}"])
    assert (found.pb.status.code, found.pb.status.message) == (found.pb.status.STATUS_CODE_ERROR, "it broke")
    assert found.pb.trace_state == "a=1"
    assert (found.pb.start_time_unix_nano, found.pb.end_time_unix_nano) == (10**18, 10**18 + 5)
    assert found.resource == {
        "service.name": "specpipe-target-worker",
        "service.instance.id": "host:7",
        "service.version": "1.0",
        "host.name": "host",
        "process.pid": 7,
    }


async def test_with_a_healthy_receiver_no_span_is_lost_at_the_end() -> None:
    with otlp_receiver() as receiver:
        exporter = SpanExport(receiver.address)
        exporter.put([a_span(span_id=i + 1) for i in range(3000)])
        assert await closed(exporter) < MAX_CLOSE_S
        assert {int(span.span_id, 16) for span in receiver.spans} == set(range(1, 3001))
    assert (exporter.num_exported, exporter.num_pending) == (3000, 0)
    assert not any(exporter.num_dropped.values())


async def test_headers_of_the_environment_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://elsewhere:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "nonsense")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "another")
    with otlp_receiver() as receiver:
        exporter = SpanExport(receiver.address)
        exporter.put([a_span()])
        await closed(exporter)
        assert receiver.metadata["x-token"] == "secret"
        assert receiver.spans[0].resource["service.name"] == "specpipe-target-worker"


async def test_what_fails_for_a_while_is_sent_again() -> None:
    with otlp_receiver("refusing") as receiver:
        exporter = SpanExport(receiver.address)
        exporter.put([a_span()])
        await wait_until(lambda: receiver.num_calls > 0)
        receiver.mode = "healthy"
        await wait_until(lambda: exporter.num_exported == 1)
        await closed(exporter)


# What does not


async def test_a_full_queue_drops_and_counts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(export, "MAX_QUEUE", 200)
    monkeypatch.setattr(export, "CLOSE_S", 0.2)
    with otlp_receiver("silent") as receiver:
        exporter = SpanExport(receiver.address)
        for i in range(10):
            exporter.put([a_span(span_id=100 * i + j + 1) for j in range(100)])
        await wait_until(lambda: receiver.num_calls > 0)
        dropped = exporter.num_dropped["queue full"]
        assert 1000 - 200 - export.MAX_BATCH <= dropped <= 800
        assert caplog.text.count("more are dropped") == 1
        await closed(exporter)
    assert sum(exporter.num_dropped.values()) == 1000
    assert exporter.num_pending == 0
    assert "1000 spans were not exported" in caplog.text


@pytest.mark.parametrize("mode", ["dead", "refusing", "silent", "slow"])
async def test_no_receiver_holds_the_end(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    with otlp_receiver("healthy" if mode == "dead" else mode) as receiver, caplog.at_level(logging.WARNING):
        address = f"127.0.0.1:{free_port()}" if mode == "dead" else receiver.address
        exporter = SpanExport(address)
        exporter.put([a_span(span_id=i + 1) for i in range(1000)])
        assert await closed(exporter) < MAX_CLOSE_S
    assert exporter.num_exported + sum(exporter.num_dropped.values()) == 1000
    assert f"{sum(exporter.num_dropped.values())} spans were not exported to {address}" in caplog.text


async def test_that_spans_do_not_arrive_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(export, "EXPORT_TIMEOUT_S", 0.2)
    exporter = SpanExport(f"127.0.0.1:{free_port()}")
    for i in range(4):
        exporter.put([a_span(span_id=i + 1) for _ in range(export.MAX_BATCH)])
    await wait_until(lambda: exporter.num_dropped["export failed"] == 4 * export.MAX_BATCH)
    assert caplog.text.count("spans do not reach") == 1
    await closed(exporter)


@pytest.mark.parametrize("mode", ["dead", "refusing", "silent", "slow"])
async def test_answers_do_not_wait_for_a_receiver(mode: Any) -> None:
    """What is exported is as much as without a receiver's help; the service ends in time."""
    with otlp_receiver("healthy" if mode == "dead" else mode) as receiver:
        address = f"127.0.0.1:{free_port()}" if mode == "dead" else receiver.address
        async with cluster(telemetry=TelemetryConfig(otlp_endpoint=address)) as service:
            async with asyncio.timeout(60):
                answers = await asyncio.gather(
                    *(service.client.answer(ask(seed=i, max_tokens=16), timeout_s=60) for i in range(8))
                )
            tracing = service.coordinator.tracing
            await wait_until(lambda: tracing.num_open == 0)
            assert len({tuple(answer.token_ids) for answer in answers}) == 8
            num_spans = tracing.num_pending + tracing.num_exported + sum(tracing.num_dropped.values())
            assert num_spans > 8 * 16
            ending = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - ending < 2 * MAX_CLOSE_S
