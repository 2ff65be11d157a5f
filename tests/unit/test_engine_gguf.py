"""GGUF files load through transformers and equal the safetensors model they were made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import VOCAB, Driver, create_model
from engine_folders import tiny_vocabulary

from specpipe.config import EngineConfig
from specpipe.engine.folder import check_folder
from specpipe.engine.loader import load_model
from specpipe.errors import ConfigError

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, *rest = stem.split(".")
    return f"blk.{layer}.{NAMES['.'.join(rest)]}.{kind}"


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return create_model("qwen2", tie_word_embeddings=False)


@pytest.fixture
def file(model: torch.nn.Module, tmp_path: Path) -> Path:
    """A float32 GGUF of the tiny model; the last two entries of its vocabulary are padding."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(3)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(tiny_vocabulary()))
    writer.add_token_types([3, 3, 3] + [1] * (VOCAB - 5) + [5, 5])
    writer.add_token_merges(["a a"])
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(gguf_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_or_its_folder_is_described(file: Path) -> None:
    for path in (file, file.parent):
        found = check_folder(path)
        assert found.gguf == file.resolve()
        assert (found.max_positions, found.eos_token_ids) == (128, (2,))
        assert found.vocabulary.size == VOCAB - 2
    assert check_folder(file).name == "tiny"


def test_a_truncated_gguf_file_is_named(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ConfigError, match=r"tiny\.gguf: is truncated or not a GGUF file"):
        check_folder(file)


def test_two_gguf_files_need_a_choice(file: Path) -> None:
    (file.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"2 \.gguf files"):
        check_folder(file.parent)


def test_a_gguf_model_equals_the_one_it_was_made_from(
    file: Path, model: torch.nn.Module, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = load_model(EngineConfig(model=str(file), num_slots=300))
    assert capfd.readouterr() == ("", "")
    driver = Driver(runner)
    session = driver.open(20)
    session.tokens = [token % (VOCAB - 2) for token in session.tokens]
    for count in (12, 1, 7):
        driver.step(driver.rows(session, count))
    assert driver.worst_error(model) < 1e-5
