"""Attention over KV slots, registered with transformers under the name ATTENTION.

Owns: the step plan as tensors and the function every attention layer of a model calls. Must not know: sessions,
model families. The model is called on one flattened batch [1, num_rows] with the plan as keyword argument
`specpipe_plan`; each layer writes its K and V to slots, then attends group by group.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from specpipe.engine.kv_cache import KVCache, LayerShape
from specpipe.engine.plan import Group, StepArrays
from specpipe.errors import UnsupportedModelError

ATTENTION = "specpipe"
PLAN = "specpipe_plan"
_MAX_FOLDED_ROWS = 64  # up to here query heads of one KV head become rows of one product

# Arguments that reach the function without changing what attention computes: rows and masks are the plan's.
_HARMLESS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache",
        "past_key_values",
        "past_key_value",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "token_type_ids",
        "deterministic",
    }
)


class Plan(Protocol):
    """What a layer's attention does with its queries, keys and values."""

    num_positions: int  # all rows stand below it

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [num_rows, num_heads, key_dim]
        key: torch.Tensor,  # [num_rows, num_kv_heads, key_dim]
        value: torch.Tensor,  # [num_rows, num_kv_heads, value_dim]
        scaling: float,
        window: int | None,
    ) -> torch.Tensor: ...  # [num_rows, num_heads, value_dim]


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_rows, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_rows, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_rows, value_dim]
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    specpipe_plan: Plan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers' attention modules call. Returns [1, num_rows, num_heads, value_dim] and no weights.

    Raises UnsupportedModelError for an argument that would change the result and that it does not implement.
    """
    if specpipe_plan is None or attention_mask is not None or dropout or is_causal is False:
        raise UnsupportedModelError(f"{type(module).__name__} calls attention with a mask, dropout or no step plan")
    if not kwargs.keys() <= _HARMLESS:
        _refuse_unknown(module, kwargs)
    attended = specpipe_plan.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
    )
    return attended.unsqueeze(0), None


def register() -> None:
    """Make ATTENTION known to transformers.

    NOTE: it is left out of AttentionMaskInterface on purpose: transformers then builds no mask at all, and does not
    look for packed sequences either.
    """
    AttentionInterface.register(ATTENTION, attention_forward)


def _refuse_unknown(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    for name in sorted(kwargs.keys() - _HARMLESS):
        if kwargs[name] is not None and kwargs[name] is not False:
            raise UnsupportedModelError(
                f"{type(module).__name__} passes {name!r} to attention, which specpipe does not implement"
            )


class ShapeProbe:
    """A plan for one row that attends to itself and notes what each layer's keys and values look like."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}
        self.num_positions = 1
        self.dtype = torch.float32

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,  # noqa: ARG002 (the protocol's)
        window: int | None,
    ) -> torch.Tensor:
        _, num_kv_heads, key_dim = key.shape
        self.shapes[layer] = LayerShape(num_kv_heads=num_kv_heads, key_dim=key_dim, value_dim=value.shape[-1])
        self.windows[layer] = window
        self.dtype = key.dtype
        return value.repeat_interleave(query.shape[1] // num_kv_heads, dim=1)


class _GroupTensors:
    """One attention group on the device, with its masks made when a layer first needs them."""

    def __init__(self, group: Group, device: torch.device, dtype: torch.dtype, num_rows_of_step: int) -> None:
        self.group = group
        self.shape = (len(group.parts), group.num_rows, group.num_keys)
        self.device = device
        self.dtype = dtype
        self.key_range = group.key_range
        self.key_slots = None if self.key_range else torch.from_numpy(group.key_slots.reshape(-1)).to(device)
        rows = group.rows
        is_real = group.is_real
        self.is_padded = not is_real.all()
        first, end = int(rows[0]), int(rows[0]) + len(rows)
        is_run = not self.is_padded and bool((rows[1:] - rows[:-1] == 1).all())
        self.run = (first, end) if is_run else None
        self.is_whole = self.run == (0, num_rows_of_step)
        if self.run is None:
            self.rows = torch.from_numpy(rows).to(device)
            self.real_rows = torch.from_numpy(rows[is_real]).to(device)
            self.real_places = torch.from_numpy(is_real.nonzero()[0]).to(device)
        self._masks: dict[tuple[int | None, int], torch.Tensor] = {}

    def mask(self, window: int | None, repeats: int) -> torch.Tensor:
        """Additive [num_parts, 1, num_rows * repeats, num_keys]: each row stands `repeats` times."""
        mask = self._masks.get((window, repeats))
        if mask is None:
            visible = torch.from_numpy(self.group.visible(window)).to(self.device)
            mask = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            mask.masked_fill_(~visible, float("-inf"))
            mask = mask.repeat_interleave(repeats, dim=1).unsqueeze(1)
            self._masks[window, repeats] = mask
        return mask

    def take(self, query: torch.Tensor) -> torch.Tensor:
        """The group's rows of `query`, [num_parts * num_rows, ...]."""
        if self.is_whole:
            return query
        return query[self.run[0] : self.run[1]] if self.run else query.index_select(0, self.rows)

    def put(self, out: torch.Tensor, attended: torch.Tensor) -> None:
        """Write the group's rows to `out`, [num_rows of the step, ...]."""
        if self.run:
            out[self.run[0] : self.run[1]] = attended
        elif self.is_padded:
            out.index_copy_(0, self.real_rows, attended.index_select(0, self.real_places))
        else:
            out.index_copy_(0, self.rows, attended)

    def gather(self, cache: torch.Tensor) -> torch.Tensor:
        """The group's keys and values, [num_parts, num_keys, num_kv_heads, key_dim + value_dim]."""
        if self.key_range:
            return cache[self.key_range[0] : self.key_range[1]].unsqueeze(0)
        assert self.key_slots is not None
        return cache.index_select(0, self.key_slots).view(self.shape[0], self.shape[2], *cache.shape[1:])


class StepPlan:
    """One step on the device: what `attend` does in every layer."""

    def __init__(self, arrays: StepArrays, cache: KVCache) -> None:
        device, dtype = cache.device, cache.dtype
        self.cache = cache
        self.num_rows = len(arrays.tokens)
        self.num_positions = int(arrays.positions.max()) + 1
        self.tokens = torch.from_numpy(arrays.tokens).to(device).unsqueeze(0)
        self.positions = torch.from_numpy(arrays.positions).to(device).unsqueeze(0)
        self.wanted = torch.from_numpy(arrays.wanted).to(device)
        self.num_layers_seen = 0
        self._write_slots = torch.from_numpy(arrays.write_slots).to(device)
        self._groups = [_GroupTensors(group, device, dtype, self.num_rows) for group in arrays.groups]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        self.num_layers_seen += 1
        cache = self.cache
        cache.keys[layer].index_copy_(0, self._write_slots, key)
        cache.values[layer].index_copy_(0, self._write_slots, value)
        both = cache.layers[layer]
        groups = self._groups
        if len(groups) == 1 and groups[0].is_whole:
            return _attend_group(groups[0], query, both, scaling, window)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
        for group in groups:
            group.put(out, _attend_group(group, group.take(query), both, scaling, window))
        return out


def _attend_group(
    group: _GroupTensors,
    query: torch.Tensor,  # [num_parts * num_rows, num_heads, key_dim]
    cache: torch.Tensor,  # [num_slots, num_kv_heads, key_dim + value_dim]
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    num_parts, num_rows, _ = group.shape
    repeats = query.shape[1] // cache.shape[1]
    both = group.gather(cache)
    key, value = both[..., : query.shape[-1]], both[..., query.shape[-1] :]
    if num_parts == 1 and repeats > 1 and num_rows > _MAX_FOLDED_ROWS:
        return _attend_chunk(query, key[0], value[0], group.mask(window, 1), scaling)
    return _attend_folded(query, key, value, group.mask(window, repeats), scaling)


def _attend_folded(
    query: torch.Tensor,  # [num_parts * num_rows, num_heads, key_dim]
    key: torch.Tensor,  # [num_parts, num_keys, num_kv_heads, key_dim]
    value: torch.Tensor,
    mask: torch.Tensor,  # [num_parts, 1, num_rows * repeats, num_keys]
    scaling: float,
) -> torch.Tensor:
    """The query heads of one KV head become rows: nothing is repeated in memory."""
    num_parts, _, num_kv_heads, key_dim = key.shape
    num_places, num_heads, _ = query.shape
    num_rows, repeats = num_places // num_parts, num_heads // num_kv_heads
    folded = query.reshape(num_parts, num_rows, num_kv_heads, repeats, key_dim).transpose(1, 2)
    attended = scaled_dot_product_attention(
        folded.reshape(num_parts, num_kv_heads, num_rows * repeats, key_dim),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        scale=scaling,
    )
    unfolded = attended.reshape(num_parts, num_kv_heads, num_rows, repeats, value.shape[-1]).transpose(1, 2)
    return unfolded.reshape(num_places, num_heads, value.shape[-1])


def _attend_chunk(
    query: torch.Tensor,  # [num_rows, num_heads, key_dim]
    key: torch.Tensor,  # [num_keys, num_kv_heads, key_dim]
    value: torch.Tensor,
    mask: torch.Tensor,  # [1, 1, num_rows, num_keys]
    scaling: float,
) -> torch.Tensor:
    """A long chunk: KV heads become the batch, their query heads share them by a stride of 0; the mask stays small."""
    num_keys, num_kv_heads, key_dim = key.shape
    num_rows, num_heads, _ = query.shape
    repeats = num_heads // num_kv_heads
    attended = scaled_dot_product_attention(
        query.reshape(num_rows, num_kv_heads, repeats, key_dim).permute(1, 2, 0, 3),
        key.permute(1, 0, 2).unsqueeze(1).expand(num_kv_heads, repeats, num_keys, key_dim),
        value.permute(1, 0, 2).unsqueeze(1).expand(num_kv_heads, repeats, num_keys, value.shape[-1]),
        attn_mask=mask,
        scale=scaling,
    )
    return attended.permute(2, 0, 1, 3).reshape(num_rows, num_heads, value.shape[-1])
