"""Tiny random models as GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from engine_cases import VOCAB, create_model
from engine_folders import tiny_vocabulary
from transformers import PreTrainedModel

# What transformers does not read from a GGUF's metadata and takes to be what these families are published with.
_FIXED: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "gpt2": {"n_positions": 1024},
    "gemma3": {"num_hidden_layers": 6, "layer_types": None},  # one of six is full
}
ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gpt2": "GPT2", "gemma3": "GEMMA3"}


def write_gguf(
    path: Path,
    family: str,
    *,
    num_unused: int = 0,
    is_quantised: bool = False,
    left_out: str = "",
    **overrides: Any,
) -> PreTrainedModel:
    """Write a model of `family`; return it. The last `num_unused` entries of its vocabulary are padding.

    `left_out`: a tensor that the file lacks.

    Quantised: matrices whose rows are whole blocks are Q8_0. Else all is float32, and the file equals the model.
    """
    model = create_model(family, **_FIXED.get(family, {}), **overrides)
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[family])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_config(writer, model.config)
    _write_vocabulary(writer, num_unused)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        stored = f"{names.get_name(stem)}.{kind}"
        if stored == left_out:
            continue
        values = _as_llama_cpp_stores(family, name, tensor, model.config)
        if is_quantised and values.ndim == 2 and values.shape[-1] % 32 == 0:
            block = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(values, block), raw_dtype=block)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _as_llama_cpp_stores(family: str, name: str, tensor: torch.Tensor, config: Any) -> np.ndarray:
    values = tensor
    if family == "llama" and ("q_proj" in name or "k_proj" in name):  # rotated pairs lie side by side
        num_heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    elif family == "gpt2" and any(part in name for part in ("c_attn.weight", "c_fc.weight", "c_proj.weight")):
        values = values.t()
    elif family == "gemma3" and name.endswith("norm.weight"):
        values = values + 1
    return np.ascontiguousarray(values.numpy())


def _write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(VOCAB)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(1e6 if "gemma" in config.model_type else 1e4)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _write_vocabulary(writer: gguf.GGUFWriter, num_unused: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(tiny_vocabulary()))
    writer.add_token_types([3] * 3 + [1] * (VOCAB - 3 - num_unused) + [5] * num_unused)
    writer.add_token_merges(["a a"])
    writer.add_eos_token_id(2)
