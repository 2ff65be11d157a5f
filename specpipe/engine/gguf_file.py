"""What a GGUF file says about its model: architecture, vocabulary, EOS, context.

Owns: reading that metadata through the `gguf` package. Must not know: torch, transformers (which loads the weights).
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.engine.vocabulary import Vocabulary
from specpipe.errors import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFReader

_UNUSED_TOKEN = 5  # token type of padding entries
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
_SIZE_KEYS = {  # as config.json calls them
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
}
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFContent:
    architecture: str
    vocabulary: Vocabulary
    eos_token_ids: tuple[int, ...]
    max_positions: int | None
    sizes: dict[str, int]  # as config.json calls them
    fingerprint: str


def read_gguf(path: Path) -> GGUFContent:
    """Raises ConfigError if the file is cut, is not GGUF, or a package that GGUF needs is not installed."""
    for package in ("gguf", "accelerate"):  # transformers loads GGUF with both
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{path}: GGUF files need the package {package}: in specpipe's checkout, pip install '.[gguf]'"
            )
    reader = _open(path)
    architecture = str(_field(reader, "general.architecture") or "")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    if not architecture or not tokens:
        raise ConfigError(f"{path}: names no architecture or holds no tokenizer")
    kinds = _field(reader, "tokenizer.ggml.token_type") or [1] * len(tokens)
    vocabulary = Vocabulary({i: token for i, token in enumerate(tokens) if kinds[i] != _UNUSED_TOKEN})
    ends = {int(value) for value in (_field(reader, key) for key in _EOS_KEYS) if value is not None}
    sizes = {key: _field(reader, f"{architecture}.{field}") for key, field in _SIZE_KEYS.items()}
    return GGUFContent(
        architecture=architecture,
        vocabulary=vocabulary,
        eos_token_ids=tuple(sorted(end for end in ends if end < vocabulary.size)),
        max_positions=_field(reader, f"{architecture}.context_length"),
        sizes={key: size for key, size in sizes.items() if isinstance(size, int)},
        fingerprint=_fingerprint(path),
    )


def _open(path: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ConfigError(f"{path}: is truncated or not a GGUF file") from error


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _fingerprint(path: Path) -> str:
    """A hash of the size and of samples spread over the file (its metadata is at the start)."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        for sample in range(_NUM_SAMPLES):
            file.seek(sample * max(0, size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
