"""What transformers `generate` says on the target alone, kept on disk: a run that is stopped goes on where it was.

One prompt at a time, with transformers' own cache: left padding in a batch would change the last bits of logits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from oracle import Oracle


class References:
    """Greedy answers of one model, without an end token, by prompt.

    They lie in ~/.cache/specpipe/references (SPECPIPE_REFERENCES names another folder), in a file of its own for each
    model's files and each version of torch and transformers.
    """

    def __init__(self, oracle: Oracle, folder: Path) -> None:
        self._oracle = oracle
        default = Path.home() / ".cache" / "specpipe" / "references"
        self._path = Path(os.environ.get("SPECPIPE_REFERENCES", default)) / f"{fingerprint(folder)}.jsonl"
        self._known: dict[str, list[int]] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                entry = json.loads(line)
                self._known[entry["prompt"]] = entry["tokens"]

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The first `max_tokens` tokens that the target says after `prompt`."""
        key = hashlib.blake2b(json.dumps(list(prompt)).encode(), digest_size=16).hexdigest()
        known = self._known.get(key, [])
        if len(known) < max_tokens:
            known = self._known[key] = self._oracle.greedy(prompt, max_tokens)
            assert len(known) == max_tokens
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"prompt": key, "tokens": known}) + "\n")
        return known[:max_tokens]


def fingerprint(folder: Path) -> str:
    """Of everything that an answer depends on."""
    digest = hashlib.blake2b(f"{torch.__version__} {transformers.__version__}".encode(), digest_size=16)
    for name in ("config.json", "model.safetensors"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()
