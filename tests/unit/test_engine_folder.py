"""A model folder is refused before loading, naming the file that is wrong; pairs are compared id by id."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_folders import save_model, tiny_vocabulary, write_tokenizer

from specpipe.engine.folder import check_folder
from specpipe.engine.vocabulary import Vocabulary, check_same_vocabulary, read_vocabulary
from specpipe.engine.weights import INDEX, SINGLE
from specpipe.errors import ConfigError, ModelMismatchError, UnsupportedModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "tiny", "llama")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_model(tmp_path / "tiny", "llama", max_shard_size="12KB")


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_a_good_folder_is_described(folder: Path) -> None:
    found = check_folder(folder)
    assert (found.name, found.max_positions, found.eos_token_ids) == ("tiny", 128, (2,))
    assert found.vocabulary.size == len(tiny_vocabulary())


def test_checking_imports_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from specpipe.engine.folder import check_folder; check_folder(sys.argv[1]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~none/x/y", "a b", "a/b/c"])
def test_what_is_no_folder_and_no_hub_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="no such model folder"):
        check_folder(name)


def test_an_unknown_hub_name_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no model of that name in the hub cache"):
        check_folder("nobody/no-such-model-xyz", can_download=False)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SINGLE])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        check_folder(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_config_that_does_not_parse_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: is not"):
        check_folder(folder)


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file_is_named(folder: Path, size: int) -> None:
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:size])
    with pytest.raises(ConfigError, match=r"model\.safetensors: is truncated"):
        check_folder(folder)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard.name}: is missing"):
        check_folder(sharded)


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=f"{shard.name}: is truncated"):
        check_folder(sharded)


def test_an_index_that_places_a_tensor_wrongly_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    names = sorted(index["weight_map"])
    index["weight_map"][names[0]] = index["weight_map"][names[-1]]
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="lacks tensor"):
        check_folder(sharded)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin holds pickled weights"):
        check_folder(folder)


def test_the_fingerprint_is_of_the_weights_not_of_their_files(folder: Path, tmp_path: Path) -> None:
    other_files = save_model(tmp_path / "sharded", "llama", max_shard_size="12KB")
    other_weights = save_model(tmp_path / "other", "llama", seed=1)
    assert check_folder(folder).fingerprint("float32") == check_folder(other_files).fingerprint("float32")
    assert check_folder(folder).fingerprint("float32") != check_folder(other_weights).fingerprint("float32")
    assert check_folder(folder).fingerprint("float32") != check_folder(folder).fingerprint("bfloat16")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "recurrent state"),
        ({"architectures": ["RecurrentGemmaForCausalLM"], "model_type": "recurrent_gemma"}, "recurrent state"),
        ({"layer_types": ["linear_attention", "full_attention", "full_attention"]}, "recurrent state"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder-decoder"),
        ({"architectures": ["BertModel"]}, "not a text generation"),
        ({"attn_logit_softcapping": 50.0}, "caps attention scores"),
        ({"architectures": [], "model_type": ""}, "names no architecture"),
    ],
)
def test_a_family_that_cannot_work_is_refused_with_the_reason(
    folder: Path, fields: dict[str, Any], reason: str
) -> None:
    change_config(folder, **fields)
    with pytest.raises(UnsupportedModelError, match=reason):
        check_folder(folder)


def test_eos_ids_come_from_both_files_and_only_real_ones_count(folder: Path) -> None:
    change_config(folder, eos_token_id=[2, 5, 10_000])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2], "temperature": 0.1}))
    assert check_folder(folder).eos_token_ids == (2, 5, 7)


def test_vocab_and_merges_files_do_as_well(folder: Path) -> None:
    expected = check_folder(folder).vocabulary
    vocab = tiny_vocabulary()
    special = {token: token_id for token, token_id in vocab.items() if token.startswith("<")}
    (folder / "vocab.json").write_text(json.dumps({token: i for token, i in vocab.items() if token not in special}))
    (folder / "added_tokens.json").write_text(json.dumps(special))
    (folder / "merges.txt").write_text("")
    (folder / "tokenizer.json").unlink()
    assert read_vocabulary(folder).fingerprint == expected.fingerprint


def test_a_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.0]]}, added=[(2, "<end>")])
    assert dict(read_vocabulary(tmp_path).tokens) == {0: "<unk>", 1: "a", 2: "<end>"}


TARGET = {0: "<s>", 1: "</s>", 2: "a", 3: "b"}


@pytest.mark.parametrize(
    ("draft", "first_difference"),
    [
        (TARGET, None),
        ({**TARGET, 4: "<extra>"}, None),
        ({**TARGET, 2: "b", 3: "a"}, "id 2 is 'a' for the target and 'b' for the draft"),
        ({0: "<s>", 1: "</s>", 2: "a"}, "id 3 is 'b' for the target and no token for the draft"),
        ({**TARGET, 1: "<eos>"}, "id 1 is '</s>' for the target and '<eos>' for the draft"),
    ],
)
def test_a_pair_must_agree_on_the_targets_ids(draft: dict[int, str], first_difference: str | None) -> None:
    if first_difference is None:
        check_same_vocabulary(Vocabulary(TARGET), Vocabulary(draft))
        return
    with pytest.raises(ModelMismatchError, match=first_difference):
        check_same_vocabulary(Vocabulary(TARGET), Vocabulary(draft))
