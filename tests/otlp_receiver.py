"""An OTLP/gRPC receiver in this process: what an exporter really sends, and what becomes of it when nobody takes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

Mode = Literal["healthy", "refusing", "silent", "slow"]


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span with the process that it belongs to."""

    pb: trace_pb2.Span
    resource: dict[str, Any]
    scope: str

    @property
    def name(self) -> str:
        return self.pb.name

    @property
    def span_id(self) -> str:
        return self.pb.span_id.hex()

    @property
    def parent_id(self) -> str:
        return self.pb.parent_span_id.hex()

    @property
    def trace_id(self) -> str:
        return self.pb.trace_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return {pair.key: _value(pair.value) for pair in self.pb.attributes}

    @property
    def links(self) -> list[str]:
        return [link.span_id.hex() for link in self.pb.links]

    @property
    def events(self) -> list[str]:
        return [event.name for event in self.pb.events]


@dataclass(frozen=True, slots=True)
class ReceivedMetric:
    """One metric with the process that it belongs to."""

    pb: metrics_pb2.Metric
    resource: dict[str, Any]


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans and metrics on threads of its own. `mode` may be changed at any time; `delay_s` is that of slow."""

    def __init__(self) -> None:
        self.mode: Mode = "healthy"
        self.delay_s = 5.0
        self.address = ""
        self.num_calls = 0
        self.metadata: dict[str, str] = {}  # of the last call
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []
        self._metrics: dict[tuple[str, str], ReceivedMetric] = {}  # by instance and name: the newest
        self._is_over = threading.Event()

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans)

    @property
    def metrics(self) -> list[ReceivedMetric]:
        """The newest of each process."""
        with self._lock:
            return list(self._metrics.values())

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def Export(  # noqa: N802 (the name is the RPC's)
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._behave(context)
        with self._lock:
            self._spans += _spans_of(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def take_metrics(self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: Any) -> None:
        self._behave(context)
        with self._lock:
            for received in _metrics_of(request):
                self._metrics[received.resource["service.instance.id"], received.pb.name] = received

    def _behave(self, context: Any) -> None:
        self.num_calls += 1
        self.metadata = dict(context.invocation_metadata())
        if self.mode == "refusing":
            context.abort(grpc.StatusCode.UNAVAILABLE, "come back later")
        if self.mode == "silent":
            self._is_over.wait()
            context.abort(grpc.StatusCode.CANCELLED, "")
        if self.mode == "slow":
            self._is_over.wait(self.delay_s)

    @contextmanager
    def running(self) -> Iterator[None]:
        server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_MetricsReceiver(self), server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield
        finally:
            self._is_over.set()
            server.stop(0).wait()


class _MetricsReceiver(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Its RPC has the name that the one of spans has."""

    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(  # noqa: N802 (the name is the RPC's)
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: Any
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        self._receiver.take_metrics(request, context)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def otlp_receiver(mode: Mode = "healthy") -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    receiver.mode = mode
    with receiver.running():
        yield receiver


def _spans_of(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource_spans in request.resource_spans:
        resource = {pair.key: _value(pair.value) for pair in resource_spans.resource.attributes}
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield ReceivedSpan(span, resource, scope_spans.scope.name)


def _metrics_of(request: metrics_service_pb2.ExportMetricsServiceRequest) -> Iterator[ReceivedMetric]:
    for resource_metrics in request.resource_metrics:
        resource = {pair.key: _value(pair.value) for pair in resource_metrics.resource.attributes}
        for scope_metrics in resource_metrics.scope_metrics:
            for metric in scope_metrics.metrics:
                yield ReceivedMetric(metric, resource)


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
