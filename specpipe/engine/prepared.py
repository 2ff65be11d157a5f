"""A transformers model set up to run flattened steps with specpipe's attention.

Owns: the call into transformers, and what is learned of the model's layers by one probing forward.
Must not know: slots' holders, limits, sessions.
"""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel

from specpipe.engine import attention
from specpipe.engine.attention import PLAN, ShapeProbe, StepPlan
from specpipe.engine.fast_decoder import FastDecoder
from specpipe.engine.interface import SessionRows, StepBatch
from specpipe.engine.kv_cache import KVCache, LayerShape
from specpipe.engine.linear import pack_model
from specpipe.engine.plan import plan_step
from specpipe.errors import InvariantError, SpecpipeError, UnsupportedModelError

_CHECKED_ROWS = 4
# Of the largest logit. Two right computations differ so much in bfloat16: transformers' own against float32 by 0.066
# on Qwen2.5-Coder-1.5B, where packed weights differ by 0.000015. A wrong one differs by about 1.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}


class PreparedModel:
    """`model` is changed in place and given away: no gradients, specpipe's attention, packed weights.

    `is_rounded`: weights are rounded to 8 bits where they can be; what is computed is then a hint."""

    def __init__(self, model: PreTrainedModel, *, is_rounded: bool = False) -> None:
        attention.register()
        model.eval().requires_grad_(False)
        model.set_attn_implementation(attention.ATTENTION)
        self.model = model
        self.name = type(model).__name__
        self.device: torch.device = next(model.parameters()).device
        self.num_output_rows: int = model.get_input_embeddings().num_embeddings
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._fast: FastDecoder | None = None
        probe = self._probe()
        self.layers: list[LayerShape] = [probe.shapes[layer] for layer in range(len(probe.shapes))]
        self.windows: list[int | None] = [probe.windows[layer] for layer in range(len(probe.shapes))]
        self.dtype: torch.dtype = probe.dtype  # of keys and values
        self._speed_up(is_rounded=is_rounded)

    @property
    def bytes_per_slot(self) -> int:
        return sum(layer.num_bytes(self.dtype) for layer in self.layers)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run the step; return logits of its wanted rows, [num_wanted, output rows of the model]."""
        if self._fast is not None:
            return self._fast.logits(plan.tokens, plan.positions, plan.wanted, plan)
        keep = {"logits_to_keep": plan.wanted} if self._keeps_logits else {}
        inputs = {"input_ids": plan.tokens, "position_ids": plan.positions, "use_cache": False, PLAN: plan}
        logits: torch.Tensor = self.model(**inputs, **keep).logits[0]
        if plan.num_layers_seen != len(self.layers):
            raise InvariantError(f"{plan.num_layers_seen} of {len(self.layers)} layers used specpipe's attention")
        return logits if self._keeps_logits else logits.index_select(0, plan.wanted)

    def _speed_up(self, *, is_rounded: bool) -> None:
        """Pack weights and leave transformers' modules where there is a faster way. Raises if logits then differ.

        Those of rounded weights do, most of all where a model has a few very large activations, as at the first token
        of a text: each product was compared with the exact one when it was rounded.
        """
        weights_dtype = next(self.model.parameters()).dtype
        before = self._sample_logits()
        if FastDecoder.can_run(self.model):
            self._fast = FastDecoder(self.model, self.windows, is_rounded=is_rounded)
            self.dtype = self._fast.dtype
        else:
            pack_model(self.model, is_rounded=is_rounded)
            self.dtype = self._probe().dtype
        after = self._sample_logits()
        if is_rounded:
            return
        error = float((after - before).abs().max() / before.abs().max().clamp(min=1e-6))
        if not error <= _TOLERANCE.get(weights_dtype, 0.25):
            raise UnsupportedModelError(f"{self.name}: logits with packed weights differ by {error:.1e} of the largest")

    def _sample_logits(self) -> torch.Tensor:
        """Of a few rows of one sequence."""
        slots = list(range(1, _CHECKED_ROWS + 1))
        rows = SessionRows(
            session=0,
            context_slots=slots,
            num_computed=0,
            tokens=[slot % self.num_output_rows for slot in slots],
            num_committed_rows=len(slots),
            wants_logits=[True] * len(slots),
        )
        cache = KVCache(self.layers, len(slots) + 1, dtype=self.dtype, device=self.device)
        with torch.inference_mode():
            return self.logits(StepPlan(plan_step(StepBatch(sessions=[rows])), cache)).float()

    def _probe(self) -> ShapeProbe:
        probe = ShapeProbe()
        row = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        try:
            with torch.inference_mode():
                self.model(input_ids=row, position_ids=row, use_cache=False, **{PLAN: probe})
        except SpecpipeError:
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise UnsupportedModelError(f"{self.name} does not run on flattened batches ({error})") from error
        if not probe.shapes or sorted(probe.shapes) != list(range(len(probe.shapes))):
            raise UnsupportedModelError(f"{self.name} does not use transformers' attention interface in every layer")
        return probe
