"""Rotary frequencies that depend on the longest row of a batch, fixed once at load.

Owns: that fix. Must not know: families, batches.

`dynamic` and `longrope` models recompute their frequencies in each forward from the largest position in it. In a batch
of several sessions one session's length would then change the others' keys, and keys already in slots would no longer
fit. So the frequencies are set as for a sequence that fills the context limit, and stay (as vLLM does for longrope).
"""

from __future__ import annotations

import torch


def fix_frequencies(model: torch.nn.Module, max_context: int) -> list[str]:
    """Fix every length-dependent rotary embedding of `model`; return the names of the kinds that were fixed."""
    fixed: list[str] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _depends_on_length(kinds):
            _settle(module, max_context)
            fixed.append(kinds)
            module.rope_type = "default"
        elif isinstance(kinds, dict):
            lengthy = {layer: kind for layer, kind in kinds.items() if _depends_on_length(kind)}
            for layer, kind in lengthy.items():
                _settle(module, max_context, layer_type=layer)
                fixed.append(kind)
            module.rope_type = {**kinds, **dict.fromkeys(lengthy, "default")}
    return fixed


def _depends_on_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _settle(module: torch.nn.Module, max_context: int, **layer_type: str) -> None:
    """One forward at the last position leaves the frequencies of a full context behind."""
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    with torch.inference_mode(False), torch.no_grad():
        module(torch.zeros(1, device=device), torch.tensor([[max_context - 1]], device=device), **layer_type)
