"""Where a collector passes metrics on to: an OTLP/gRPC receiver in this process that remembers their names."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc


class MetricsSink(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self) -> None:
        self.address = ""
        self.names: frozenset[str] = frozenset()  # as OpenTelemetry has them

    def Export(  # noqa: N802 (the name is the RPC's)
        self, request: metrics_service_pb2.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> metrics_service_pb2.ExportMetricsServiceResponse:
        scopes = [scope for of_process in request.resource_metrics for scope in of_process.scope_metrics]
        self.names |= {metric.name for scope in scopes for metric in scope.metrics}
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def metrics_sink() -> Iterator[MetricsSink]:
    sink = MetricsSink()
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(sink, server)
    sink.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield sink
    finally:
        server.stop(0).wait()
