"""The two architectures, and how a trained model becomes a folder that `from_pretrained` reads."""

import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from specpipe import demo
from specpipe.demo.training.paths import work_path
from specpipe.demo.training.tokenizer import END_OF_TEXT, END_OF_TURN, PADDING
from specpipe.demo.training.tokens import load_tokenizer

CONTEXT_LENGTH = 2048
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

TARGET_LAYERS = 12
DRAFT_LAYERS = 2


def create_config(num_layers: int) -> LlamaConfig:
    """A Llama of this pair's width. Heads, KV heads, MLP width and vocabulary divide by 4, for tensor parallelism."""
    tokenizer = load_tokenizer()
    end_ids = [tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END_OF_TURN)]
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_ids,
        pad_token_id=tokenizer.token_to_id(PADDING),
        dtype="float32",
    )


def create_model(num_layers: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(create_config(num_layers))


def load_checkpoint(name: str, num_layers: int) -> LlamaForCausalLM:
    """The model of the checkpoint `name` in the work folder, for inference."""
    model = create_model(num_layers, seed=0)
    model.load_state_dict(torch.load(work_path(f"{name}.pt"), weights_only=True)["model"])
    return model.eval()


def save_folder(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config, float32 weights and tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    model.save_pretrained(folder)
    for name in _TOKENIZER_FILES:
        source = demo.target_folder() / name
        if source.parent != folder:
            shutil.copyfile(source, folder / name)
