"""What the target alone would have said, written a second time: the stock forward, transformers' own warpers, and the
noise of docs/decisions/0002 in plain Python. It shares no code with specpipe.

Two runs may part where rounding decides. `Oracle.check` therefore applies the margin rule: at a position where the
answer differs from the oracle's choice, the gap between the two must be below MARGIN (in fp32); such ties are counted.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

MARGIN = 1e-3
MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True)
class Sampling:
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0


class Oracle:
    """The target model as transformers runs it, in fp32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.model.generation_config = GenerationConfig()  # `generate` takes what ours leaves open from the model's
        self.vocab_size = len(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text).input_ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def greedy(self, prompt: Sequence[int], max_tokens: int, *, eos: Sequence[int] = ()) -> list[int]:
        """transformers `generate`, without assistant; the config is made here and never the folder's.

        Without `eos` the end of a text does not end the answer.
        """
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=list(eos) or None, pad_token_id=0
        )
        ids = torch.tensor([list(prompt)])
        with torch.no_grad():
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        answer: list[int] = out[0, len(prompt) :].tolist()
        return answer

    def check(self, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling) -> int:
        """Every token of `answer` is the oracle's choice after the ones before it. Returns the number of ties."""
        sequence = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logits = self.model(sequence).logits[0, :, : self.vocab_size].float()
        num_ties = 0
        for index, token in enumerate(answer):
            position = len(prompt) + index
            keys = choice_keys(sequence[:, :position], logits[position - 1], position, sampling)
            choice = int(np.argmax(keys))
            if choice == token:
                continue
            gap = float(keys[choice] - keys[token])
            assert gap < MARGIN, f"token {index} is {token}, the oracle says {choice}, by a margin of {gap}"
            num_ties += 1
        return num_ties

    def gap(self, prompt: Sequence[int], one: Sequence[int], other: Sequence[int]) -> float:
        """Between the logits of the two tokens at which two greedy answers of one length part."""
        index = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *one[:index]]])).logits[0, -1].float()
        return abs(float(logits[one[index]] - logits[other[index]]))


def choice_keys(prefix: torch.Tensor, logits: torch.Tensor, position: int, sampling: Sampling) -> np.ndarray:
    """What is maximised: logits + temperature x noise; -inf where not allowed."""
    keys = logits.numpy().astype(np.float32)
    if sampling.temperature == 0:
        return keys
    allowed = torch.isfinite(warpers(sampling)(prefix, logits[None].clone())[0]).numpy()
    noise = np.array([gumbel(sampling.seed, position, token) for token in range(len(keys))], dtype=np.float32)
    return np.where(allowed, keys + np.float32(sampling.temperature) * noise, -np.inf)


def warpers(sampling: Sampling) -> LogitsProcessorList:
    steps = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps


def gumbel(seed: int, position: int, token: int) -> float:
    """Choice 0, purpose 0. One token at a time, with Python's own integers and floats."""
    key = int.from_bytes(hashlib.blake2b(struct.pack("<4Q", seed, 0, position, 0)).digest()[:8], "little")
    bits = (key + token * 0x9E3779B97F4A7C15) & MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    bits ^= bits >> 31
    u = min(((bits >> 11) + 0.5) / 2**53, 1 - 2**-53)
    return -math.log(-math.log1p(-u))
