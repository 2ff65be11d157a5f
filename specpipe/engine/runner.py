"""A loaded model with its KV slots, behind the StepModel interface.

Owns: the model, the KV cache, one forward pass. Must not know: trees, requests, sampling, where the weights came from.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from specpipe.engine import attention
from specpipe.engine.attention import PLAN, ShapeProbe, StepPlan
from specpipe.engine.interface import StepBatch
from specpipe.engine.kv_cache import KVCache, LayerShape
from specpipe.engine.plan import StepArrays, plan_step
from specpipe.errors import InvalidRequestError, InvariantError, UnsupportedModelError
from specpipe.types import ModelInfo


class ModelRunner:
    """Implements specpipe.engine.interface.StepModel for a transformers model. Called from one thread only."""

    def __init__(self, model: PreTrainedModel, info: ModelInfo, *, num_slots: int) -> None:
        self.info = info
        self.num_slots = num_slots
        self.model = prepare_model(model)
        self.device = next(model.parameters()).device
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        layers, self.windows, self.dtype = probe_layers(self.model)
        self.cache = KVCache(layers, num_slots, dtype=self.dtype, device=self.device)

    def forward(self, batch: StepBatch) -> npt.NDArray[np.float32]:
        """See StepModel.forward. Rows at or beyond the context limit, or tokens out of range, raise InvalidRequestError."""
        arrays = plan_step(batch)
        self._check(arrays)
        with torch.inference_mode():
            plan = StepPlan(arrays, self.cache, dtype=self.dtype, device=self.device)
            logits = self._run(plan)
            return logits[:, : self.info.vocab_size].float().cpu().numpy()

    def clear_slots(self, slots: Sequence[int]) -> None:
        if slots:
            with torch.inference_mode():
                self.cache.clear(slots)

    def _run(self, plan: StepPlan) -> torch.Tensor:
        """[num_wanted, output rows of the model]"""
        keep = {"logits_to_keep": plan.wanted} if self._keeps_logits else {}
        inputs = {"input_ids": plan.tokens, "position_ids": plan.positions, "use_cache": False, PLAN: plan}
        logits: torch.Tensor = self.model(**inputs, **keep).logits[0]
        if plan.num_layers_seen != len(self.cache.layers):
            raise InvariantError(f"{plan.num_layers_seen} of {len(self.cache.layers)} layers used specpipe's attention")
        return logits if self._keeps_logits else logits.index_select(0, plan.wanted)

    def _check(self, arrays: StepArrays) -> None:
        if arrays.positions.max() >= self.info.max_context or arrays.positions.min() < 0:
            raise InvalidRequestError(f"a row stands beyond the context limit of {self.info.max_context} positions")
        if arrays.tokens.max() >= self.info.vocab_size or arrays.tokens.min() < 0:
            raise InvalidRequestError(f"a token id is not in 0..{self.info.vocab_size - 1}")
        for group in arrays.groups:
            for part in group.parts:
                if part.key_slots.max() >= self.num_slots or part.key_slots.min() < 1:
                    raise InvariantError(f"a batch names a slot outside 1..{self.num_slots - 1}")


def prepare_model(model: PreTrainedModel) -> PreTrainedModel:
    """Set the model up for inference with specpipe's attention, in place."""
    attention.register()
    model.eval()
    model.requires_grad_(False)
    model.set_attn_implementation(attention.ATTENTION)
    return model


def probe_layers(model: PreTrainedModel) -> tuple[list[LayerShape], list[int | None], torch.dtype]:
    """What each layer writes per token, its window, and the dtype of keys: seen in a forward of one row."""
    probe = ShapeProbe()
    device = next(model.parameters()).device
    row = torch.zeros(1, 1, dtype=torch.int64, device=device)
    with torch.inference_mode():
        model(input_ids=row, position_ids=row, use_cache=False, **{PLAN: probe})
    if sorted(probe.shapes) != list(range(len(probe.shapes))) or not probe.shapes:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not use transformers' attention interface in each layer"
        )
    layers = range(len(probe.shapes))
    return [probe.shapes[layer] for layer in layers], [probe.windows[layer] for layer in layers], probe.dtype
