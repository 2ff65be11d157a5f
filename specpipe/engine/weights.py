"""The weight files of a model folder: complete or not, and which weights they are, told from their headers.

Owns: safetensors headers and index files, read without loading a tensor. Must not know: torch, transformers, models.
Format: https://github.com/huggingface/safetensors#format (8 bytes little-endian header length, JSON header, data).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SAMPLE_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor as a header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int  # absolute, in bytes
    end: int


def read_weights(folder: Path) -> list[TensorEntry]:
    """Every tensor of the folder's safetensors files, sorted by name.

    Raises ConfigError naming the file if one is missing, truncated or not what the index says.
    """
    if (folder / SINGLE).is_file():
        return sorted(_read_header(folder / SINGLE).values(), key=lambda entry: entry.name)
    if (folder / INDEX).is_file():
        return _read_shards(folder)
    pickled = next((path.name for path in sorted(folder.glob("*.bin")) if "model" in path.name), None)
    if pickled is not None:
        raise ConfigError(f"{folder}: {pickled} holds pickled weights, which are not loaded; save them as safetensors")
    raise ConfigError(f"{folder}: no weights ({SINGLE}, {INDEX} or a .gguf file)")


def fingerprint_weights(entries: Iterable[TensorEntry]) -> str:
    """A hash of names, shapes, dtypes and a sample of each tensor's bytes: the same however the files are split."""
    digest = hashlib.blake2b(digest_size=16)
    for entry in entries:
        digest.update(f"{entry.name} {entry.dtype} {entry.shape}\n".encode())
        with entry.file.open("rb") as file:
            file.seek(entry.start + max(0, (entry.end - entry.start - _SAMPLE_BYTES) // 2))
            digest.update(file.read(min(_SAMPLE_BYTES, entry.end - entry.start)))
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError, naming the file, if it cannot be read as a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: is not a JSON object")
    return value


def _read_shards(folder: Path) -> list[TensorEntry]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{folder / INDEX}: has no weight_map")
    headers: dict[str, Mapping[str, TensorEntry]] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ConfigError(f"{folder / INDEX}: names a file outside the folder ({shard!r})")
        headers[shard] = _read_header(folder / shard)
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise ConfigError(f"{folder / shard}: lacks tensor {name}, which the index places there")
    return sorted((headers[shard][name] for name, shard in weight_map.items()), key=lambda entry: entry.name)


def _read_header(path: Path) -> dict[str, TensorEntry]:
    if not path.is_file():
        raise ConfigError(f"{path}: is missing")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ConfigError(f"{path}: is truncated or not a safetensors file ({size} bytes)")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        entries = {
            name: _entry(path, name, fields, 8 + length) for name, fields in header.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: has no valid safetensors header") from error
    expected = max((entry.end for entry in entries.values()), default=8 + length)
    if size != expected:
        state = "truncated" if size < expected else "longer than its header says"
        raise ConfigError(f"{path}: is {state} ({size} bytes, {expected} expected)")
    return entries


def _entry(path: Path, name: str, fields: Mapping[str, Any], data_start: int) -> TensorEntry:
    start, end = fields["data_offsets"]
    if not 0 <= start <= end:
        raise ValueError(name)
    shape = tuple(int(size) for size in fields["shape"])
    return TensorEntry(
        name=name, dtype=str(fields["dtype"]), shape=shape, file=path, start=data_start + start, end=data_start + end
    )
