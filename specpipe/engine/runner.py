"""A loaded model with its KV slots, behind the StepModel interface.

Owns: the KV cache and the checks of a step. Must not know: trees, requests, sampling, where the weights came from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from specpipe.engine.attention import StepPlan
from specpipe.engine.interface import StepBatch
from specpipe.engine.kv_cache import KVCache
from specpipe.engine.plan import StepArrays, plan_step
from specpipe.engine.prepared import PreparedModel
from specpipe.errors import InvalidRequestError, InvariantError
from specpipe.types import ModelInfo

_CPU_GROUP_BYTES = 256 * 1024  # gathered keys and values of one attention call should stay in a core's own cache


class ModelRunner:
    """Implements specpipe.engine.interface.StepModel for a transformers model. Called from one thread only."""

    rank_ms: Sequence[float] = ()

    def __init__(self, model: PreparedModel, info: ModelInfo, *, num_slots: int) -> None:
        self.info = info
        self.num_slots = num_slots
        self.model = model
        self.cache = KVCache(model.layers, num_slots, dtype=model.dtype, device=model.device)
        bytes_per_key = max(layer.num_bytes(model.dtype) for layer in model.layers)
        self._max_group_keys = _CPU_GROUP_BYTES // bytes_per_key if model.device.type == "cpu" else 1 << 40

    def forward(self, batch: StepBatch) -> npt.NDArray[np.float32]:
        """See StepModel.forward.

        Raises InvalidRequestError for a row beyond the context limit or a token that is not in the vocabulary,
        InvariantError for a slot that does not exist.
        """
        return self.run(self.prepare(batch))

    def prepare(self, batch: StepBatch) -> StepArrays:
        """The first half of `forward`, which checks and changes nothing. Raises what `forward` does."""
        arrays = plan_step(batch, self._max_group_keys)
        self._check(arrays)
        return arrays

    def run(self, arrays: StepArrays) -> npt.NDArray[np.float32]:
        """The second half of `forward`."""
        with torch.inference_mode():
            logits = self.model.logits(StepPlan(arrays, self.cache))[:, : self.info.vocab_size]
            result: npt.NDArray[np.float32] = logits.float().cpu().numpy()
        return result

    def take_part(self, arrays: StepArrays) -> None:
        """The second half of `forward` on a rank whose logits nobody asks for."""
        with torch.inference_mode():
            self.model.logits(StepPlan(arrays, self.cache))

    def clear_slots(self, slots: Sequence[int]) -> None:
        """See StepModel.clear_slots."""
        if slots:
            with torch.inference_mode():
                self.cache.clear(slots)

    def _check(self, arrays: StepArrays) -> None:
        if arrays.positions.max() >= self.info.max_context or arrays.positions.min() < 0:
            raise InvalidRequestError(f"a row stands beyond the context limit of {self.info.max_context} positions")
        if arrays.tokens.max() >= self.info.vocab_size or arrays.tokens.min() < 0:
            raise InvalidRequestError(f"a token id is not in 0..{self.info.vocab_size - 1}")
        for group in arrays.groups:
            for part in group.parts:
                if part.key_slots.max() >= self.num_slots or part.key_slots.min() < 1:
                    raise InvariantError(f"a batch names a slot outside 1..{self.num_slots - 1}")
