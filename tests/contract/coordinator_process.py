"""A coordinator as a process of its own, over workers that live in the test."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from coordinator_cluster import DEMO, Worker, draft_model, target_model

ROOT = Path(__file__).parents[2]
RUN = """
import logging, sys
from coordinator.service import serve
from specpipe.config import CoordinatorConfig, ServerConfig
from specpipe.process import run_process
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
server = ServerConfig(port=int(sys.argv[3]), grace_s=float(sys.argv[4]))
config = CoordinatorConfig(targets=(sys.argv[1],), drafts=(sys.argv[2],), tokenizer=sys.argv[5], server=server)
sys.exit(run_process(lambda: serve(config), config.server))
"""


class Process:
    """A coordinator over workers that live in the test."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.address = f"127.0.0.1:{port}"
        self.log = ""
        self._reading = asyncio.ensure_future(self._read())

    @property
    def is_ready(self) -> bool:
        return "is serving" in self.log

    async def end(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 60)
        await self._reading
        return code

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log += line.decode()


@asynccontextmanager
async def coordinator_process(
    target: str, draft: str, *, port: int | None = None, grace_s: float = 10.0, tokenizer: Path = DEMO
) -> AsyncIterator[Process]:
    """Of a coordinator with these two workers. It is killed at the end, if it still runs."""
    port = port or free_port()
    arguments = (target, draft, str(port), str(grace_s), str(tokenizer))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        RUN,
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    running = Process(process, port)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await running.end()


@asynccontextmanager
async def running_coordinator(target: Worker, draft: Worker, **options: Any) -> AsyncIterator[Process]:
    """See `coordinator_process`; the workers run as long as it does."""
    await target.start()
    await draft.start()
    try:
        async with coordinator_process(target.address, draft.address, **options) as running:
            yield running
    finally:
        await draft.stop()
        await target.stop()


def workers(**draft: Any) -> tuple[Worker, Worker]:
    """A target worker and a draft worker; `draft` changes what the second says of its model."""
    return Worker("target", target_model()), Worker("draft", draft_model(**draft))


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
