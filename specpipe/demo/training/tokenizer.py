"""Trains the tokenizer both models share, and writes it with the model configs and the list of held-out files.

Byte-level BPE. No token is added to a prompt when it is encoded; `<|endoftext|>` ends a document, `<|end|>` a chat
turn, and both end generation.
"""

import argparse
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from specpipe import demo
from specpipe.demo.training import corpus
from specpipe.demo.training.paths import start_logging

_log = logging.getLogger(__name__)

END_OF_TEXT, END_OF_TURN, PADDING = "<|endoftext|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [END_OF_TEXT, END_OF_TURN, PADDING, *(f"<|{role}|>" for role in ROLES)]

# A word with one leading character (so `.append`, `(self`, `_name`), up to three digits, punctuation with the line
# ends after it, white space up to the blank before a word.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def format_exchange(exchange: corpus.Exchange) -> str:
    """The text of a chat sample as `CHAT_TEMPLATE` renders it, up to the end of the assistant's turn."""
    return f"<|user|>\n{exchange.question}<|end|>\n<|assistant|>\n{exchange.answer}<|end|>"


def train(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` ids, special tokens first, learned from the training files only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)
    return tokenizer


def _training_texts() -> Iterator[str]:
    for path in corpus.training_files():
        yield corpus.read_source(path) or ""


def tokenizer_config(context_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "extra_special_tokens": [END_OF_TURN, *(f"<|{role}|>" for role in ROLES)],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": CHAT_TEMPLATE,
    }


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(context_length))


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    start_logging()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--context-length", type=int, default=2048)
    args = parser.parse_args()
    held_out = corpus.held_out_library_files()
    listing = demo.target_folder().parent.parent / "held_out_files.txt"
    listing.write_text("".join(f"{path}\n" for path in held_out), encoding="utf-8")
    tokenizer = train(args.vocab_size)
    for folder in (demo.target_folder(), demo.draft_folder()):
        write_tokenizer(tokenizer, folder, args.context_length)
    _log.info("vocabulary %d, held-out files %d", tokenizer.get_vocab_size(), len(held_out))


if __name__ == "__main__":
    main()
