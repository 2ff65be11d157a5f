"""The demo pair: the folders load, the tokenizer is one, the held-out list is what the rule says."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from specpipe import demo
from specpipe.demo.training import corpus
from specpipe.demo.training.evaluate import simulate_sync

FOLDERS = [demo.target_folder(), demo.draft_folder()]
TEXTS = [
    "def main():\n    return 0\n",
    "class Füße(dict):\n\tpass  # ünï → ©\r\n",
    "<|user|>\nhi<|end|>\n<|assistant|>\n",
    "   \n\n  1234567 x=y",
]
MAX_PAIR_BYTES = 20_000_000


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_both_ways_of_loading_the_tokenizer_give_the_same_ids(folder: Path) -> None:
    automatic = AutoTokenizer.from_pretrained(folder)
    plain = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        ids = automatic(text).input_ids
        assert ids == plain(text).input_ids
        assert automatic.decode(ids, skip_special_tokens=False) == text


def test_both_models_have_the_same_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert len({(folder / name).read_bytes() for folder in FOLDERS}) == 1


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_encoding_adds_no_token_and_every_end_id_is_a_token(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    assert tokenizer("").input_ids == []
    assert tokenizer.convert_ids_to_tokens(config.eos_token_id) == ["<|endoftext|>", "<|end|>"]
    assert tokenizer.eos_token_id in config.eos_token_id
    assert len(tokenizer) == config.vocab_size


def test_the_chat_template_renders_roles_and_opens_the_answer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo.target_folder())
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>\nBe short.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_sizes_divide_by_four_for_tensor_parallelism(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    sizes = (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size, config.vocab_size)
    assert [size % 4 for size in sizes] == [0, 0, 0, 0]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_weights_are_stored_in_the_precision_the_config_names(folder: Path) -> None:
    assert AutoConfig.from_pretrained(folder).to_dict()["dtype"] == "float32"
    with safe_open(folder / "model.safetensors", framework="numpy") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F32"}  # noqa: SIM118


def test_the_pair_fits_in_the_package() -> None:
    files = [path for folder in FOLDERS for path in folder.iterdir()]
    assert sum(path.stat().st_size for path in files) <= MAX_PAIR_BYTES


def test_the_held_out_list_follows_the_rule_and_shares_nothing_with_training() -> None:
    listed = demo.held_out_files()
    assert listed == sorted(listed)
    assert len(listed) > 20
    assert all(corpus.is_held_out(path) for path in listed)
    assert not any(corpus.is_held_out(path) for path in corpus.training_files())


def test_importing_the_paths_imports_no_torch() -> None:
    script = (
        "import sys; from specpipe import demo; demo.target_folder(); demo.held_out_files(); "
        "sys.exit(int('torch' in sys.modules or 'transformers' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("hits", "num_rounds", "num_walked", "num_accepted"),
    [
        ([True] * 5, 1, 4, 4),
        ([False] * 3, 3, 3, 0),
        ([True, True, False, True, True], 2, 5, 4),
        ([], 0, 0, 0),
    ],
)
def test_sync_is_simulated_round_by_round(
    hits: list[bool], num_rounds: int, num_walked: int, num_accepted: int
) -> None:
    result = simulate_sync([hits], 4)
    assert (result.num_rounds, result.num_walked, result.num_accepted) == (num_rounds, num_walked, num_accepted)
    assert result.num_tokens == len(hits)
