"""Which model families specpipe serves, and why it refuses others.

Owns: the list of architectures proven equal to the stock forward by tests, and the reasons that rule a model out by
its config alone. Must not know: torch, transformers, weights (folder.py asks here before anything is loaded).
A family outside the list may still be admitted, by self_check.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PROVEN = frozenset(
    {
        "GPT2LMHeadModel",
        "GPTNeoXForCausalLM",
        "Gemma3ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "OPTForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)

_RECURRENT = (
    "mamba",
    "rwkv",
    "recurrent",
    "linear_attn",
    "ssm",
    "retnet",
    "xlstm",
    "lfm2",
    "minimax",
    "zamba",
    "jamba",
)
_RECURRENT_LAYERS = frozenset({"linear_attention", "recurrent", "conv", "mamba", "mamba2", "hybrid", "short_conv"})
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})


def reason_to_refuse(config: Mapping[str, Any]) -> str | None:
    """One sentence on why a model with this config.json cannot be served, or None. Decided without loading it."""
    names = config.get("architectures") or []
    model_type = str(config.get("model_type", ""))
    if not names and not model_type:
        return "its config.json names no architecture"
    name = str(names[0]) if names else model_type
    if config.get("is_encoder_decoder"):
        return f"{name} is an encoder-decoder model; specpipe serves decoder-only models"
    if names and not (name.endswith(("ForCausalLM", "LMHeadModel"))):
        return f"{name} is not a text generation (causal language) model"
    return _layer_reason(name, model_type, config) or _attention_reason(name, config)


def _layer_reason(name: str, model_type: str, config: Mapping[str, Any]) -> str | None:
    layers = {str(layer) for layer in config.get("layer_types") or config.get("layers_block_type") or ()}
    lowered = f"{name} {model_type}".lower()
    if layers & _RECURRENT_LAYERS or any(word in lowered for word in _RECURRENT):
        return f"{name} keeps a recurrent state, which cannot be rewound to an earlier token as speculation needs"
    if unknown := sorted(layers - _KNOWN_LAYERS):
        return f"{name} has layers of type {unknown[0]!r}, whose attention specpipe does not implement"
    return None


def _attention_reason(name: str, config: Mapping[str, Any]) -> str | None:
    if config.get("attention_chunk_size"):
        return f"{name} attends in chunks (attention_chunk_size), which specpipe does not implement"
    if config.get("attn_logit_softcapping"):
        return f"{name} caps attention scores (attn_logit_softcapping), which specpipe does not implement"
    if config.get("use_bidirectional_attention"):
        return f"{name} attends in both directions, so that later tokens would change earlier ones"
    if config.get("alibi") or "Bloom" in name or "Mpt" in name:
        return f"{name} biases attention by distance (ALiBi), which specpipe does not implement"
    if config.get("reorder_and_upcast_attn"):
        return f"{name} has reorder_and_upcast_attn set, which bypasses specpipe's attention"
    return None
