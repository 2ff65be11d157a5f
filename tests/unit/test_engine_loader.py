"""Loading: every weight of the folder reaches the model, padded output rows stay out, limits follow the room."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import Driver
from engine_folders import save_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specpipe.config import EngineConfig
from specpipe.engine import loader
from specpipe.engine.interface import SessionRows, StepBatch
from specpipe.engine.loader import default_num_slots, load_model
from specpipe.engine.memory import Memory
from specpipe.engine.runner import ModelRunner
from specpipe.errors import ConfigError, InvalidRequestError, UnsupportedModelError

TOKENS = [5, 17, 2, 40, 9, 33, 61, 8]


def load(folder: Path, **fields: object) -> ModelRunner:
    fields = {"num_slots": 300, **fields}
    return load_model(EngineConfig(model=str(folder), **fields))  # type: ignore[arg-type]


def prefill(runner: ModelRunner, tokens: list[int] = TOKENS) -> np.ndarray:
    rows = SessionRows(
        session=1,
        context_slots=list(range(1, len(tokens) + 1)),
        num_computed=0,
        tokens=tokens,
        num_committed_rows=len(tokens),
        wants_logits=[True] * len(tokens),
    )
    return runner.forward(StepBatch(sessions=[rows]))


def stock_logits(folder: Path, tokens: list[int] = TOKENS) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("family", ["gpt2", "opt", "qwen2", "gemma3"])
@pytest.mark.parametrize("shard_size", ["1GB", "12KB"])
@pytest.mark.parametrize("has_head", [True, False])
def test_tied_embeddings_load_with_and_without_a_head(
    tmp_path: Path, family: str, shard_size: str, has_head: bool
) -> None:
    folder = save_model(tmp_path / "m", family, tie_word_embeddings=True, max_shard_size=shard_size)
    if has_head and shard_size == "1GB":
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in weights if name.endswith(("wte.weight", "embed_tokens.weight")))
        save_file({**weights, "lm_head.weight": weights[name].clone()}, folder / "model.safetensors", {"format": "pt"})
    np.testing.assert_allclose(prefill(load(folder)), stock_logits(folder), atol=1e-5)


def test_an_untied_head_that_is_missing_is_refused_not_drawn_at_random(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "llama", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing keys: lm_head\.weight"):
        load(folder)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises((ConfigError, UnsupportedModelError), match=r"mismatched|cannot load"):
        load(folder)


@pytest.mark.parametrize("num_rows", [97, 100, 128])
def test_padded_output_rows_are_never_returned(tmp_path: Path, num_rows: int) -> None:
    folder = save_model(tmp_path / "m", "llama", vocab_size=97)
    padded = save_model(tmp_path / "p", "llama", vocab_size=97)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(num_rows)
    with torch.no_grad():
        model.lm_head.weight[97:].fill_(1000.0)
    model.save_pretrained(padded)
    runner = load(padded)
    assert runner.info.vocab_size == 97
    np.testing.assert_allclose(prefill(runner), stock_logits(folder), atol=1e-5)
    with pytest.raises(InvalidRequestError, match="token id"):
        prefill(runner, [97])


def test_a_tokenizer_smaller_than_the_output_bounds_the_vocabulary(tmp_path: Path) -> None:
    runner = load(save_model(tmp_path / "m", "gpt2", vocab_size=90))
    assert runner.info.vocab_size == 90
    assert prefill(runner).shape == (len(TOKENS), 90)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2", "phi3", "mixtral"])
def test_sixteen_bit_weights_compute_in_float32(tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path / "m", family, dtype=torch.bfloat16)
    runner = load(folder)
    expected = stock_logits(folder)
    assert runner.model.dtype == torch.float32
    np.testing.assert_allclose(prefill(runner), expected, atol=2e-5)
    driver = Driver(runner)
    session = driver.open(20)
    for count in (13, 1, 6):
        driver.step(driver.rows(session, count))
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert driver.worst_error(stock) < 2e-5


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_weight_beyond_float16_is_kept_in_float32(tmp_path: Path, family: str) -> None:
    folder = save_model(tmp_path / "m", family, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    layer = model.model.layers[0].mlp.down_proj if family == "llama" else model.transformer.h[0].mlp.c_proj
    with torch.no_grad():
        layer.weight[0, 0] = 1e5
    model.save_pretrained(folder)
    expected = stock_logits(folder)
    np.testing.assert_allclose(prefill(load(folder)), expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_without_packing_stays_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specpipe.engine.linear._has_fbgemm", lambda: False)
    folder = save_model(tmp_path / "m", "llama", dtype=torch.bfloat16)
    runner = load(folder, dtype="bfloat16")
    assert runner.model.dtype == torch.bfloat16
    expected = stock_logits(folder)
    assert np.abs(prefill(runner) - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("stored", "asked", "computes"), [("float16", "auto", "float32"), ("float32", "auto", "float32")]
)
def test_auto_dtype(tmp_path: Path, stored: str, asked: str, computes: str) -> None:
    folder = save_model(tmp_path / "m", "llama", dtype=getattr(torch, stored))
    runner = load(folder, dtype=asked)
    assert str(runner.model.dtype) == f"torch.{computes}"
    np.testing.assert_allclose(prefill(runner), stock_logits(folder), atol=2e-5)


def test_fingerprints_tell_dtypes_apart(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "llama")
    infos = [load(folder, dtype=dtype).info for dtype in ("float32", "float32", "bfloat16")]
    assert infos[0].fingerprint == infos[1].fingerprint != infos[2].fingerprint
    assert len({info.tokenizer_fingerprint for info in infos}) == 1


def test_progress_ends_at_one(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "llama")
    seen: list[float] = []
    load_model(EngineConfig(model=str(folder)), on_progress=lambda fraction, _: seen.append(fraction))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_the_context_is_the_least_of_model_flag_and_slots(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "llama")
    assert load(folder).info.max_context == 128
    assert load(folder, max_context=50).info.max_context == 50
    assert load(folder, num_slots=41).info.max_context == 40


def test_default_slots_are_bounded_by_sessions_and_memory() -> None:
    config = EngineConfig(model="x", max_sessions=4, max_batch_tokens=256)
    plenty = Memory(1 << 40)
    assert default_num_slots(config, 1000, 1, plenty) == 4 * 1000 + 1
    many = dataclasses.replace(config, max_sessions=64)
    assert default_num_slots(many, 1000, 1, plenty) == 16 * 1000 + 1
    assert default_num_slots(many, 100_000, 1, plenty) == 100_256 + 1
    assert default_num_slots(many, 1000, 1024, Memory(4 * 1024 * 500)) == 500
    with pytest.raises(ConfigError, match=r"0 MiB of free memory hold only 0 KV slots; set num_slots"):
        default_num_slots(many, 1000, 1024, Memory(1024))


def test_weights_that_leave_no_room_name_the_limit_of_their_container() -> None:
    config = EngineConfig(model="x")
    free = Memory(3 << 20, "/sys/fs/cgroup/memory.max")
    with pytest.raises(ConfigError) as refused:
        default_num_slots(config, 1000, 1 << 20, free)
    assert str(refused.value) == (
        "3 MiB of free memory (limited by /sys/fs/cgroup/memory.max) hold only 0 KV slots; "
        "raise that limit or set num_slots"
    )


def test_slots_are_bounded_by_the_limit_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "m", "llama")
    per_slot = load(folder).model.bytes_per_slot
    limits = {"total_memory": Memory(800 * per_slot, "memory.max"), "free_memory": Memory(400 * per_slot, "memory.max")}
    for name, memory in limits.items():
        monkeypatch.setattr(loader, name, lambda memory=memory: memory)
    assert load(folder, num_slots=None).num_slots == 100  # a quarter of what is free
    assert load(folder, num_slots=800).num_slots == 800
    with pytest.raises(ConfigError, match=r"num_slots 801 .* \(limited by memory\.max\); at most 800 slots"):
        load(folder, num_slots=801)


def test_more_slots_than_memory_holds_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "llama")
    with pytest.raises(ConfigError, match=r"num_slots 1000000000000 does not fit: .* at most"):
        load(folder, num_slots=10**12)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    folder = save_model(tmp_path / "m", "llama")
    with pytest.raises(ConfigError, match="no CUDA device"):
        load(folder, device="cuda")


def test_loading_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "m", "llama")
    capfd.readouterr()
    load(folder)
    assert capfd.readouterr() == ("", "")


def test_a_broken_model_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "m", "llama")

    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr(loader.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(UnsupportedModelError, match=r"cannot load it \(first line\)$"):
        load(folder)
