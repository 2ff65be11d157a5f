"""The live page of a coordinator, ready to be run beside its gRPC server.

Owns: how the page's parts are put together, and their order of ending. Must not know: what they do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from coordinator.driver import Coordinator
from coordinator.validation import ServiceFacts
from coordinator.web.app import Begin, Views, create_app
from coordinator.web.feed import Feed, FeedSettings
from coordinator.web.messages import service_json, state_json
from coordinator.web.server import PageServer


class LivePage:
    """Takes its port at once: raises ConfigError if that cannot be had. `running` serves."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        begin: Begin,
        facts: Callable[[], ServiceFacts | None],
        settings: FeedSettings | None = None,
    ) -> None:
        config = coordinator.config
        assert config.http_port is not None
        self.feed = Feed(coordinator.tracing, lambda: state_json(coordinator), settings)
        views = Views(
            begin=begin,
            service=lambda: service_json(facts()),
            state=lambda: state_json(coordinator),
            feed=self.feed,
            interface=config.server.host,
        )
        self._server = PageServer(
            create_app(views), config.server.host, config.http_port, is_preferred=config.is_http_port_preferred
        )
        self.address = self._server.address

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answers that still run must have ended before it is left: their streams hold its end up for a second."""
        async with self._server.running(), self.feed.running():
            yield
