"""A decoder of the Llama kind run with as few operations as it takes.

Owns: the arithmetic of one step for families whose layers are RMSNorm, rotary attention and a gated MLP; the fused
weights. Must not know: slots, sessions, how rows attend (the plan does that).

transformers' modules spend most of a small step on calls and small operations (1 ms a layer whatever the width); this
spends a quarter of it. The weights stay transformers': its modules keep views of the fused ones, and the logits of both
are compared once at load (`prepared.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from specpipe.engine.attention import Plan
from specpipe.engine.linear import Linear, fuse

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


@dataclass(slots=True, kw_only=True)
class _Layer:
    input_norm: Tensor
    qkv: Linear
    head_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim]: Qwen3 normalises queries and keys by head
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    scaling: float
    window: int | None


class FastDecoder:
    """Runs `model` (a transformers model of FAMILIES). Building it fuses the model's weights in place."""

    def __init__(self, model: Any, windows: Sequence[int | None]) -> None:
        body = model.model
        attention = body.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.num_heads: int = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads: int = attention.k_proj.out_features // self.head_dim
        self.eps: float = body.norm.variance_epsilon
        self.layers = [self._fuse_layer(layer, window) for layer, window in zip(body.layers, windows, strict=True)]
        self.norm: Tensor = body.norm.weight
        self.embedding: Tensor = body.embed_tokens.weight
        self.head = Linear(self.embedding if model.lm_head.weight is self.embedding else model.lm_head.weight)
        self.rotary_emb = body.rotary_emb

    @staticmethod
    def can_run(model: Any) -> bool:
        return type(model).__name__ in FAMILIES and model.config.hidden_act in ("silu", "swish")

    def logits(self, tokens: Tensor, positions: Tensor, wanted: Tensor, plan: Plan) -> Tensor:
        """[num_wanted, output rows]; `tokens` and `positions` are [1, num_rows]."""
        hidden = self.embedding.index_select(0, tokens[0])
        cos, sin = self._rotation(hidden, positions)
        for index, layer in enumerate(self.layers):
            hidden = self._run_layer(index, layer, hidden, cos, sin, plan)
        hidden = hidden.index_select(0, wanted)
        return self.head(self._norm(hidden, self.norm))

    def _run_layer(self, index: int, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor, plan: Plan) -> Tensor:
        num_rows = hidden.shape[0]
        num_rotated = self.num_heads + self.num_kv_heads
        heads = layer.qkv(self._norm(hidden, layer.input_norm)).view(num_rows, -1, self.head_dim)
        rotated = heads[:, :num_rotated]
        if layer.head_norm is not None:
            rotated = self._norm(rotated, layer.head_norm)
        rotated = torch.addcmul(rotated * cos, rotated.roll(self.head_dim // 2, -1), sin)
        query, key, value = rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, num_rotated:]
        attended = plan.attend(index, query, key, value, layer.scaling, layer.window)
        hidden = layer.out.add_to(hidden, attended.reshape(num_rows, -1))
        gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, -1)
        return layer.down.add_to(hidden, silu(gate).mul_(up))

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if weight.dim() > 1:
            return rms_norm(hidden, hidden.shape[-1:], None, self.eps) * weight
        return rms_norm(hidden, hidden.shape[-1:], weight, self.eps)

    def _rotation(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [num_rows, 1, head_dim]; the sign of rotate_half is folded into sin."""
        cos, sin = self.rotary_emb(hidden, positions)
        half = self.head_dim // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        return cos[0].unsqueeze(1), signed.unsqueeze(1)

    def _fuse_layer(self, layer: Any, window: int | None) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return _Layer(
            input_norm=layer.input_layernorm.weight,
            qkv=fuse(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norm=self._head_norm(attention),
            out=fuse(attention.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=fuse(mlp.gate_proj, mlp.up_proj),
            down=fuse(mlp.down_proj),
            scaling=attention.scaling,
            window=window,
        )

    def _head_norm(self, attention: Any) -> Tensor | None:
        if not hasattr(attention, "q_norm"):
            return None
        query, key = attention.q_norm.weight, attention.k_norm.weight
        return torch.cat((query.expand(self.num_heads, -1), key.expand(self.num_kv_heads, -1)))
