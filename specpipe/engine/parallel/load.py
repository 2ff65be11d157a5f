"""One rank's model, from files to a runner: the same steps on every rank, in the same order.

Owns: that order. Must not know: processes, the control socket.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specpipe.config import EngineConfig
from specpipe.engine.folder import ModelFolder, check_folder
from specpipe.engine.loader import create_runner
from specpipe.engine.parallel.collective import Collective
from specpipe.engine.parallel.shard import join, load_shard
from specpipe.engine.runner import ModelRunner
from specpipe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadedRank:
    folder: ModelFolder
    model: PreTrainedModel


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Each rank has a GPU of its own; on a CPU they share it."""
    return torch.device("cpu") if config.device == "cpu" else torch.device("cuda", rank)


def load_rank(config: EngineConfig, rank: int, size: int) -> LoadedRank:
    """Read one rank's weights. Raises ConfigError or UnsupportedModelError."""
    if config.device != "cpu" and torch.cuda.device_count() < size:
        raise ConfigError(f"tensor_parallel_size {size} does not fit: torch sees {torch.cuda.device_count()} GPUs")
    folder = check_folder(config.model)
    return LoadedRank(folder, load_shard(folder, config.dtype, rank, size).to(rank_device(config, rank)))


def create_rank_runner(loaded: LoadedRank, config: EngineConfig, collective: Collective) -> ModelRunner:
    """Join the ranks' products and prepare this one. Called by all ranks at the same time."""
    join(loaded.model, collective)
    runner = create_runner(loaded.model, loaded.folder, config, group=collective)
    collective.limit_time()
    return runner
