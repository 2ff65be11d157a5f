"""Metrics of one process, from its start to its end.

Owns: whether there are any. Must not know: what is counted (`specpipe.telemetry.instruments` and whoever fills them).
OpenTelemetry is loaded only if there are some.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import specpipe
from specpipe.config import TelemetryConfig
from specpipe.spans import Role
from specpipe.telemetry.instruments import Instruments


def has_metrics(config: TelemetryConfig) -> bool:
    return config.metrics_port is not None or bool(config.otlp_endpoint)


@asynccontextmanager
async def metrics_told(role: Role, config: TelemetryConfig, host: str, instruments: Instruments) -> AsyncIterator[str]:
    """While open, what `instruments` count is served and pushed, as far as the configuration asks for it.

    Gives HOST:PORT of /metrics, or "". All instruments must be declared before. Raises ConfigError if the port cannot
    be had. Leaving takes a few seconds at most, whatever the receiver does.
    """
    if not has_metrics(config):
        yield ""
        return
    from specpipe.telemetry.provider import Provider

    provider = Provider(
        instruments,
        _resource(role),
        host=host,
        port=config.metrics_port,
        otlp_endpoint=config.otlp_endpoint,
    )
    try:
        yield provider.address
    finally:
        await asyncio.to_thread(provider.close)


def _resource(role: Role) -> dict[str, str]:
    """https://opentelemetry.io/docs/specs/semconv/resource/"""
    host, pid = socket.gethostname(), str(os.getpid())
    return {
        "service.name": f"specpipe-{role.value}",
        "service.instance.id": f"{host}:{pid}",
        "service.version": specpipe.__version__,
        "host.name": host,
        "process.pid": pid,
    }
