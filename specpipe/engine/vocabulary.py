"""Which token each id stands for, read from a folder's tokenizer files, and whether two models agree on it.

Owns: that map and its fingerprint. Must not know: torch, transformers, how text is encoded.

The rule for a pair (cases F1, F2): every id below the target's vocab_size must stand for the same token in both
tokenizers. Ids that the draft has beyond it are ignored (they are never proposed), padded output rows never count,
and EOS or other roles may differ: ends are the target's business alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.engine.weights import read_json
from specpipe.errors import ConfigError, ModelMismatchError

_NAMED_FILES = "tokenizer.json or vocab.json with merges.txt"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a tokenizer by id; ids need not be dense."""

    tokens: Mapping[int, str]

    @property
    def size(self) -> int:
        """Highest id of a real token, plus one."""
        return max(self.tokens) + 1

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for token_id in sorted(self.tokens):
            digest.update(
                token_id.to_bytes(8, "little") + self.tokens[token_id].encode("utf-8", "surrogatepass") + b"\0"
            )
        return digest.hexdigest()


def read_vocabulary(folder: Path) -> Vocabulary:
    """Raises ConfigError if the folder has no tokenizer that can be read without converting it."""
    if (folder / "tokenizer.json").is_file():
        return _from_tokenizer_json(folder / "tokenizer.json")
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_vocab_json(folder)
    if (folder / "tokenizer.model").is_file():
        raise ConfigError(
            f"{folder}: has a sentencepiece tokenizer.model but no tokenizer.json; load it once with "
            "transformers' AutoTokenizer and save_pretrained it there"
        )
    raise ConfigError(f"{folder}: no tokenizer ({_NAMED_FILES})")


def check_same_vocabulary(target: Vocabulary, draft: Vocabulary) -> None:
    """Raise ModelMismatchError, naming the first id that stands for different tokens, unless the two fit."""
    if target.fingerprint == draft.fingerprint:
        return
    for token_id in sorted(target.tokens.keys() | draft.tokens.keys()):
        if token_id >= target.size:
            return
        ours, theirs = target.tokens.get(token_id), draft.tokens.get(token_id)
        if ours != theirs:
            raise ModelMismatchError(
                f"the tokenizers of target and draft differ: id {token_id} is {_shown(ours)} for the target "
                f"and {_shown(theirs)} for the draft"
            )


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _from_tokenizer_json(path: Path) -> Vocabulary:
    content = read_json(path)
    try:
        tokens = _tokens_of_model(content["model"]["vocab"])
        tokens.update({int(token["id"]): str(token["content"]) for token in content.get("added_tokens") or ()})
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"{path}: has no vocabulary that specpipe can read") from error
    return _checked(tokens, path)


def _tokens_of_model(vocab: Any) -> dict[int, str]:
    """BPE, WordPiece and WordLevel keep {token: id}; Unigram keeps [[token, score], ...]."""
    if isinstance(vocab, dict):
        return {int(token_id): token for token, token_id in vocab.items()}
    return {token_id: str(entry[0]) for token_id, entry in enumerate(vocab)}


def _from_vocab_json(folder: Path) -> Vocabulary:
    tokens = {int(token_id): token for token, token_id in read_json(folder / "vocab.json").items()}
    if (folder / "added_tokens.json").is_file():
        tokens.update({int(token_id): token for token, token_id in read_json(folder / "added_tokens.json").items()})
    return _checked(tokens, folder / "vocab.json")


def _checked(tokens: dict[int, str], path: Path) -> Vocabulary:
    if not tokens or min(tokens) < 0:
        raise ConfigError(f"{path}: has no token or one with a negative id")
    return Vocabulary(tokens)
