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
from specpipe.engine.kv_cache import LayerShape
from specpipe.errors import InvariantError, SpecpipeError, UnsupportedModelError


class PreparedModel:
    """`model` is changed in place: evaluation mode, no gradients, specpipe's attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        attention.register()
        model.eval().requires_grad_(False)
        model.set_attn_implementation(attention.ATTENTION)
        self.model = model
        self.name = type(model).__name__
        self.device: torch.device = next(model.parameters()).device
        self.num_output_rows: int = model.get_input_embeddings().num_embeddings
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        probe = self._probe()
        self.layers: list[LayerShape] = [probe.shapes[layer] for layer in range(len(probe.shapes))]
        self.windows: list[int | None] = [probe.windows[layer] for layer in range(len(probe.shapes))]
        self.dtype: torch.dtype = probe.dtype  # of keys and values
        self.fast = FastDecoder(model, self.windows) if FastDecoder.can_run(model) else None

    @property
    def bytes_per_slot(self) -> int:
        return sum(layer.num_bytes(self.dtype) for layer in self.layers)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run the step; return logits of its wanted rows, [num_wanted, output rows of the model]."""
        if self.fast is not None:
            return self.fast.logits(plan.tokens, plan.positions, plan.wanted, plan)
        keep = {"logits_to_keep": plan.wanted} if self._keeps_logits else {}
        inputs = {"input_ids": plan.tokens, "position_ids": plan.positions, "use_cache": False, PLAN: plan}
        logits: torch.Tensor = self.model(**inputs, **keep).logits[0]
        if plan.num_layers_seen != len(self.layers):
            raise InvariantError(f"{plan.num_layers_seen} of {len(self.layers)} layers used specpipe's attention")
        return logits if self._keeps_logits else logits.index_select(0, plan.wanted)

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
