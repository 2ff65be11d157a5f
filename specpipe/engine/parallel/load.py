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


def rank_device(config: EngineConfig, rank: int, size: int, *, has_one_host: bool) -> torch.device:
    """On a CPU ranks share it. Each has a GPU of its own: of one host the rank's number, else the one that its own
    command names. Raises ConfigError if there are too few."""
    kind, _, number = config.device.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count()
    index = rank if has_one_host else int(number or 0)
    if has_one_host and found < size:
        raise ConfigError(f"tensor_parallel_size {size} does not fit: torch sees {found} GPUs")
    if index >= found:
        raise ConfigError(f"device {config.device} of rank {rank} is not there: torch sees {found} GPUs")
    return torch.device(kind, index)


def load_rank(config: EngineConfig, rank: int, size: int, device: torch.device) -> LoadedRank:
    """Read one rank's weights. Raises ConfigError or UnsupportedModelError."""
    folder = check_folder(config.model)
    return LoadedRank(folder, load_shard(folder, config.dtype, rank, size).to(device))


def create_rank_runner(loaded: LoadedRank, config: EngineConfig, collective: Collective) -> ModelRunner:
    """Join the ranks' products and prepare this one. Called by all ranks at the same time."""
    join(loaded.model, collective)
    runner = create_runner(loaded.model, loaded.folder, config, group=collective)
    collective.limit_time()
    return runner
