"""A decoder of the Llama kind run with as few operations as it takes.

Owns: the arithmetic of one step for families whose layers are RMSNorm, rotary attention and a gated MLP; the fused
weights. Must not know: slots, sessions, how rows attend (the plan does that).

transformers' modules spend most of a small step on calls and small operations; this does a third of them. It takes the
weights over from transformers' modules, and `prepared.py` compares the logits of both at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from specpipe.engine.attention import Plan
from specpipe.engine.linear import Linear, can_pack, combine_of, fuse

FAMILIES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


class _Norm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        size = weight.shape[-1]
        self.eps = eps
        self.weight = weight.to(dtype)
        self.scaled_weight = self.weight * size**0.5
        self.floor = torch.tensor((size * eps) ** 0.5, dtype=dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if (
            x.dtype == torch.float32 and x.device.type == "cpu"
        ):  # half the time of rms_norm, which is made of more parts
            length = torch.hypot(torch.linalg.vector_norm(x, 2, -1, keepdim=True), self.floor)
            return x.div(length).mul_(self.scaled_weight)
        if self.weight.dim() == 1:
            return rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return rms_norm(x, x.shape[-1:], None, self.eps) * self.weight


class _Rotation:
    """cos and sin of every position so far asked for, rounded up; frequencies are fixed (see rope.py)."""

    def __init__(self, rotary_emb: Any, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rotary_emb = rotary_emb
        self._half = head_dim // 2
        self._sample = torch.zeros((), dtype=dtype, device=device)
        self._table = torch.zeros(0, 2, 1, head_dim)  # [position, cos or sin, 1, head_dim]

    def __call__(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin of `positions`, all below `num_positions`, [num_rows, 1, head_dim]; the sign of rotate_half is
        folded into sin."""
        if num_positions > self._table.shape[0]:
            self._grow(max(1024, 1 << (num_positions - 1).bit_length()))
        rows = self._table.index_select(0, positions)
        return rows[:, 0], rows[:, 1]

    def _grow(self, size: int) -> None:
        cos, sin = self._rotary_emb(self._sample, torch.arange(size, device=self._sample.device).unsqueeze(0))
        signed = torch.cat((-sin[0, :, : self._half], sin[0, :, self._half :]), dim=-1)
        self._table = torch.stack((cos[0], signed), dim=1).unsqueeze(2)


@dataclass(slots=True, kw_only=True)
class _Layer:
    input_norm: _Norm
    qkv: Linear
    head_norm: _Norm | None  # weight [num_heads + num_kv_heads, head_dim]: Qwen3 normalises queries and keys by head
    out: Linear
    mlp_norm: _Norm
    gate_up: Linear
    down: Linear
    scaling: float
    window: int | None


class FastDecoder:
    """Runs `model` (a transformers model of FAMILIES), whose own forward no longer works afterwards."""

    def __init__(self, model: Any, windows: Sequence[int | None], *, is_rounded: bool = False) -> None:
        """`is_rounded`: weights are rounded to 8 bits where they can be."""
        self._is_rounded = is_rounded
        body = model.model
        attention = body.layers[0].self_attn
        weight = attention.q_proj.weight
        self.dtype: torch.dtype = torch.float32 if can_pack(weight) else weight.dtype  # of rows, keys and values
        self.head_dim: int = attention.head_dim
        self.num_heads: int = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads: int = attention.k_proj.out_features // self.head_dim
        self.eps: float = body.norm.variance_epsilon
        self.embedding: Tensor = body.embed_tokens.weight
        self.head = Linear(model.lm_head.weight, combine=combine_of(model.lm_head), is_rounded=is_rounded)
        self.layers = [self._take_layer(layer, window) for layer, window in zip(body.layers, windows, strict=True)]
        self.norm = self._take_norm(body.norm)
        self.rotation = _Rotation(body.rotary_emb, self.head_dim, self.dtype, weight.device)
        if model.lm_head.weight is not self.embedding:
            model.lm_head.weight = None

    @staticmethod
    def can_run(model: Any) -> bool:
        return type(model).__name__ in FAMILIES and model.config.hidden_act in ("silu", "swish")

    def logits(self, tokens: Tensor, positions: Tensor, wanted: Tensor, plan: Plan) -> Tensor:
        """[num_wanted, output rows]; `tokens` and `positions` are [1, num_rows]."""
        hidden = self.embedding.index_select(0, tokens[0]).to(self.dtype)
        cos, sin = self.rotation(positions[0], plan.num_positions)
        for index, layer in enumerate(self.layers):
            hidden = self._run_layer(index, layer, hidden, cos, sin, plan)
        return self.head(self.norm(hidden.index_select(0, wanted)))

    def _run_layer(self, index: int, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor, plan: Plan) -> Tensor:
        num_rows = hidden.shape[0]
        num_rotated = self.num_heads + self.num_kv_heads
        heads = layer.qkv(layer.input_norm(hidden)).view(num_rows, -1, self.head_dim)
        rotated = heads[:, :num_rotated]
        if layer.head_norm is not None:
            rotated = layer.head_norm(rotated)
        rotated = torch.addcmul(rotated * cos, rotated.roll(self.head_dim // 2, -1), sin)
        query, key, value = rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, num_rotated:]
        attended = plan.attend(index, query, key, value, layer.scaling, layer.window)
        hidden = layer.out.add_to(hidden, attended.reshape(num_rows, -1))
        gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, -1)
        return layer.down.add_to(hidden, silu(gate).mul_(up))

    def _take_layer(self, layer: Any, window: int | None) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        return _Layer(
            input_norm=self._take_norm(layer.input_layernorm),
            qkv=self._fuse(attention.q_proj, attention.k_proj, attention.v_proj),
            head_norm=self._take_head_norm(attention),
            out=self._fuse(attention.o_proj),
            mlp_norm=self._take_norm(layer.post_attention_layernorm),
            gate_up=self._fuse(mlp.gate_proj, mlp.up_proj),
            down=self._fuse(mlp.down_proj),
            scaling=attention.scaling,
            window=window,
        )

    def _fuse(self, *modules: Any) -> Linear:
        return fuse(*modules, is_rounded=self._is_rounded)

    def _take_norm(self, norm: Any) -> _Norm:
        return _Norm(norm.weight, self.eps, self.dtype)

    def _take_head_norm(self, attention: Any) -> _Norm | None:
        if not hasattr(attention, "q_norm"):
            return None
        query, key = attention.q_norm.weight, attention.k_norm.weight
        weight = torch.cat((query.expand(self.num_heads, -1), key.expand(self.num_kv_heads, -1)))
        return _Norm(weight, attention.q_norm.variance_epsilon, self.dtype)
