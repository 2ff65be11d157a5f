"""The target worker as a process: load the model, measure its steps, serve the loop until told to stop.

Owns: what is made at start and in which order. Must not know: what a step does, what travels on a stream.
"""

from __future__ import annotations

import logging
import secrets
import time

from specpipe.config import TargetWorkerConfig
from specpipe.engine.folder import check_folder
from specpipe.engine.interface import StepModel
from specpipe.engine.parallel.children import ChildRanks
from specpipe.engine.parallel.distant import DistantRanks
from specpipe.engine.parallel.distant_rank import serve_rank
from specpipe.engine.parallel.group import OtherRanks, RankGroup
from specpipe.model_thread import Send
from specpipe.process import loading
from specpipe.step_costs import MAX_MEASURING_S, StepCosts, measure
from specpipe.telemetry.observer import NULL_OBSERVER, StepObserver
from specpipe.telemetry.worker_telemetry import WorkerTelemetry
from specpipe.types import Hello
from specpipe.worker_service import serve_worker
from target_worker.worker import TargetLoop

logger = logging.getLogger(__name__)


async def serve(config: TargetWorkerConfig) -> int:
    """Serve one target worker, or be one of its other ranks; returns the process's exit code.

    With several ranks rank 0 has the server, the trees and all decisions. The others are its children, or processes of
    other hosts (`config.rendezvous`). Raises ConfigError if it cannot start as configured, whatever ended the model
    thread, and WorkerUnavailableError if a rank, or rank 0, is lost: whoever supervises this process starts it again.
    """
    if config.tensor_parallel_size == 1:
        return await _serve(config, None)
    if config.rendezvous is not None and config.rendezvous.rank > 0:
        return await serve_rank(config)
    with RankGroup(config.engine, config.tensor_parallel_size, _other_ranks(config)) as group:
        group.start()
        return await _serve(config, group)


def _other_ranks(config: TargetWorkerConfig) -> OtherRanks:
    size = config.tensor_parallel_size
    if config.rendezvous is None:
        return ChildRanks(config.engine, size, config.rank_cores)
    return DistantRanks(config.engine, size, config.rendezvous)


async def _serve(config: TargetWorkerConfig, group: RankGroup | None) -> int:
    telemetry = WorkerTelemetry("target", config.telemetry, config.server.host)
    return await serve_worker(
        "target",
        config.server,
        lambda send: _create(config, send, group, telemetry),
        companions=group,
        read_vocabulary=lambda: check_folder(config.engine.model).vocabulary,
        telemetry=telemetry,
    )


def _create(
    config: TargetWorkerConfig, send: Send, group: RankGroup | None, telemetry: WorkerTelemetry
) -> tuple[Hello, TargetLoop]:
    """Load and measure. Runs on the model thread."""
    model = _load(config, group)
    loop = create_loop(model, config, send, observer=telemetry.observer)
    telemetry.watch_loop(loop)
    hello = Hello(
        protocol_version=0,  # filled in by the service
        incarnation=secrets.randbits(64),
        model=model.info,
        num_slots=model.num_slots,
        max_sessions=config.engine.max_sessions,
    )
    return hello, loop


def _load(config: TargetWorkerConfig, group: RankGroup | None) -> StepModel:
    if group is not None:
        logger.info("loading %s, a shard on each of %d ranks", config.engine.model, group.size)
        if config.rendezvous is not None:
            logger.info("the other ranks are awaited at %s", config.rendezvous.address)
        return group.load()
    with loading():
        from specpipe.engine.loader import load_model, log_progress  # torch takes seconds: the port is taken before

        return load_model(config.engine, on_progress=log_progress)


def create_loop(
    model: StepModel,
    config: TargetWorkerConfig,
    send: Send,
    *,
    max_measuring_s: float = MAX_MEASURING_S,
    observer: StepObserver = NULL_OBSERVER,
) -> TargetLoop:
    """A loop that knows what the model's steps cost."""
    costs = StepCosts(config.engine.max_batch_tokens)
    measure(model, costs, max_rows=config.engine.max_batch_tokens, max_s=max_measuring_s, clock=time.perf_counter)
    logger.info("a step takes %.1f ms with 1 row, %.1f ms with 16", costs.estimate(1), costs.estimate(16))
    return TargetLoop(model, config, send, costs=costs, observer=observer)
