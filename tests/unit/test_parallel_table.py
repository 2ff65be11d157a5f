"""What belongs to which rank, and which numbers of ranks are refused."""

from __future__ import annotations

import pytest

from specpipe.engine.families import PROVEN
from specpipe.engine.parallel.table import (
    Heads,
    Rule,
    Side,
    Unit,
    check_ranks,
    ranges,
    rules_for,
    vocabulary_range,
)
from specpipe.errors import ConfigError, UnsupportedModelError

LLAMA = {"num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 48}
HEADS = Heads(num_heads=4, num_kv_heads=2)


def test_fused_sections_are_split_one_by_one() -> None:
    qkv = Rule("x", Side.OUT, (Unit.HEAD, Unit.KV_HEAD, Unit.KV_HEAD))  # 4 + 2 + 2 heads of 8
    assert ranges(qkv, 64, HEADS, 0, 2) == [(0, 16), (32, 40), (48, 56)]
    assert ranges(qkv, 64, HEADS, 1, 2) == [(16, 32), (40, 48), (56, 64)]
    gate_up = Rule("x", Side.OUT, (Unit.WIDTH, Unit.WIDTH))
    assert ranges(gate_up, 96, HEADS, 1, 4) == [(12, 24), (60, 72)]


def test_kv_heads_fewer_than_ranks_stand_on_several() -> None:
    values = Rule("x", Side.OUT, (Unit.KV_HEAD,))
    assert [ranges(values, 16, HEADS, rank, 4) for rank in range(4)] == [[(0, 8)], [(0, 8)], [(8, 16)], [(8, 16)]]


@pytest.mark.parametrize("num_rows", [1, 5, 8, 97])
@pytest.mark.parametrize("size", [2, 4])
def test_each_row_of_the_vocabulary_is_on_one_rank(num_rows: int, size: int) -> None:
    rows = [row for rank in range(size) for row in range(*vocabulary_range(num_rows, rank, size))]
    assert rows == list(range(num_rows))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_divides_is_taken(size: int) -> None:
    check_ranks("LlamaForCausalLM", LLAMA, size)


@pytest.mark.parametrize(
    ("config", "size", "numbers"),
    [
        (LLAMA, 5, "tensor_parallel_size 5 .* 12 attention heads; sizes that fit: 1, 2, 4, 6, 12$"),
        (LLAMA, 3, "tensor_parallel_size 3 .* 2 KV heads; sizes that fit: 1, 2, 4, 6, 12$"),
        ({**LLAMA, "intermediate_size": 50}, 4, "tensor_parallel_size 4 .* 50 MLP columns; sizes that fit: 1, 2$"),
        ({"n_head": 12, "n_embd": 768}, 8, "tensor_parallel_size 8 .* 12 attention heads; .*: 1, 2, 3, 4, 6, 12$"),
        ({"num_attention_heads": 4, "ffn_dim": 50}, 4, "50 MLP columns; sizes that fit: 1, 2$"),
        ({"num_attention_heads": 7, "ffn_dim": 50}, 2, "7 attention heads; sizes that fit: 1$"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(config: dict[str, int], size: int, numbers: str) -> None:
    with pytest.raises(ConfigError, match=numbers):
        check_ranks("LlamaForCausalLM", config, size)


def test_families_that_are_not_proven_keep_to_one_rank() -> None:
    check_ranks("StarCoderForCausalLM", {}, 1)
    with pytest.raises(UnsupportedModelError, match="StarCoderForCausalLM"):
        check_ranks("StarCoderForCausalLM", {}, 2)


def test_a_plan_with_an_unknown_style_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="diagonal"):
        rules_for("LlamaForCausalLM", {"layers.*.mlp.up_proj": "diagonal"})


@pytest.mark.parametrize("family", sorted(PROVEN))
def test_every_family_splits_attention_and_mlp_on_both_sides(family: str) -> None:
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}
    rules = rules_for(family, {**plan, "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce"})
    assert {rule.side for rule in rules} == {Side.OUT, Side.IN}
    assert all(Unit.WIDTH not in rule.sections for rule in rules if "attn" in rule.pattern)
