"""What can be known of a model before loading it, so that a wrong one is refused at once.

Owns: finding the folder of a path or hub name, and checking config, weights and tokenizer there.
Must not know: torch, transformers. Everything here takes well under a second on a local folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.engine import gguf_file, hub
from specpipe.engine.families import reason_to_refuse
from specpipe.engine.vocabulary import Vocabulary, read_vocabulary
from specpipe.engine.weights import fingerprint_weights, read_json, read_weights
from specpipe.errors import ConfigError, UnsupportedModelError

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_VOLATILE_KEYS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model that passed every check that needs no weights in memory."""

    name: str  # as clients may call it: the folder's or hub name
    path: Path
    gguf: Path | None  # the .gguf file, if the model is one
    config: Mapping[str, Any]
    vocabulary: Vocabulary
    eos_token_ids: tuple[int, ...]
    max_positions: int | None  # None: the config sets no limit
    weights_fingerprint: str

    def fingerprint(self, dtype: str) -> str:
        """Equal for workers that are interchangeable: same config, same weights, same dtype."""
        config = {key: value for key, value in self.config.items() if key not in _VOLATILE_KEYS}
        text = json.dumps([config, dtype, self.weights_fingerprint], sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def check_folder(model: str | Path, *, can_download: bool = True) -> ModelFolder:
    """Find and check a model.

    `model` is a folder with config.json, safetensors and a tokenizer; a .gguf file, or a folder with just one; or the
    name of a model on the hub (its cached copy is used; else it is downloaded, unless `can_download` is False).
    Raises ConfigError naming the file that is wrong, UnsupportedModelError if specpipe cannot serve the architecture.
    """
    path = _locate(str(model), can_download)
    gguf = _find_gguf(path)
    name = _name_of(str(model), path)
    return _check_gguf(name, gguf) if gguf else _check_safetensors(name, path)


def _check_safetensors(name: str, path: Path) -> ModelFolder:
    config = read_json(path / "config.json")
    _refuse_unsupported(path, config)
    vocabulary = read_vocabulary(path)
    return ModelFolder(
        name=name,
        path=path,
        gguf=None,
        config=config,
        vocabulary=vocabulary,
        eos_token_ids=_read_eos(path, config, vocabulary.size),
        max_positions=_first_int(_text_config(config), _POSITION_KEYS),
        weights_fingerprint=fingerprint_weights(read_weights(path)),
    )


def _check_gguf(name: str, path: Path) -> ModelFolder:
    content = gguf_file.read_gguf(path)
    return ModelFolder(
        name=name,
        path=path.parent,
        gguf=path,
        config={"model_type": content.architecture, **content.sizes},
        vocabulary=content.vocabulary,
        eos_token_ids=content.eos_token_ids,
        max_positions=content.max_positions,
        weights_fingerprint=content.fingerprint,
    )


def _locate(model: str, can_download: bool) -> Path:
    expanded = os.path.expanduser(model)
    if os.path.exists(expanded):
        return Path(expanded).resolve()
    if model.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(model):
        raise ConfigError(f"{model}: no such model folder")
    return hub.find(model, can_download=can_download)


def _name_of(model: str, path: Path) -> str:
    if path.is_file():
        return path.stem
    return path.name if os.path.exists(os.path.expanduser(model)) else model


def _find_gguf(path: Path) -> Path | None:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path}: is neither a model folder nor a .gguf file")
        return path
    if (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ConfigError(f"{path}: holds {len(files)} .gguf files; name one of them")
    if not files:
        raise ConfigError(f"{path}: is not a model folder (it has no config.json and no .gguf file)")
    return files[0]


def _refuse_unsupported(path: Path, config: Mapping[str, Any]) -> None:
    reason = reason_to_refuse(config)
    if reason is not None:
        raise UnsupportedModelError(f"{path}: {reason}")


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def _first_int(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((int(config[key]) for key in keys if isinstance(config.get(key), int) and config[key] > 0), None)


def _read_eos(path: Path, config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Of generation_config.json only the EOS ids are used."""
    found: set[int] = set()
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    for source in (_text_config(config), generation):
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))
