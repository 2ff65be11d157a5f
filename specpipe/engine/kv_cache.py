"""Keys and values of every layer at token granularity: one slot is one token's place in all layers.

Owns: the tensors. Must not know: which session holds a slot (slots.py), how attention is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_ALIGNMENT = 64  # a cache line


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What one layer writes for one token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        return self.key_dim + self.value_dim

    def num_bytes(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * self.width * int(dtype.itemsize)


class KVCache:
    """Per layer one tensor [num_slots, num_kv_heads, key_dim + value_dim], zero at the start. Slot 0 is scratch.

    Keys and values of a slot lie side by side, so that one gather fetches both.
    """

    def __init__(
        self, layers: Sequence[LayerShape], num_slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = device
        self.layers = [_zeros((num_slots, layer.num_kv_heads, layer.width), dtype, device) for layer in layers]
        self.keys = [both[..., : layer.key_dim] for both, layer in zip(self.layers, layers, strict=True)]
        self.values = [both[..., layer.key_dim :] for both, layer in zip(self.layers, layers, strict=True)]

    def clear(self, slots: Sequence[int]) -> None:
        """Zero `slots` in every layer: a masked NaN would leak through attention (0 x NaN is NaN)."""
        index = torch.tensor(slots, dtype=torch.int64, device=self.device)
        for both in self.layers:
            both.index_fill_(0, index, 0.0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU the pages are the kernel's zero page until a slot is written, so that unused slots cost no memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)
