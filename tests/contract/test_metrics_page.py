"""How the numbers of a process are told: the page for Prometheus, pushes over OTLP, and neither."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from otlp_receiver import ReceivedMetric, otlp_receiver
from scraping import read_page, scrape

from coordinator.metrics import CoordinatorMetrics
from coordinator.tracing import Tracing
from specpipe.cli.serve import check_metrics_ports
from specpipe.config import TelemetryConfig
from specpipe.errors import ConfigError
from specpipe.launcher import ServiceConfig
from specpipe.spans import Role
from specpipe.telemetry import provider
from specpipe.telemetry.instruments import Description, Instruments
from specpipe.telemetry.metrics import ProcessMetrics
from specpipe.telemetry.worker_telemetry import WorkerTelemetry

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
HERE = TelemetryConfig(metrics_port=0)


class FakeServer:
    is_serving = True


class FakeMailbox:
    num_waiting = (2, 1)
    num_dropped = (0, 4)


class FakeStreams:
    num_rejected = 3
    num_links = 1


def coordinator_process(config: TelemetryConfig = HERE) -> ProcessMetrics:
    process = ProcessMetrics(Role.COORDINATOR, config, "127.0.0.1")
    process.watch(FakeServer())
    CoordinatorMetrics(process.instruments).watch_tracing(Tracing(config))
    return process


def worker(kind: str = "target", config: TelemetryConfig = HERE) -> WorkerTelemetry:
    telemetry = WorkerTelemetry(kind, config, "127.0.0.1")  # type: ignore[arg-type]
    telemetry.watch_service(FakeMailbox(), FakeStreams(), FakeServer())
    return telemetry


def a_histogram() -> tuple[ProcessMetrics, object]:
    process = coordinator_process()
    about = Description(name="specpipe.test.size", unit="By", text="x", labels=("side",))
    return process, process.instruments.histogram(about, (1.0, 10.0))


# The page


async def test_a_page_says_who_it_speaks_for_and_where_it_is() -> None:
    async with coordinator_process().told() as address:
        page = await asyncio.to_thread(scrape, address)
    assert page.sum("target_info", service_name="specpipe-coordinator", service_version="0.1.0") == 1
    assert page.sum("specpipe_serving") == 1
    assert page.sum("specpipe_rounds_total", mode="pipelined", outcome="hit") == 0
    assert ("specpipe_rounds_total", frozenset({("mode", "pipelined"), ("outcome", "hit")})) in page.values
    assert page.sum("process_resident_memory_bytes") > 1e7
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(scrape, address)


async def test_a_workers_page_has_what_its_service_and_its_loop_hold() -> None:
    telemetry = worker("draft")
    telemetry.observer.step(0.004, num_sessions=1, num_rows=8, num_prefill_rows=0, num_nodes=7)
    async with telemetry.told() as address:
        page = await asyncio.to_thread(scrape, address)
    assert page.by("direction", "specpipe_mailbox_sessions", kind="draft") == {"in": 2, "out": 1}
    assert page.by("direction", "specpipe_mailbox_drops_total") == {"in": 0, "out": 4}
    assert page.sum("specpipe_rejected_messages_total") == 3
    assert page.sum("specpipe_step_duration_seconds_bucket", le="0.005") == 1
    assert page.sum("specpipe_step_duration_seconds_bucket", le="0.003") == 0
    assert page.sum("specpipe_step_tokens_sum") == 8


async def test_only_metrics_are_served_and_a_scraper_that_says_nothing_keeps_nobody_waiting() -> None:
    async with coordinator_process().told() as address:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))):
            assert (await asyncio.to_thread(scrape, address)).values
        with pytest.raises(urllib.error.HTTPError, match="404"):
            await asyncio.to_thread(urllib.request.urlopen, f"http://{address}/")


async def test_idle_connections_take_no_more_than_so_many_threads() -> None:
    async with coordinator_process().told() as address:
        host, _, port = address.rpartition(":")
        num_before = threading.active_count()
        with contextlib.ExitStack() as open_connections:
            for _ in range(3 * provider.MAX_SCRAPERS):
                open_connections.enter_context(socket.create_connection((host, int(port))))
            with socket.create_connection((host, int(port))) as refused:  # after all of them
                assert await asyncio.to_thread(_read_end, refused) == b""
            assert threading.active_count() <= num_before + provider.MAX_SCRAPERS + 2
        assert await eventually_scraped(address)


def _read_end(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1)
    except ConnectionResetError:
        return b""


async def eventually_scraped(address: str) -> bool:
    """Threads of connections that are closed end by themselves."""
    while True:
        with contextlib.suppress(OSError):
            return bool((await asyncio.to_thread(scrape, address)).values)
        await asyncio.sleep(0)


async def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^metrics port {port} on 127.0.0.1 is already in use$"):
            async with coordinator_process(TelemetryConfig(metrics_port=port)).told():
                pass


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as trial:
            trial.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_the_page_listens_where_the_process_does() -> None:
    process = ProcessMetrics(Role.COORDINATOR, HERE, "::1")
    process.watch(FakeServer())
    async with process.told() as address:
        assert address.startswith("[::1]:")
        assert (await asyncio.to_thread(scrape, address)).sum("specpipe_serving") == 1


async def test_two_services_in_one_process_do_not_share_numbers() -> None:
    first, second = worker(), worker()
    first.observer.preempted()
    async with first.told() as one, second.told() as other:
        assert (await asyncio.to_thread(scrape, one)).sum("specpipe_preemptions_total") == 1
        assert (await asyncio.to_thread(scrape, other)).sum("specpipe_preemptions_total") == 0


# The document


def documented() -> dict[str, tuple[str, str, str, frozenset[str]]]:
    """By OpenTelemetry name: Prometheus name, unit, kind, labels."""
    rows = re.findall(r"^\| `([^`|]+)` \| `([^`|]+)` \| (\S+) \| (\w+) \|([^|]*)\|", DOCUMENT.read_text(), re.MULTILINE)
    gen_ai = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
    found = {}
    for name, prometheus, unit, kind, labels in rows:
        own = set(re.findall(r"`([^`]+)`", labels)) | (set(gen_ai) if "those above" in labels else set())
        found[name] = (prometheus, unit, kind, frozenset(own))
    return found


def declared() -> dict[str, tuple[str, str, frozenset[str]]]:
    """By name: unit, kind, labels."""
    everything: dict[str, tuple[str, str, frozenset[str]]] = {}
    for instruments in (coordinator_process().instruments, worker()._process.instruments):
        kinds = {o.description.name: "gauge" if o.is_gauge else "counter" for o in instruments.observed}
        for about in instruments.descriptions:
            labels = frozenset(label.replace(".", "_") for label in about.labels)
            everything[about.name] = (about.unit, kinds.get(about.name, "histogram"), labels)
    return everything


def test_every_metric_is_documented_as_it_is() -> None:
    rows = {name: (unit, kind, labels) for name, (_, unit, kind, labels) in documented().items()}
    assert rows == declared()


async def test_metrics_have_the_documented_prometheus_names() -> None:
    names: set[str] = set()
    for process in (coordinator_process(), worker()._process):
        for _, histogram in process.instruments.histograms:
            histogram.record(1.0, *("x" for _ in range(_num_labels(process.instruments, histogram))))
        async with process.told() as address:
            page = await asyncio.to_thread(scrape, address)
        names |= {f"{name}_total" if kind == "counter" else name for name, kind in page.kinds.items()}
    wanted = {prometheus for prometheus, *_ in documented().values()}
    no_series = {"specpipe_worker_state", "specpipe_worker_sessions", "specpipe_worker_losses_total"}
    assert wanted - names <= no_series | {"specpipe_spans_dropped_total"}, "without workers and an exporter"
    assert {name for name in names if name.startswith(("specpipe", "gen_ai", "rpc"))} <= wanted


def test_queries_ask_for_metrics_that_there_are() -> None:
    questions = DOCUMENT.read_text().partition("## Questions")[2]
    asked = {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"(?:specpipe|gen_ai)_\w+", questions)}
    assert len(asked) > 15
    assert asked <= {prometheus for prometheus, *_ in documented().values()}


def _num_labels(instruments: Instruments, histogram: object) -> int:
    return next(len(about.labels) for about, known in instruments.histograms if known is histogram)


# Pushing


async def test_the_last_numbers_are_pushed_at_the_end() -> None:
    with otlp_receiver() as receiver:
        telemetry = worker(config=TelemetryConfig(otlp_endpoint=receiver.address))
        async with telemetry.told() as address:
            assert address == ""
            telemetry.observer.step(0.25, num_sessions=2, num_rows=9, num_prefill_rows=0, num_nodes=7)
            telemetry.observer.preempted()
        received = {metric.pb.name: metric for metric in receiver.metrics}
    assert received["specpipe.step.duration"].resource["service.name"] == "specpipe-target-worker"
    assert _histogram(received["specpipe.step.duration"]) == (1, 0.25)
    preempted = received["specpipe.preemptions"].pb.sum
    assert (preempted.is_monotonic, preempted.data_points[0].as_double or preempted.data_points[0].as_int) == (True, 1)
    assert received["specpipe.slots"].pb.WhichOneof("data") == "gauge"
    assert received["specpipe.step.duration"].pb.unit == "s"


async def test_numbers_are_pushed_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "PUSH_INTERVAL_S", 0.05)
    with otlp_receiver() as receiver:
        async with coordinator_process(TelemetryConfig(otlp_endpoint=receiver.address)).told():
            async with asyncio.timeout(10):
                while receiver.num_calls < 3:  # noqa: ASYNC110 - a thread of its own counts
                    await asyncio.sleep(0.02)


def _histogram(metric: ReceivedMetric) -> tuple[int, float]:
    point = metric.pb.histogram.data_points[0]
    assert sum(point.bucket_counts) == point.count
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    return point.count, point.sum


@pytest.mark.parametrize("mode", ["refusing", "silent", "slow", "absent"])
async def test_a_receiver_that_takes_nothing_is_told_once_and_holds_no_end(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(provider, "PUSH_INTERVAL_S", 0.05)
    monkeypatch.setattr(provider, "PUSH_TIMEOUT_S", 0.5)
    caplog.set_level(logging.INFO)
    with otlp_receiver("healthy" if mode == "absent" else mode) as receiver:  # type: ignore[arg-type]
        endpoint = "127.0.0.1:9" if mode == "absent" else receiver.address
        async with coordinator_process(TelemetryConfig(otlp_endpoint=endpoint)).told():
            async with asyncio.timeout(10):
                while not caplog.records:  # noqa: ASYNC110 - said on a thread of its own
                    await asyncio.sleep(0.02)
            started = time.monotonic()
        assert time.monotonic() - started < provider.CLOSE_TIMEOUT_S + 1.0
    assert [record.message for record in caplog.records] == [f"metrics do not reach {endpoint}"]


# Neither


def test_without_flags_nothing_of_opentelemetry_is_loaded_and_nothing_is_counted() -> None:
    script = """
import sys, asyncio
import coordinator.service, draft_worker.service, target_worker.service
from specpipe.config import TelemetryConfig
from specpipe.telemetry.observer import NULL_OBSERVER
from specpipe.telemetry.worker_telemetry import WorkerTelemetry

async def main():
    telemetry = WorkerTelemetry("draft", TelemetryConfig(), "127.0.0.1")
    assert telemetry.observer is NULL_OBSERVER and telemetry.rpc is None
    async with telemetry.told() as address:
        assert address == ""

asyncio.run(main())
print([name for name in sys.modules if name.startswith(("opentelemetry.", "prometheus_client"))])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == "[]"


def test_a_page_is_text_that_prometheus_can_read() -> None:
    page = read_page("# TYPE a counter\na_total 3\n")
    assert page.counters == {("a_total", frozenset()): 3}


# The flags of `specpipe serve`


def test_ports_that_some_process_could_not_have_are_refused_before_anything_is_loaded() -> None:
    service = ServiceConfig(target="t", draft="d", telemetry=TelemetryConfig(metrics_port=65534))
    with pytest.raises(ConfigError, match=r"^--metrics-port, with .* must be in 0\.\.65535, got 65536"):
        check_metrics_ports(service, None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        telemetry = TelemetryConfig(metrics_port=port - 1)
        sentence = rf"^--metrics-port: port ({port}|{port - 1}) on 127\.0\.0\.1 is already in use$"
        with pytest.raises(ConfigError, match=sentence):
            check_metrics_ports(ServiceConfig(target="t", draft="d", telemetry=telemetry), None)
    twice = ServiceConfig(target="t", port=9464, telemetry=TelemetryConfig(metrics_port=9464))
    with pytest.raises(ConfigError, match="--metrics-port: 9464 is asked for twice"):
        check_metrics_ports(twice, None)
    check_metrics_ports(ServiceConfig(target="t", telemetry=TelemetryConfig(metrics_port=0)), None)
