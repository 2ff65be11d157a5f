"""Admission of a family outside the proven list: its flattened step must agree with its own stock forward.

Owns: that comparison, made once at load on the real weights. Must not know: which families are proven.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specpipe.engine.attention import ATTENTION, StepPlan
from specpipe.engine.interface import SessionRows, StepBatch
from specpipe.engine.kv_cache import KVCache
from specpipe.engine.plan import plan_step
from specpipe.engine.prepared import PreparedModel
from specpipe.errors import UnsupportedModelError

_MAX_LENGTH = 48
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of the largest logit

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Path:
    """A sequence whose last row is compared."""

    tokens: list[int]
    got: FloatArray


def check_model(model: PreparedModel, max_context: int) -> None:
    """Raise UnsupportedModelError unless a mixed batch with a tree gives the stock forward's logits."""
    _check_windows(model, max_context)
    length = min(_MAX_LENGTH, max_context - 2)
    if length < 8:
        raise UnsupportedModelError(
            f"{model.name}: a context of {max_context} positions is too short to check the model"
        )
    paths = _run_steps(model, length)
    model.model.set_attn_implementation("eager")
    try:
        expected = [_stock_row(model, path.tokens) for path in paths]
    finally:
        model.model.set_attn_implementation(ATTENTION)
    for path, row in zip(paths, expected, strict=True):
        error = float(np.abs(path.got - row).max() / max(1e-6, float(np.abs(row).max())))
        if not error <= _TOLERANCE.get(model.dtype, 5e-2):
            raise UnsupportedModelError(
                f"{model.name} is not a family that specpipe knows, and its logits in a mixed batch differ from the "
                f"stock forward by {error:.1e} of the largest"
            )


def _check_windows(model: PreparedModel, max_context: int) -> None:
    """A window that is only in the config, not in the attention calls, would be missed by a short check."""
    window = getattr(model.model.config.get_text_config(), "sliding_window", None)
    kinds = getattr(model.model.config.get_text_config(), "layer_types", None)
    if not window or window >= max_context or (kinds is not None and "sliding_attention" not in kinds):
        return
    if window not in model.windows:
        raise UnsupportedModelError(f"{model.name} has a sliding window that its attention layers do not pass on")


def _run_steps(model: PreparedModel, length: int) -> list[_Path]:
    """Two sessions: one prefilled in two chunks, the other decoding with a tree of three nodes beside the second."""
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, model.num_output_rows, length).tolist() for _ in range(2))
    nodes = rng.integers(0, model.num_output_rows, 3).tolist()
    cache = KVCache(model.layers, 2 * length + 8, dtype=model.dtype, device=model.device)
    slots = list(range(2 * length, 0, -1))  # neither in order nor neighbours
    first_slots, second_slots = slots[::2], slots[1::2]
    half = length // 2
    opening = [_chunk(1, first, first_slots, 0, half), _chunk(2, second, second_slots, 0, length - 1)]
    _run(model, cache, opening)
    tree = _chunk(2, second, second_slots, length - 1, length)
    tree.tokens = [second[-1], *nodes]
    tree.tree_slots = [2 * length + 1, 2 * length + 2, 2 * length + 3]
    tree.tree_rows = [0, 1, 2]
    tree.tree_positions = [length, length, length + 1]  # two siblings, then a child of the first
    tree.tree_visible = [0b001, 0b010, 0b101]
    tree.wants_logits = [True] * 4
    got = _run(model, cache, [_chunk(1, first, first_slots, half, length), tree])
    sequences = [first[: end + 1] for end in range(half, length)]
    sequences += [second, [*second, nodes[0]], [*second, nodes[1]], [*second, nodes[0], nodes[2]]]
    return [_Path(tokens, row) for tokens, row in zip(sequences, got, strict=True)]


def _chunk(session: int, tokens: list[int], slots: list[int], start: int, end: int) -> SessionRows:
    return SessionRows(
        session=session,
        context_slots=slots[:end],
        num_computed=start,
        tokens=tokens[start:end],
        num_committed_rows=end - start,
        wants_logits=[True] * (end - start),
    )


def _run(model: PreparedModel, cache: KVCache, sessions: list[SessionRows]) -> FloatArray:
    with torch.inference_mode():
        plan = StepPlan(plan_step(StepBatch(sessions=sessions)), cache)
        result: FloatArray = model.logits(plan).float().cpu().numpy()
    return result


def _stock_row(model: PreparedModel, tokens: list[int]) -> FloatArray:
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=model.device)
        row: FloatArray = model.model(input_ids=ids, use_cache=False).logits[0, -1].float().cpu().numpy()
    return row
