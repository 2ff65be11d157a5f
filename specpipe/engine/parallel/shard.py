"""Loads one rank's part of a model: a transformers model whose split weights are narrower.

Owns: taking only the own slices of a checkpoint, and making transformers' modules work with fewer heads and narrower
MLPs. Must not know: processes, steps. Which weights are split is table.py's business.

The embedding is replicated; the head is split by vocabulary and its columns are gathered on rank 0.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from specpipe.engine import attention
from specpipe.engine.folder import ModelFolder
from specpipe.engine.linear import combine_with
from specpipe.engine.loader import quiet_transformers, read_config, resolve_dtype, translated_errors
from specpipe.engine.parallel.checkpoint import Checkpoint, open_checkpoint
from specpipe.engine.parallel.collective import Collective
from specpipe.engine.parallel.table import Heads, Rule, Side, ranges, rules_for, vocabulary_range
from specpipe.errors import ConfigError

_EXPERT = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)$")
_building = threading.Lock()  # transformers patches torch.nn.init for the whole process meanwhile


def load_shard(folder: ModelFolder, dtype: str, rank: int, size: int) -> PreTrainedModel:
    """The part of `rank`, on the CPU, with attention's heads and MLP widths cut. `join` makes its products whole.

    Raises ConfigError if heads or widths do not divide (with the numbers) or a weight is missing,
    UnsupportedModelError for a family that cannot be split.
    """
    with quiet_transformers(), translated_errors(folder):
        config = read_config(folder)
        with _building, no_init_weights():  # weights stay untouched memory until each is replaced by its part
            model = AutoModelForCausalLM.from_config(config, dtype=resolve_dtype(dtype, config))
    rules = rules_for(type(model).__name__, getattr(config.get_text_config(), "base_model_tp_plan", None))
    with ExitStack() as stack, translated_errors(folder):
        _Loader(model, rules, open_checkpoint(folder, model, stack), rank, size).load()
    _narrow_modules(model, size)
    return model.eval()


def join(model: PreTrainedModel, collective: Collective) -> None:
    """Let every product that is split by inputs sum over ranks, and the head gather its columns on rank 0."""
    rules = rules_for(type(model).__name__, getattr(model.config.get_text_config(), "base_model_tp_plan", None))
    row_rules = [rule for rule in rules if rule.side is Side.IN]
    for name, module in model.named_modules():
        if any(rule.matches(name) for rule in row_rules) or _holds_split_experts(module):
            combine_with(module, collective.sum)
    num_rows = model.get_input_embeddings().num_embeddings
    combine_with(model.get_output_embeddings(), lambda logits: _gather(collective, logits, num_rows))


def _gather(collective: Collective, logits: Tensor, num_rows: int) -> Tensor:
    """transformers' head gives [1, num_rows, columns], ours [num_rows, columns]."""
    return collective.gather_columns(logits.flatten(0, -2), num_rows).unflatten(0, logits.shape[:-1])


class _Loader:
    """Fills a model's parameters with one rank's parts."""

    def __init__(
        self, model: PreTrainedModel, rules: Sequence[Rule], checkpoint: Checkpoint, rank: int, size: int
    ) -> None:
        config = model.config.get_text_config()
        num_heads = int(config.num_attention_heads)
        self.heads = Heads(num_heads, int(getattr(config, "num_key_value_heads", None) or num_heads))
        self.model = model
        self.rules = rules
        self.checkpoint = checkpoint
        self.rank = rank
        self.size = size

    def load(self) -> None:
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        is_tied = bool(self.model.config.get_text_config().tie_word_embeddings)
        head_name = next(name for name, module in self.model.named_modules() if module is head)
        for name, old in list(self.model.named_parameters()):  # a tied one only once
            if name != f"{head_name}.weight":
                _set(self.model, name, self._part_of(name, old.shape).to(old.dtype))
        own = vocabulary_range(embedding.num_embeddings, self.rank, self.size)
        weight = embedding.weight[slice(*own)] if is_tied else self._read(f"{head_name}.weight", head.weight.shape, own)
        head.weight = nn.Parameter(weight.to(embedding.weight.dtype), requires_grad=False)

    def _part_of(self, name: str, shape: torch.Size) -> Tensor:
        """This rank's part of a parameter whose whole has `shape`."""
        rule = next((rule for rule in self.rules if rule.matches(name)), None)
        if rule is None:
            return self._read(name, shape, (0, shape[0]))
        if len(shape) == 1 and rule.side is Side.IN:  # a bias is added once, by rank 0
            return self._read(name, shape, (0, shape[0])) if self.rank == 0 else torch.zeros(shape)
        dim = self._split_dim(name, rule, len(shape))
        sections = ranges(rule, shape[dim], self.heads, self.rank, self.size)
        if (match := _EXPERT.match(name)) and not self.checkpoint.has(name):
            return self._read_experts(match[1], match[2], shape[0], sections)
        return self._read(name, shape, *sections, dim=dim)

    def _read(self, name: str, shape: torch.Size, *sections: tuple[int, int], dim: int = 0) -> Tensor:
        """Raises ConfigError if the whole is not stored with that `shape`."""
        stored = self.checkpoint.shape(name)
        if stored != tuple(shape):
            raise ConfigError(f"weight {name} is stored as {stored}, the model's config makes it {tuple(shape)}")
        return self.checkpoint.read(name, dim, sections)

    def _split_dim(self, name: str, rule: Rule, num_dims: int) -> int:
        """Weights are [.., out, in]; Conv1D's are [in, out]."""
        if num_dims == 1:
            return 0
        module = self.model.get_submodule(name.rpartition(".")[0])
        is_first = (rule.side is Side.OUT) is not isinstance(module, Conv1D)
        return num_dims - 2 if is_first else num_dims - 1

    def _read_experts(self, layer: str, kind: str, num_experts: int, sections: Sequence[tuple[int, int]]) -> Tensor:
        """Of a checkpoint that stores each expert's w1 (gate), w3 (up) and w2 (down) by itself."""

        def read(expert: int, weight: str, dim: int, section: tuple[int, int]) -> Tensor:
            name = f"{layer}.block_sparse_moe.experts.{expert}.{weight}.weight"
            return self.checkpoint.read(name, dim, [section])

        if kind == "down_proj":
            return torch.stack([read(expert, "w2", 1, sections[0]) for expert in range(num_experts)])
        own = sections[0]  # the same place in the gate's half and in the up's
        pairs = [(read(expert, "w1", 0, own), read(expert, "w3", 0, own)) for expert in range(num_experts)]
        return torch.stack([torch.cat(pair) for pair in pairs])


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))


def _holds_split_experts(module: nn.Module) -> bool:
    """A module of 3-dimensional weights, which transformers calls as a whole."""
    down = module._parameters.get("down_proj")
    return down is not None and down.dim() == 3


def _narrow_modules(model: PreTrainedModel, size: int) -> None:
    """Tell modules the sizes that their weights now have, where their code looks at more than the weights."""
    attention.register()
    model.set_attn_implementation(attention.ATTENTION)  # before a config is copied
    for module in model.modules():
        weight = module._parameters.get("weight")
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = weight.shape
        elif isinstance(module, Conv1D):
            module.nx, module.nf = weight.shape
        elif _holds_split_experts(module):
            module.intermediate_dim = module.down_proj.shape[-1]
        elif hasattr(module, "layer_idx") and hasattr(module, "head_dim"):
            _narrow_attention(module, size)


def _narrow_attention(module: Any, size: int) -> None:
    """Most families read the number of heads off the weights' widths; these three do not."""
    name = type(module).__name__
    if name in ("GPT2Attention", "OPTAttention"):
        module.num_heads //= size
    if name == "GPT2Attention":
        module.split_size //= size
    if name == "Phi3Attention":
        module.config = copy.copy(module.config)
        module.config.num_attention_heads //= size
        module.num_key_value_heads = max(1, module.num_key_value_heads // size)
