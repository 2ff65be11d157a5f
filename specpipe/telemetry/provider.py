"""The numbers of a process, as OpenTelemetry sees them: pulled by Prometheus, pushed over OTLP.

Owns: the MeterProvider, the page /metrics, the export and its end. Must not know: what the numbers mean. Loaded only
where metrics are asked for (`specpipe.telemetry.metrics`), as it loads OpenTelemetry.

Histograms are counted by `specpipe.telemetry.instruments`, not by the SDK, whose `record` takes 10 to 20 us and would
be a visible part of a short step: their data points are added to what the SDK has collected.
"""

from __future__ import annotations

import errno
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics import export as otel
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, GCCollector, MetricsHandler, PlatformCollector, ProcessCollector

from specpipe.errors import ConfigError
from specpipe.ports import join_address
from specpipe.telemetry.instruments import Description, Histogram, Instruments, Labels, Observed

logger = logging.getLogger(__name__)

PATH = "/metrics"
SCOPE = "specpipe"
PUSH_INTERVAL_S = 15.0
PUSH_TIMEOUT_S = 3.0
"""Of one push, its retries included."""
CLOSE_TIMEOUT_S = 1.5
"""Of the last push, at the end of the process, together with one that is under way then. NOTE: spans end before it and
take up to twice their own CLOSE_S: nobody waits longer than 5 s for an end."""
REQUEST_TIMEOUT_S = 10.0
"""Of a scraper that says nothing."""
MAX_SCRAPERS = 64
"""Connections at once, each with a thread and a descriptor; more are closed."""


class Provider:
    """Serves and pushes `instruments` from its making until `close`.

    Raises ConfigError if the port cannot be had.
    """

    def __init__(
        self,
        instruments: Instruments,
        resource: Mapping[str, str | int],
        *,
        host: str,
        port: int | None,
        otlp_endpoint: str,
    ) -> None:
        self._page = None if port is None else _Page(host, port)
        points = _HistogramPoints(instruments)
        readers: list[otel.MetricReader] = []
        if self._page is not None:
            readers.append(_PrometheusReader(points, self._page.registry))
        if otlp_endpoint:
            readers.append(_PushingReader(points, otlp_endpoint))
        self._provider = MeterProvider(metric_readers=readers, resource=Resource(resource), shutdown_on_exit=False)
        meter = self._provider.get_meter(SCOPE, str(resource["service.version"]))
        for observed in instruments.observed:
            _observe(meter, observed)
        if self._page is not None:
            self._page.start()

    @property
    def address(self) -> str:
        """HOST:PORT of the page; empty: there is none."""
        return "" if self._page is None else self._page.address

    def close(self) -> None:
        """Push once more and end. Blocks for CLOSE_TIMEOUT_S at most: what a receiver still holds then is let go."""
        ends: list[Callable[[], object]] = [partial(self._provider.shutdown, timeout_millis=1000 * CLOSE_TIMEOUT_S)]
        if self._page is not None:
            ends.append(self._page.close)
        threads = [threading.Thread(target=end, name="end of metrics", daemon=True) for end in ends]
        for thread in threads:
            thread.start()
        give_up_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            logger.warning("the last numbers were not pushed: the receiver does not answer")


def _observe(meter: Meter, observed: Observed) -> None:
    about = observed.description

    def read(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, _attributes(about, labels)) for labels, value in observed.read().items()]

    create = meter.create_observable_gauge if observed.is_gauge else meter.create_observable_counter
    create(about.name, callbacks=[read], unit=about.unit, description=about.text)


def _attributes(about: Description, labels: Labels) -> dict[str, str]:
    """An empty value is none."""
    return {name: value for name, value in zip(about.labels, labels, strict=True) if value}


# Histograms


class _HistogramPoints:
    """Adds the histograms to what was collected of the rest."""

    def __init__(self, instruments: Instruments) -> None:
        self._histograms = instruments.histograms
        self._started_nanos = time.time_ns()

    def added_to(self, data: otel.MetricsData) -> otel.MetricsData:
        (process,) = data.resource_metrics  # there is one MeterProvider, and it has one resource
        scopes = [self._completed(scope) if scope.scope.name == SCOPE else scope for scope in process.scope_metrics]
        return replace(data, resource_metrics=[replace(process, scope_metrics=scopes)])

    def _completed(self, scope: otel.ScopeMetrics) -> otel.ScopeMetrics:
        return replace(scope, metrics=[*scope.metrics, *(self._metric(*one) for one in self._histograms)])

    def _metric(self, about: Description, histogram: Histogram) -> otel.Metric:
        now_nanos = time.time_ns()
        points = [
            otel.HistogramDataPoint(
                attributes=_attributes(about, labels),
                start_time_unix_nano=self._started_nanos,
                time_unix_nano=now_nanos,
                count=sum(found.counts),
                sum=found.total,
                bucket_counts=found.counts,
                explicit_bounds=histogram.bounds,
                min=None,  # type: ignore[arg-type]  # optional on the wire, and of a whole life of no use
                max=None,  # type: ignore[arg-type]
            )
            for labels, found in histogram.read().items()
        ]
        data = otel.Histogram(data_points=points, aggregation_temporality=otel.AggregationTemporality.CUMULATIVE)
        return otel.Metric(name=about.name, description=about.text, unit=about.unit, data=data)


class _PrometheusReader(PrometheusMetricReader):
    def __init__(self, points: _HistogramPoints, registry: CollectorRegistry) -> None:
        self._points = points
        super().__init__(scope_info_enabled=False, registry=registry)

    def _receive_metrics(self, metrics_data: otel.MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        super()._receive_metrics(self._points.added_to(metrics_data), timeout_millis, **kwargs)


# Pushing


class _PushingReader(otel.PeriodicExportingMetricReader):
    def __init__(self, points: _HistogramPoints, endpoint: str) -> None:
        self._points = points
        super().__init__(
            _Exporter(endpoint),
            export_interval_millis=1000 * PUSH_INTERVAL_S,
            export_timeout_millis=1000 * PUSH_TIMEOUT_S,
        )

    def _receive_metrics(self, metrics_data: otel.MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> None:
        super()._receive_metrics(self._points.added_to(metrics_data), timeout_millis, **kwargs)


class _Exporter(OTLPMetricExporter):
    """Says once that nobody takes what is pushed, and once that somebody does again: the library says it each time."""

    def __init__(self, endpoint: str) -> None:
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        super().__init__(
            endpoint=endpoint,
            insecure=True,
            timeout=PUSH_TIMEOUT_S,
            channel_options=(("grpc.enable_http_proxy", 0),),  # type: ignore[arg-type]
        )
        self._is_heard = True

    def export(
        self, metrics_data: otel.MetricsData, timeout_millis: float = 10_000, **kwargs: Any
    ) -> otel.MetricExportResult:
        result = super().export(metrics_data, timeout_millis, **kwargs)
        is_heard = result is otel.MetricExportResult.SUCCESS
        if is_heard != self._is_heard:
            self._is_heard = is_heard
            how = "metrics reach %s again" if is_heard else "metrics do not reach %s"
            logger.log(logging.INFO if is_heard else logging.WARNING, how, self._endpoint)
        return result


# The page


class _Page:
    """Takes the port when it is made, answers from `start` to `close` on threads of its own."""

    def __init__(self, host: str, port: int) -> None:
        self.registry = CollectorRegistry()
        for of_process in (ProcessCollector, PlatformCollector, GCCollector):
            of_process(registry=self.registry)
        self._server = _listen(host, port, _Handler.factory(self.registry))
        taken = self._server.server_address[1]
        self.address = join_address(host, taken)
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=0.1)


class _Handler(MetricsHandler):
    timeout = REQUEST_TIMEOUT_S

    def do_GET(self) -> None:  # noqa: N802 (the name is the library's)
        if self.path.partition("?")[0] == PATH:
            super().do_GET()
        else:
            self.send_error(404)


class _PageServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the library's 5 make a scraper that knocks beside others wait for seconds

    def __init__(self, *args: Any, **options: Any) -> None:
        self._free = threading.Semaphore(MAX_SCRAPERS)
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        """On the thread that accepts."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def server_bind(self) -> None:
        """Without the library's search for the host's name, which may wait for a name server."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        logger.debug("a scraper broke off", exc_info=True)


class _PageServer6(_PageServer):
    address_family = socket.AF_INET6


def _listen(host: str, port: int, handler: Any) -> _PageServer:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return (_PageServer6 if family is socket.AF_INET6 else _PageServer)((host, port), handler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"metrics port {port} on {host} is already in use") from None
        raise ConfigError(f"cannot serve metrics on {host}, port {port}: {error.strerror or error}") from None
