"""GGUF files over two ranks: each keeps its part, and all rows equal those of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import Driver
from parallel_ranks import parallel_model
from test_parallel_families import drive

from specpipe.cli.models import check_ranks_fit
from specpipe.config import EngineConfig
from specpipe.engine.folder import check_folder
from specpipe.engine.loader import load_model
from specpipe.engine.parallel.shard import load_shard
from specpipe.errors import ConfigError, SpecpipeError

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from gguf_files import write_gguf

TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("family", "is_quantised"),
    [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", False), ("gpt2", False), ("gemma3", False)],
)
def test_two_ranks_equal_one(family: str, is_quantised: bool, tmp_path: Path) -> None:
    is_untied = {"tie_word_embeddings": False} if family == "qwen2" else {}
    write_gguf(tmp_path / "tiny.gguf", family, is_quantised=is_quantised, **is_untied)
    one = Driver(load_model(EngineConfig(model=str(tmp_path), num_slots=400)), seed=3)
    drive(one)
    with parallel_model(tmp_path, 2) as model:
        two = Driver(model, seed=3)  # type: ignore[arg-type]
        drive(two)
    assert [row.path for row in two.seen] == [row.path for row in one.seen]
    worst = max(abs(ours.logits - theirs.logits).max() for ours, theirs in zip(one.seen, two.seen, strict=True))
    assert worst < TOLERANCE


def test_a_rank_keeps_its_part_alone(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", "llama")
    part = load_shard(check_folder(tmp_path), "auto", 1, 2)
    own = {name: weight for name, weight in part.named_parameters() if "proj" in name}
    assert {tuple(own[f"model.layers.0.{name}.weight"].shape) for name in ("self_attn.q_proj", "mlp.down_proj")} == {
        (16, 32),
        (32, 24),
    }
    for name, weight in own.items():
        assert weight.untyped_storage().nbytes() == weight.nbytes, name  # no view of the whole
    down = model.get_submodule("model.layers.2.mlp.down_proj").weight
    assert torch.equal(own["model.layers.2.mlp.down_proj.weight"], down[:, 24:])


def test_ranks_that_do_not_fit_are_refused_before_loading(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama")
    check_ranks_fit(str(tmp_path), 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3 .* 4 attention heads"):
        check_ranks_fit(str(tmp_path), 3)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama", left_out="blk.1.ffn_up.weight")
    with pytest.raises(SpecpipeError, match=r"tiny\.gguf: .*missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_shard(check_folder(tmp_path), "auto", 0, 2)
