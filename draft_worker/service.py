"""A draft worker as a process: loads its model and serves it to coordinators.

Owns: the order load, measure, serve. Must not know: streams, signals (specpipe.worker_service), drafting (worker.py).
"""

from __future__ import annotations

import logging
import secrets
import time

from draft_worker.worker import DraftLoop
from specpipe.config import DraftWorkerConfig
from specpipe.engine.folder import check_folder
from specpipe.engine.interface import StepModel
from specpipe.model_thread import Send
from specpipe.process import loading
from specpipe.step_costs import MAX_MEASURING_S, StepCosts, measure
from specpipe.telemetry.worker_telemetry import WorkerTelemetry
from specpipe.types import Hello
from specpipe.worker_service import serve_worker

logger = logging.getLogger(__name__)


async def serve(config: DraftWorkerConfig) -> int:
    """Serve until told to stop; returns the exit code.

    Raises ConfigError (port taken, model missing or broken), UnsupportedModelError, or what escaped from a step.
    """

    telemetry = WorkerTelemetry("draft", config.telemetry, config.server.host)

    def create(send: Send) -> tuple[Hello, DraftLoop]:
        # Imported on the model thread, once the process has set its thread counts: torch reads them when it is loaded.
        with loading():
            from specpipe.engine.loader import load_model, log_progress

            model = load_model(config.engine, on_progress=log_progress, is_hint=True)
        costs = StepCosts(config.engine.max_batch_tokens)
        measure(model, costs, max_rows=config.engine.max_batch_tokens, max_s=MAX_MEASURING_S, clock=time.perf_counter)
        logger.info("a step takes %.1f ms with 1 row, %.1f ms with 12", costs.estimate(1), costs.estimate(12))
        loop = DraftLoop(model, config, send, costs=costs, observer=telemetry.observer)
        telemetry.watch_loop(loop)
        return _create_hello(model, config), loop

    return await serve_worker(
        "draft",
        config.server,
        create,
        read_vocabulary=lambda: check_folder(config.engine.model).vocabulary,
        telemetry=telemetry,
    )


def _create_hello(model: StepModel, config: DraftWorkerConfig) -> Hello:
    return Hello(
        protocol_version=0,  # filled in by the service, which speaks it
        incarnation=secrets.randbits(64),
        model=model.info,
        num_slots=model.num_slots,
        max_sessions=config.engine.max_sessions,
    )
