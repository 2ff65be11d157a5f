"""`specpipe serve`: the whole service on this machine until a signal ends it.

Owns: one run, from flags to exit code. SIGTERM and Ctrl-C let answers finish for the grace period; a second signal does
not wait for them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final

from specpipe.cli.failure import say_error
from specpipe.cli.flags import (
    ServiceFlags,
    SpeculationFlags,
    TelemetryFlags,
    TraceFlags,
    named_as_flags,
    option,
    takes_flags,
    telemetry_config,
)
from specpipe.cli.generate import given
from specpipe.cli.models import check_device, resolve_models
from specpipe.cli.progress import loading_bars
from specpipe.cli.signals import Signals, run_with_signals
from specpipe.config import TelemetryConfig, check_port_number
from specpipe.errors import ConfigError
from specpipe.exit_codes import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from specpipe.launcher import LocalService, ServiceConfig
from specpipe.launcher.plan import NONE, metrics_ports
from specpipe.ports import EVERY_INTERFACE, check_port
from specpipe.telemetry.logs import LogLevel, configure_logging
from specpipe.types import Mode, Rule

logger = logging.getLogger(__name__)

DEFAULT_HTTP_PORT: Final = 8080


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """Flags of `serve` alone."""

    host: Annotated[str, option("Interface to listen on.  [127.0.0.1]", metavar="HOST")] = "127.0.0.1"
    port: Annotated[int, option("Port; 0: a free one.  [50051]")] = 50051
    max_context: Annotated[int | None, option("Positions of a sequence at most.  [the model's limit]")] = None
    num_slots: Annotated[
        int | None,
        option("Tokens that each KV cache holds.  [16 contexts of at most 4096, or what memory allows]"),
    ] = None
    max_sessions: Annotated[int, option("Requests answered at once; more wait.  [64]")] = 64
    max_batch_tokens: Annotated[int | None, option("Rows of one step at most.  [256]")] = None
    no_prefix_cache: Annotated[bool, option("Compute every prompt anew.", "--no-prefix-cache")] = False
    http_port: Annotated[int | None, option("Port of the live page; 0: a free one.  [8080, or a free one]")] = None
    no_http: Annotated[bool, option("Serve no live page.", "--no-http")] = False
    grace: Annotated[float, option("Seconds that SIGTERM lets answers finish.  [10]")] = 10.0
    json: Annotated[bool, option("One JSON line when ready.", "--json")] = False
    log_level: Annotated[LogLevel, option("What is logged to stderr.  [info]")] = "info"


@takes_flags(
    own=ServeFlags, service=ServiceFlags, speculation=SpeculationFlags, telemetry=TelemetryFlags, traces=TraceFlags
)
def serve(
    *,
    own: ServeFlags,
    service: ServiceFlags,
    speculation: SpeculationFlags,
    telemetry: TelemetryFlags,
    traces: TraceFlags,
) -> int:
    """Serve GenerateService. Workers that die are started again."""
    configure_logging(own.log_level)
    with named_as_flags(ServeFlags, ServiceFlags, SpeculationFlags):
        config = service_config(own, service, speculation, telemetry_config(telemetry, traces))
        http_port = page_port(own)
    if config.drafter == NONE and speculation.mode in (Mode.SYNC, Mode.PIPELINED):
        logger.warning("--mode %s: nothing drafts with --draft none", speculation.mode.value)
    check_port(config.host, config.port)  # before models are loaded
    check_metrics_ports(config, own.http_port)
    config = replace(config, http_port=http_port, is_http_port_preferred=own.http_port is None)
    return run_with_signals(
        lambda signals: serve_until_signalled(config, signals, is_json=own.json), terminated=EXIT_OK
    )


def service_config(
    own: ServeFlags, service: ServiceFlags, speculation: SpeculationFlags, telemetry: TelemetryConfig
) -> ServiceConfig:
    """Raises ConfigError for whatever can be seen to be wrong without loading a model."""
    mode = speculation.mode or Mode.PIPELINED
    target, draft = resolve_models(service, is_drafting=mode is not Mode.OFF)
    config = ServiceConfig(
        target=target,
        draft=draft,
        tensor_parallel_size=given(service.tensor_parallel_size, 1),
        draft_workers=given(service.draft_workers, 1),
        target_workers=given(service.target_workers, 1),
        mode=mode,
        rule=speculation.rule or Rule.COUPLED,
        num_speculative_tokens=speculation.num_speculative_tokens,
        dtype=service.dtype or "auto",
        draft_dtype=service.draft_dtype,
        device=service.device or "cpu",
        host=own.host,
        port=own.port,
        max_context=own.max_context,
        num_slots=own.num_slots,
        max_sessions=own.max_sessions,
        max_batch_tokens=own.max_batch_tokens,
        has_prefix_cache=not own.no_prefix_cache,
        grace_s=own.grace,
        is_pinned=not service.no_pin,
        log_level=own.log_level,
        telemetry=telemetry,
    )
    check_device(config.device)
    return config


def check_metrics_ports(config: ServiceConfig, http_port: int | None) -> None:
    """Raises ConfigError for the first port that some process could not have."""
    for host, port in metrics_ports(config):
        check_port_number("--metrics-port, with the ports that follow it for the workers,", port)
        if port in (config.port, http_port):
            raise ConfigError(f"--metrics-port: {port} is asked for twice (workers have the ports that follow it)")
        try:
            check_port(host, port)
        except ConfigError as error:
            raise ConfigError(f"--metrics-port: {error}") from None


def page_port(own: ServeFlags) -> int | None:
    """Of the live page; None: there is none. Raises ConfigError for a port that was asked for and cannot be had."""
    if own.no_http:
        if own.http_port is not None:
            raise ConfigError("--no-http: --http-port asks for the page that it forbids")
        return None
    if own.http_port is not None:
        check_port_number("http_port", own.http_port)
        check_port(own.host, own.http_port)
        return own.http_port
    return DEFAULT_HTTP_PORT


async def serve_until_signalled(config: ServiceConfig, signals: Signals, *, is_json: bool) -> int:
    """Returns 0 after SIGTERM, 130 after Ctrl-C, 1 if the coordinator ended by itself."""
    async with LocalService(config) as service:
        with loading_bars() as on_progress:
            await service.start(on_progress)
        has_signal = asyncio.create_task(signals.defer().wait())
        announce(service, is_json)
        ends: list[asyncio.Future[Any]] = [has_signal, service.failure]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        has_signal.cancel()
        if service.failure.done():
            say_error(str(service.failure.result()))
            return EXIT_FAILED
        await service.stop(grace_s=config.grace_s)
    return EXIT_INTERRUPTED if signals.received is signal.SIGINT else EXIT_OK


def announce(service: LocalService, is_json: bool) -> None:
    """Say where the service is, once it can answer."""
    if is_json:
        processes = [asdict(process) for process in service.processes]
        http = service.http or None
        lines = [json.dumps({"ready": True, "grpc": service.address, "http": http, "processes": processes})]
    else:
        lines = [f"serving at {service.address}: specpipe generate --connect {service.address} PROMPT"]
        lines += [f"live page: {page_url(service.http)}"] if service.http else []
    sys.stdout.write("".join(line + "\n" for line in lines))
    sys.stdout.flush()


def page_url(address: str) -> str:
    """For a browser on this machine, whatever the interface."""
    host, _, port = address.rpartition(":")
    return f"http://{'localhost' if host in EVERY_INTERFACE else host}:{port}/ui"
