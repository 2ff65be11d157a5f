"""Keys and values of every layer at token granularity: one slot is one token's place in all layers.

Owns: the tensors. Must not know: which session holds a slot (slots.py), how attention is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one layer writes for one token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def num_bytes(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


class KVCache:
    """Per layer `keys` and `values` of shape [num_slots, num_kv_heads, dim], zero at the start. Slot 0 is scratch."""

    def __init__(
        self, layers: Sequence[LayerShape], num_slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.layers = tuple(layers)
        self.keys = [
            torch.zeros(num_slots, layer.num_kv_heads, layer.key_dim, dtype=dtype, device=device) for layer in layers
        ]
        self.values = [
            torch.zeros(num_slots, layer.num_kv_heads, layer.value_dim, dtype=dtype, device=device) for layer in layers
        ]

    def clear(self, slots: Sequence[int]) -> None:
        """Zero `slots` in every layer: a masked NaN would leak through attention (0 x NaN is NaN)."""
        index = torch.tensor(slots, dtype=torch.int64, device=self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, index, 0.0)
