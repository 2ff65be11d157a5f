"""A whole service in one process: the real coordinator and workers over real gRPC, with models that need no weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tcp_relay import TcpRelay
from transformers import AutoTokenizer  # noqa: F401 - slow to import: not while workers wait for heartbeats
from waiting import wait_until

import specpipe.demo
from coordinator.discovery import Resolve, resolve_name
from coordinator.driver import Coordinator
from coordinator.metrics import CoordinatorMetrics
from coordinator.service import SERVICE_NAMES, App
from coordinator.settings import DriverSettings
from draft_worker.worker import DraftLoop
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.config import CoordinatorConfig, DraftWorkerConfig, EngineConfig, ServerConfig, TargetWorkerConfig
from specpipe.engine.interface import StepBatch
from specpipe.engine.vocabulary import Vocabulary, read_vocabulary
from specpipe.model_thread import ModelThread
from specpipe.rpc_metrics import RpcMetrics
from specpipe.server import create_server
from specpipe.telemetry.observer import NULL_OBSERVER
from specpipe.telemetry.worker_telemetry import WorkerTelemetry
from specpipe.testing import TableModel
from specpipe.types import Hello, Mode
from specpipe.worker_service import WorkerService
from specpipe.worker_stream import PROTOCOL_VERSION, WIRES, Timing, new_incarnation
from target_worker.worker import TargetLoop

DEMO = Path(specpipe.demo.__file__).parent / "models" / "target"
VOCAB_SIZE = 4096
EOS = 0
VOCABULARY = read_vocabulary(DEMO)
FINGERPRINT = VOCABULARY.fingerprint

FAST = DriverSettings(
    tick_s=0.01,
    max_draft_silence_s=1.0,
    max_target_silence_s=2.0,
    suspect_after_s=0.6,
    max_target_wait_s=2.5,
)


def target_model(**changes: Any) -> TableModel:
    """Text that repeats (order 2), so that drafts are right now and then; EOS is possible and rare."""
    model = TableModel(VOCAB_SIZE, 20_000, 1, spread=4.0, order=2, max_context=512, eos_token_ids=(EOS,))
    model.info = replace(model.info, **{"tokenizer_fingerprint": FINGERPRINT, **changes})
    return model


def draft_model(agreement: float = 0.8, **changes: Any) -> TableModel:
    model = TableModel.like(target_model(), agreement, num_slots=20_000)
    model.info = replace(model.info, **{"tokenizer_fingerprint": FINGERPRINT, **changes})
    return model


class GatedModel:
    """A model whose steps wait while the gate is shut."""

    def __init__(self, model: TableModel, gate: threading.Event) -> None:
        self._model = model
        self._gate = gate
        self.info = model.info
        self.num_slots = model.num_slots
        self.rank_ms = model.rank_ms
        self.num_steps = 0
        self.hold_at = float("inf")  # the gate shuts itself before this step
        self.delay_s = 0.0

    def forward(self, batch: StepBatch) -> np.ndarray[Any, Any]:
        if self.num_steps >= self.hold_at:
            self._gate.clear()
        self._gate.wait(30)
        time.sleep(self.delay_s)
        self.num_steps += 1
        return self._model.forward(batch)

    def clear_slots(self, slots: Any) -> None:
        self._model.clear_slots(slots)


@dataclass
class Worker:
    """One incarnation after another of a worker on one port."""

    kind: Any  # "draft" or "target"
    model: TableModel
    max_sessions: int = 64
    port: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    is_frozen: bool = False  # says nothing any more, not even heartbeats
    vocabulary: Vocabulary | None = None  # None: it cannot tell
    relay: TcpRelay | None = None  # once it has started: between it and the coordinator, if `is_relayed`
    is_relayed: bool = False
    telemetry: WorkerTelemetry | None = None  # None: nothing is counted

    async def start(self) -> None:
        self.gate.set()
        self.is_frozen = False
        rpc = None if self.telemetry is None else self.telemetry.rpc
        self.server = create_server(ServerConfig(port=self.port), [WIRES[self.kind].service_name], metrics=rpc)
        self.port = int(self.server.address.rpartition(":")[2])
        self.thread = ModelThread(self._create)
        hello = Hello(
            protocol_version=PROTOCOL_VERSION,
            incarnation=new_incarnation(),
            model=self.model.info,
            num_slots=self.model.num_slots,
            max_sessions=self.max_sessions,
        )
        timing = Timing(interval_s=0.1, pause_after_s=2.5, close_after_s=4.0, sleep=self._sleep)
        read_vocabulary = None if self.vocabulary is None else (lambda: self.vocabulary)
        self.service = WorkerService(self.kind, hello, self.thread, timing=timing, read_vocabulary=read_vocabulary)
        self.service.add_to(self.server)
        self.thread.start()
        await self.thread.wait_ready()
        await self.server.start()
        if self.is_relayed and self.relay is None:
            self.relay = await TcpRelay(self.port).__aenter__()

    async def stop(self) -> None:
        self.gate.set()
        self.service.close()
        self.thread.stop()
        await asyncio.wait([self.thread.failure])
        await self.server.stop(0.0)

    async def end(self) -> None:
        """For good."""
        await self.stop()
        if self.relay is not None:
            await self.relay.__aexit__()

    def freeze(self) -> None:
        """As SIGSTOP would, as far as that goes in one process: who dials it anew is turned away."""
        self.gate.clear()
        self.is_frozen = True
        self.service.hello = None

    @property
    def address(self) -> str:
        return self.server.address if self.relay is None else self.relay.address

    @property
    def num_sessions(self) -> int:
        return self.thread.heartbeat().num_sessions

    @property
    def num_free_slots(self) -> int:
        return self.thread.heartbeat().num_free_slots

    def _create(self, send: Any) -> Any:
        self.gated = GatedModel(self.model, self.gate)
        engine = EngineConfig(model="table", max_sessions=self.max_sessions)
        observer = NULL_OBSERVER if self.telemetry is None else self.telemetry.observer
        if self.kind == "draft":
            loop = DraftLoop(self.gated, DraftWorkerConfig(engine=engine), send, observer=observer)
        else:
            loop = TargetLoop(self.gated, TargetWorkerConfig(engine=engine), send, observer=observer)
        if self.telemetry is not None:
            self.telemetry.watch_loop(loop)
        return loop

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self.is_frozen:  # noqa: ASYNC110 - a stopped process does not wait for events
            await asyncio.sleep(0.01)


@dataclass
class Cluster:
    app: App
    targets: list[Worker]
    drafts: list[Worker]
    client: GenerateClient

    @property
    def coordinator(self) -> Coordinator:
        return self.app.coordinator

    @property
    def address(self) -> str:
        return self.app.server.address

    @property
    def is_idle(self) -> bool:
        """Nothing of any request is left anywhere."""
        coordinator = self.coordinator
        books = (coordinator._streams, coordinator._live, coordinator._queue, coordinator._running)
        return not any(books) and not coordinator._by_session and not any(w.num_sessions for w in self.workers)

    @property
    def workers(self) -> list[Worker]:
        return self.targets + self.drafts


@asynccontextmanager
async def cluster(
    targets: list[Worker] | None = None,
    drafts: list[Worker] | None = None,
    *,
    settings: DriverSettings = FAST,
    must_be_ready: bool = True,
    metrics: CoordinatorMetrics | None = None,
    rpc: RpcMetrics | None = None,
    resolve: Resolve = resolve_name,
    names: dict[str, tuple[str, ...]] | None = None,
    on_started: Callable[[], object] = lambda: None,
    **config: Any,
) -> AsyncIterator[Cluster]:
    """A running service; by default with one worker of each kind.

    `names`: what the coordinator is told instead of the workers' addresses. `on_started`: called when workers run.
    """
    targets = [Worker("target", target_model())] if targets is None else targets
    drafts = [Worker("draft", draft_model())] if drafts is None else drafts
    async with AsyncExitStack() as stack:
        for worker in targets + drafts:
            await worker.start()
            stack.push_async_callback(worker.end)
        on_started()
        told = names or {"targets": tuple(w.address for w in targets), "drafts": tuple(w.address for w in drafts)}
        full = CoordinatorConfig(**{**told, "tokenizer": str(DEMO), **config})
        server = create_server(ServerConfig(), SERVICE_NAMES, metrics=rpc)
        app = App(full, server, Coordinator(full, settings=settings, metrics=metrics, resolve=resolve))
        await stack.enter_async_context(app.running())
        if must_be_ready:
            await app.wait_ready()
        client = await stack.enter_async_context(GenerateClient(app.server.address))
        yield Cluster(app, targets, drafts, client)


LONG = {"prompt": (7, 8, 9), "max_tokens": 60, "ignore_eos": True, "seed": 3}


def ask(**options: Any) -> GenerateRequest:
    return GenerateRequest(**{**LONG, **options})


async def plain(service: Cluster, **options: Any) -> list[int]:
    """What the target alone answers."""
    return (await service.client.answer(ask(mode=Mode.OFF, **options), timeout_s=60)).token_ids


class Reading:
    """Reads an answer in the background."""

    def __init__(self, service: Cluster, request: GenerateRequest) -> None:
        self.answer = Answer()
        self.task = asyncio.ensure_future(self._read(service, request))

    async def _read(self, service: Cluster, request: GenerateRequest) -> Answer:
        async for event in service.client.generate(request, timeout_s=60):
            self.answer.add(event)
        return self.answer

    async def has(self, num_tokens: int) -> None:
        await wait_until(lambda: len(self.answer.token_ids) >= num_tokens or self.task.done())
