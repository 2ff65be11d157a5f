"""Model folders for tests: tiny random models saved with a tokenizer of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from engine_cases import VOCAB, create_model
from transformers.utils import logging


def tiny_vocabulary(size: int = VOCAB) -> dict[str, int]:
    """{token: id} of a byte-level-like vocabulary with three special tokens."""
    names = ["<pad>", "<s>", "</s>", *(chr(ord("a") + i % 26) * (1 + i // 26) for i in range(size - 3))]
    return {name: token_id for token_id, name in enumerate(names)}


def write_tokenizer(folder: Path, model: dict[str, Any], added: list[tuple[int, str]]) -> None:
    tokens = [{"id": token_id, "content": token, "special": True} for token_id, token in added]
    content = {"version": "1.0", "added_tokens": tokens, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def save_model(
    folder: Path,
    family: str,
    *,
    vocab_size: int = VOCAB,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Save a random model of `family` whose tokenizer has `vocab_size` tokens; return its folder."""
    logging.disable_progress_bar()
    model = create_model(family, seed=seed, **overrides).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    vocab = tiny_vocabulary(vocab_size)
    special = [(token_id, token) for token, token_id in vocab.items() if token.startswith("<")]
    write_tokenizer(folder, {"type": "BPE", "vocab": vocab, "merges": []}, special)
    return folder
