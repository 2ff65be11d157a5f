"""Metrics of one process, from its start to its end.

Owns: whether there are any, and what every process counts. Must not know: what a service does. OpenTelemetry is loaded
only if there are some, and nothing is counted otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from specpipe.config import TelemetryConfig
from specpipe.rpc_metrics import RpcMetrics
from specpipe.spans import Role
from specpipe.telemetry.instruments import Description, Instruments
from specpipe.telemetry.resources import own_process, resource_of


class Serving(Protocol):
    """A server, as far as its health goes."""

    is_serving: bool


class ProcessMetrics:
    """`told` tells what `instruments` count, as far as the configuration asks for it."""

    def __init__(self, role: Role, config: TelemetryConfig, host: str) -> None:
        self.instruments = Instruments()
        self.is_on = config.metrics_port is not None or bool(config.otlp_endpoint)
        self.rpc = RpcMetrics(self.instruments) if self.is_on else None
        self._role = role
        self._config = config
        self._host = host

    def watch(self, server: Serving) -> None:
        """Called once, before `told`."""
        serving = Description(name="specpipe.serving", unit="{process}", text="1 while health is SERVING.")
        self.instruments.gauge(serving, lambda: {(): int(server.is_serving)})

    @asynccontextmanager
    async def told(self) -> AsyncIterator[str]:
        """While open, Prometheus is answered and OTLP is pushed. Gives HOST:PORT of /metrics, or "".

        All instruments are declared before. Raises ConfigError if the port cannot be had. Leaving takes a few seconds
        at most, whatever the receiver does.
        """
        if not self.is_on:
            yield ""
            return
        from specpipe.telemetry.provider import Provider

        provider = Provider(
            self.instruments,
            resource_of(own_process(self._role)),
            host=self._host,
            port=self._config.metrics_port,
            otlp_endpoint=self._config.otlp_endpoint,
        )
        try:
            yield provider.address
        finally:
            await asyncio.to_thread(provider.close)
