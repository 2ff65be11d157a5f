"""A draft worker as a process: loads its model and serves it to coordinators.

Owns: the order load, warm up, serve. Must not know: streams, signals (specpipe.worker_service), drafting (worker.py).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable

from draft_worker.scheduler import StepRules
from draft_worker.worker import DraftLoop
from specpipe.config import DraftWorkerConfig
from specpipe.engine.folder import check_folder
from specpipe.engine.interface import SessionRows, StepBatch, StepModel
from specpipe.model_thread import Send
from specpipe.types import Hello
from specpipe.worker_service import serve_worker

logger = logging.getLogger(__name__)


async def serve(config: DraftWorkerConfig) -> int:
    """Serve until told to stop; returns the exit code.

    Raises ConfigError (port taken, model missing or broken), UnsupportedModelError, or what escaped from a step.
    """

    def create(send: Send) -> tuple[Hello, DraftLoop]:
        # Imported on the model thread, once the process has set its thread counts: torch reads them when it is loaded.
        from specpipe.engine.loader import load_model

        model = load_model(config.engine, on_progress=_log_progress)
        warm_up(model, _warm_up_sizes(config))
        return _create_hello(model, config), DraftLoop(model, config, send)

    return await serve_worker(
        "draft", config.server, create, read_vocabulary=lambda: check_folder(config.engine.model).vocabulary
    )


def warm_up(model: StepModel, sizes: Iterable[int]) -> None:
    """Run one step of each size (rows), so that the first request does not pay for what is made on first use."""
    for size in sizes:
        slots = range(1, size + 1)
        rows = SessionRows(
            session=0,
            context_slots=slots,
            num_computed=0,
            tokens=[0] * size,
            num_committed_rows=size,
            wants_logits=[False] * (size - 1) + [True],
        )
        model.forward(StepBatch(sessions=[rows]))
        model.clear_slots(slots)


def _warm_up_sizes(config: DraftWorkerConfig) -> list[int]:
    rules = StepRules()
    return [1, rules.num_leaves, min(rules.shared_prefill_rows, config.engine.max_batch_tokens)]


def _create_hello(model: StepModel, config: DraftWorkerConfig) -> Hello:
    return Hello(
        protocol_version=0,  # filled in by the service, which speaks it
        incarnation=secrets.randbits(64),
        model=model.info,
        num_slots=model.num_slots,
        max_sessions=config.engine.max_sessions,
    )


def _log_progress(fraction: float, text: str) -> None:
    logger.info("%3.0f %% %s", 100 * fraction, text)
