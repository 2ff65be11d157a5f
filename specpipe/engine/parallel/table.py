"""Which weights are split among ranks, and where: one table for all families.

Owns: the rules per family and the arithmetic of ranges. Must not know: torch, transformers, files. Pure.

A product is split by its outputs (each rank computes some of them; called column-parallel elsewhere) or by its inputs
(each rank computes a summand of every output; row-parallel: an all-reduce follows). Attention is split by heads, so
that each rank attends on its own; KV heads fewer than ranks stand on several. What no rule names is replicated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from specpipe.engine.families import PROVEN
from specpipe.errors import ConfigError, UnsupportedModelError


class Side(Enum):
    """Of a weight: what its product gives, or what it takes."""

    OUT = "out"
    IN = "in"


class Unit(Enum):
    """What must not be cut."""

    HEAD = "attention heads"
    KV_HEAD = "KV heads"
    WIDTH = "MLP columns"


@dataclass(frozen=True, slots=True)
class Rule:
    """Weights whose module (or the parameter itself) matches `pattern` are split on `side`.

    A fused weight has several sections side by side, each split by its own unit.
    """

    pattern: str  # as in transformers' tp_plan: "*" is a layer's number; relative to the model's body
    side: Side
    sections: tuple[Unit, ...]

    def matches(self, name: str) -> bool:
        """Whether a parameter's full name is meant."""
        pattern = re.escape(self.pattern).replace(r"\*", r"\d+")
        return re.search(rf"(?:^|\.){pattern}(?:\.weight|\.bias)?$", name) is not None


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a model."""

    num_heads: int
    num_kv_heads: int


def _out(pattern: str, *sections: Unit) -> Rule:
    return Rule(pattern, Side.OUT, sections)


def _in(pattern: str, unit: Unit) -> Rule:
    return Rule(pattern, Side.IN, (unit,))


_SEPARATE_ATTENTION = (
    _out("layers.*.self_attn.q_proj", Unit.HEAD),
    _out("layers.*.self_attn.k_proj", Unit.KV_HEAD),
    _out("layers.*.self_attn.v_proj", Unit.KV_HEAD),
    _in("layers.*.self_attn.o_proj", Unit.HEAD),
)

# Families without a tp_plan, or whose plan gathers where fused sections can be split.
_OWN: dict[str, tuple[Rule, ...]] = {
    "GPT2LMHeadModel": (
        _out("h.*.attn.c_attn", Unit.HEAD, Unit.HEAD, Unit.HEAD),
        _in("h.*.attn.c_proj", Unit.HEAD),
        _out("h.*.mlp.c_fc", Unit.WIDTH),
        _in("h.*.mlp.c_proj", Unit.WIDTH),
    ),
    "OPTForCausalLM": (
        *_SEPARATE_ATTENTION[:3],
        _in("layers.*.self_attn.out_proj", Unit.HEAD),
        _out("layers.*.fc1", Unit.WIDTH),
        _in("layers.*.fc2", Unit.WIDTH),
    ),
    "GPTNeoXForCausalLM": (
        _out("layers.*.attention.query_key_value", Unit.HEAD),  # query, key and value of one head lie together
        _in("layers.*.attention.dense", Unit.HEAD),
        _out("layers.*.mlp.dense_h_to_4h", Unit.WIDTH),
        _in("layers.*.mlp.dense_4h_to_h", Unit.WIDTH),
    ),
    "Phi3ForCausalLM": (
        _out("layers.*.self_attn.qkv_proj", Unit.HEAD, Unit.KV_HEAD, Unit.KV_HEAD),
        _in("layers.*.self_attn.o_proj", Unit.HEAD),
        _out("layers.*.mlp.gate_up_proj", Unit.WIDTH, Unit.WIDTH),
        _in("layers.*.mlp.down_proj", Unit.WIDTH),
    ),
    "MixtralForCausalLM": (
        *_SEPARATE_ATTENTION,
        _out("layers.*.mlp.experts.gate_up_proj", Unit.WIDTH, Unit.WIDTH),  # every rank has a part of every expert
        _in("layers.*.mlp.experts.down_proj", Unit.WIDTH),
    ),
}

_UNITS_BY_NAME = {"q_proj": Unit.HEAD, "k_proj": Unit.KV_HEAD, "v_proj": Unit.KV_HEAD, "o_proj": Unit.HEAD}
_SIDES_BY_STYLE = {"colwise": Side.OUT, "rowwise": Side.IN}


def rules_for(architecture: str, tp_plan: Mapping[str, str] | None) -> tuple[Rule, ...]:
    """The family's rules: ours, else `tp_plan` (transformers' own) read as rules.

    Raises UnsupportedModelError for a family that is not proven, or a plan with a style that is not known here.
    """
    if architecture not in PROVEN:
        raise UnsupportedModelError(f"{architecture} is not a family that specpipe can split among ranks; use one rank")
    if architecture in _OWN:
        return _OWN[architecture]
    rules = [_rule_of_plan(architecture, pattern, style) for pattern, style in (tp_plan or {}).items()]
    found = tuple(rule for rule in rules if rule is not None)
    if not found:
        raise UnsupportedModelError(f"{architecture} has no plan for several ranks in this version of transformers")
    return found


def check_ranks(architecture: str | None, config: Mapping[str, Any], size: int) -> None:
    """Refuse more ranks than fit, by what the model's config.json names; what it does not is checked at load.

    Raises ConfigError naming the numbers and the sizes that fit, or UnsupportedModelError.
    """
    if size == 1:
        return
    if architecture is not None and architecture not in PROVEN:
        rules_for(architecture, None)
    counts = _counts(config)
    misfit = next((f"{count} {unit.value}" for unit, count in counts.items() if not _fits(count, unit, size)), None)
    if misfit is not None:
        most = counts.get(Unit.HEAD, size)
        fitting = [n for n in range(1, most + 1) if all(_fits(count, unit, n) for unit, count in counts.items())]
        raise ConfigError(
            f"tensor_parallel_size {size} does not fit: the model has {misfit}; "
            f"sizes that fit: {', '.join(map(str, fitting))}"
        )


def ranges(rule: Rule, total: int, heads: Heads, rank: int, size: int) -> list[tuple[int, int]]:
    """The (start, end) of each section that belongs to `rank`, in a dimension of `total` places.

    Raises ConfigError naming the numbers where they do not divide.
    """
    counts = [_count(unit, total // len(rule.sections), heads) for unit in rule.sections]
    place = total // sum(counts)
    found, start = [], 0
    for unit, count in zip(rule.sections, counts, strict=True):
        first, end = section_range(count * place, count, unit, rank, size)
        found.append((start + first, start + end))
        start += count * place
    return found


def section_range(width: int, count: int, unit: Unit, rank: int, size: int) -> tuple[int, int]:
    """A rank's part of a section of `count` units, `width` places in all."""
    place = width // count
    if not _fits(count, unit, size):
        raise ConfigError(f"tensor_parallel_size {size} does not fit: the model has {count} {unit.value}")
    if count % size == 0:
        share = count // size
        return rank * share * place, (rank + 1) * share * place
    head = rank * count // size
    return head * place, (head + 1) * place


def _fits(count: int, unit: Unit, size: int) -> bool:
    """KV heads fewer than ranks stand on several; everything else is split into equal parts."""
    return count % size == 0 or (unit is Unit.KV_HEAD and size % count == 0)


def _counts(config: Mapping[str, Any]) -> dict[Unit, int]:
    """How many of each unit config.json says that a model has; what it lacks is left out."""
    heads = _first(config, "num_attention_heads", "n_head")
    hidden = _first(config, "n_embd")
    counts = {
        Unit.HEAD: heads,
        Unit.KV_HEAD: heads and (_first(config, "num_key_value_heads") or heads),
        Unit.WIDTH: _first(config, "intermediate_size", "ffn_dim", "n_inner") or (hidden and 4 * hidden),
    }
    return {unit: count for unit, count in counts.items() if count is not None}


def vocabulary_range(num_rows: int, rank: int, size: int) -> tuple[int, int]:
    """A rank's output rows: equal parts, the last one shorter (or empty) where they do not divide."""
    share = -(-num_rows // size)
    return min(num_rows, rank * share), min(num_rows, (rank + 1) * share)


def _rule_of_plan(architecture: str, pattern: str, style: str) -> Rule | None:
    """None: replicated. Embeddings and the head are not the plan's business: see shard.py."""
    if not pattern.startswith("layers.") or style.startswith("replicated"):
        return None
    if style not in _SIDES_BY_STYLE:
        raise UnsupportedModelError(f"{architecture}: transformers splits {pattern} by a style unknown here, {style!r}")
    return Rule(pattern, _SIDES_BY_STYLE[style], (_UNITS_BY_NAME.get(pattern.rpartition(".")[2], Unit.WIDTH),))


def _count(unit: Unit, width: int, heads: Heads) -> int:
    return {Unit.HEAD: heads.num_heads, Unit.KV_HEAD: heads.num_kv_heads, Unit.WIDTH: width}[unit]


def _first(config: Mapping[str, Any], *keys: str) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int) and config[key] > 0), None)
