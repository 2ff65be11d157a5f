"""Where a rank's weights come from: tensors of a model folder by the names that the model gives them.

Owns: reading parts of them from safetensors and from GGUF. Must not know: ranks, which part belongs to whom.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from specpipe.engine.folder import ModelFolder
from specpipe.engine.weights import read_weights
from specpipe.errors import ConfigError

_RENAMED = (  # what newer transformers call differently from older checkpoints
    (re.compile(r"^lm_head\.weight$"), "embed_out.weight"),
    (re.compile(r"\.mlp\.gate\.weight$"), ".block_sparse_moe.gate.weight"),
)
_PROCESSED_BY = {"num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv"}


class Checkpoint(Protocol):
    """The stored tensors of one model."""

    def has(self, name: str) -> bool:
        """Whether a parameter is stored under this name, or the one that it had in older checkpoints."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ConfigError if it is not stored."""
        ...

    def read(self, name: str, dim: int, sections: Sequence[tuple[int, int]]) -> Tensor:
        """Those (start, end) of dimension `dim`, side by side, in memory of their own.

        Raises ConfigError if it is not stored.
        """
        ...


def open_checkpoint(folder: ModelFolder, model: PreTrainedModel, stack: ExitStack) -> Checkpoint:
    """`model` is the whole model without weights. Open files are closed with `stack`."""
    if folder.gguf is not None:
        return GGUFCheckpoint(folder.gguf, model)
    return SafetensorsCheckpoint(folder.path, model.base_model_prefix, stack)


class SafetensorsCheckpoint:
    """Nothing but the sections asked for is read."""

    def __init__(self, folder: Path, prefix: str, stack: ExitStack) -> None:
        self._folder = folder
        self._prefix = prefix
        self._files = {entry.name: entry.file for entry in read_weights(folder)}
        self._open = {file: stack.enter_context(safe_open(file, framework="pt")) for file in set(self._files.values())}

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, dim: int, sections: Sequence[tuple[int, int]]) -> Tensor:
        source = self._slice(name)
        index = [slice(None)] * len(source.get_shape())
        parts = []
        for start, end in sections:
            index[dim] = slice(start, end)
            parts.append(source[tuple(index)])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)

    def _find(self, name: str) -> str | None:
        """The stored name of a parameter, if it is stored."""
        names = [name, name.removeprefix(f"{self._prefix}."), f"{self._prefix}.{name}"]
        names += [pattern.sub(old, name) for pattern, old in _RENAMED]
        return next((found for found in names if found in self._files), None)

    def _slice(self, name: str) -> Any:
        """A safetensors slice: nothing is read until it is indexed."""
        stored = self._find(name)
        if stored is None:
            raise _missing(self._folder, name)
        return self._open[self._files[stored]].get_slice(stored)


class GGUFCheckpoint:
    """Each tensor is dequantised as a whole, to float32, when it is asked for, and forgotten when the next one is.

    So a rank needs room for its part and for the largest tensor, twice where its layout is converted. Names and layouts
    are converted by transformers, as on one rank.
    """

    def __init__(self, file: Path, model: PreTrainedModel) -> None:
        from gguf import GGUFReader

        self._file = file
        reader = GGUFReader(file)
        architecture = str(_field(reader, "general.architecture"))
        # What processors of proven families look up. transformers' own way to get it parses all tokens first: seconds.
        self._config = {key: _field(reader, f"{architecture}.{field}") for key, field in _PROCESSED_BY.items()}
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=self._config)
        self._names = get_gguf_hf_weights_map(model, self._processor)
        self._tensors = {self._names[one.name]: one for one in reader.tensors if one.name in self._names}
        self._last: tuple[str, Tensor] | None = None

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._whole(name).shape)

    def read(self, name: str, dim: int, sections: Sequence[tuple[int, int]]) -> Tensor:
        whole = self._whole(name)
        return torch.cat([whole.narrow(dim, start, end - start) for start, end in sections], dim=dim)

    def _whole(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = (name, self._dequantised(name))
        return self._last[1]

    def _dequantised(self, name: str) -> Tensor:
        from gguf import dequantize

        if name not in self._tensors:
            raise _missing(self._file, name)
        stored = self._tensors[name]
        parsed: dict[str, Any] = {"config": self._config, "tensors": {}}
        found = self._processor.process(
            weights=dequantize(stored.data, stored.tensor_type),
            name=stored.name,
            tensor_key_mapping=self._names,
            parsed_parameters=parsed,
        )
        if found.name is None:  # the processor has put it where transformers collects tensors
            whole: Tensor = parsed["tensors"][name]
            return whole
        return torch.from_numpy(np.require(found.weights, requirements="W"))  # float32 is a view of the file


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _missing(where: Path, name: str) -> ConfigError:
    return ConfigError(f"{where}: the weights do not fill the model (missing: {name})")
