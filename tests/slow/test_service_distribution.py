"""Answers of a whole service follow the target's exact distribution, over consecutive seeds, under both rules.

The target has 16 tokens, so every answer of five can be counted; the draft is a blurred copy. Case B1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import findings
import numpy as np
import numpy.typing as npt
import pytest
import torch
from chi_square import LEAST_P, p_value, target_probs
from running import RunningService, running_service
from slow_scale import scaled
from tally import ask_all
from tiny_models import make_alphabet_tokenizer, make_llama
from transformers import LlamaForCausalLM

from specpipe.client import Answer, GenerateRequest
from specpipe.types import Mode, Rule, SamplingParams

pytestmark = pytest.mark.slow

VOCAB_SIZE = 16
LENGTH = 5  # tokens of an answer: a block of K + 1 after the one that the prompt's step gives
K = 3
PROMPT = (3, 7, 2)
NUM_ANSWERS = scaled(2000, least=400)
SETTINGS = [{"temperature": 1.0}, {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.03}]


@dataclass(frozen=True, kw_only=True)
class Countable:
    target: Path
    draft: Path
    model: LlamaForCausalLM


@pytest.fixture(scope="module")
def countable(tmp_path_factory: pytest.TempPathFactory) -> Countable:
    """A target with layers enough that drafts come in time, and a draft whose guesses are mixed."""
    folder = tmp_path_factory.mktemp("countable")
    model = make_llama(num_layers=6, max_positions=64, seed=3, vocab_size=VOCAB_SIZE)
    draft = make_llama(num_layers=1, max_positions=64, seed=3, vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        model.lm_head.weight *= 0.15
        draft.load_state_dict({name: model.state_dict()[name] for name in draft.state_dict()})
        draft.lm_head.weight += 0.3 * draft.lm_head.weight.std() * torch.randn(draft.lm_head.weight.shape)
    for name, each in (("target", model), ("draft", draft)):
        each.save_pretrained(folder / name)
        make_alphabet_tokenizer(VOCAB_SIZE).save_pretrained(folder / name)
    return Countable(target=folder / "target", draft=folder / "draft", model=model)


@pytest.fixture(scope="module")
def counted_service(countable: Countable, log_folder: Path) -> Iterator[RunningService]:
    flags = ("--target", str(countable.target), "--draft", str(countable.draft))
    with running_service(log_folder / "counted.log", *flags) as running:
        yield running


class Exact:
    """Probabilities of all answers, position by position, from the stock forward over every possible prefix."""

    def __init__(self, model: LlamaForCausalLM, params: SamplingParams) -> None:
        self.marginals: list[npt.NDArray[np.float64]] = []  # [token]
        self.pairs: list[npt.NDArray[np.float64]] = []  # [token, next token]
        prefixes, shares = torch.tensor([PROMPT]), np.ones(1)
        for _ in range(LENGTH):
            joint = shares[:, None] * self._next_probs(model, prefixes, params)  # [prefixes, token]
            self.marginals.append(joint.sum(axis=0))
            if prefixes.shape[1] > len(PROMPT):
                self.pairs.append(joint.reshape(-1, VOCAB_SIZE, VOCAB_SIZE).sum(axis=0))
            tokens = torch.arange(VOCAB_SIZE).repeat(len(prefixes))
            prefixes = torch.cat([prefixes.repeat_interleave(VOCAB_SIZE, 0), tokens[:, None]], dim=1)
            shares = joint.ravel()

    @staticmethod
    def _next_probs(model: LlamaForCausalLM, prefixes: torch.Tensor, params: SamplingParams) -> npt.NDArray[np.float64]:
        with torch.no_grad():
            logits = torch.cat([model(part, logits_to_keep=1).logits[:, 0] for part in prefixes.split(4096)])
        return np.array([target_probs(row, params) for row in logits.numpy()])


def least_p(answers: list[Answer], exact: Exact) -> float:
    """Of every position and every pair of neighbours, times their number."""
    table = np.array([answer.token_ids for answer in answers])  # [answers, LENGTH]
    values = [p_value(np.bincount(table[:, i], minlength=VOCAB_SIZE), s) for i, s in enumerate(exact.marginals)]
    for i, share in enumerate(exact.pairs):
        pairs = table[:, i] * VOCAB_SIZE + table[:, i + 1]
        values.append(p_value(np.bincount(pairs, minlength=VOCAB_SIZE**2), share))
    return min(1.0, min(values) * len(values))


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("setting", SETTINGS, ids=["plain", "cut"])
async def test_answers_over_consecutive_seeds_follow_the_target(
    countable: Countable, counted_service: RunningService, setting: dict[str, float], rule: Rule, mode: Mode
) -> None:
    requests = [
        GenerateRequest(
            prompt=PROMPT,
            seed=seed,
            max_tokens=LENGTH,
            ignore_eos=True,
            mode=mode,
            rule=rule,
            num_speculative_tokens=K,
            **setting,  # type: ignore[arg-type]
        )
        for seed in range(NUM_ANSWERS)
    ]
    answers = await ask_all(counted_service.address, requests, in_flight=8)
    p = least_p(answers, Exact(countable.model, SamplingParams(**setting)))  # type: ignore[arg-type]
    stats = [answer.finished.speculation for answer in answers if answer.finished]
    verified, accepted = (sum(getattr(s, name) for s in stats) for name in ("verified_tokens", "accepted_tokens"))
    findings.record(f"{len(answers)} answers, p = {p:.3g}; {verified} nodes verified, {accepted} accepted")
    assert p > LEAST_P
    assert accepted > 0
    if mode is Mode.SYNC:
        assert accepted > NUM_ANSWERS / 4


async def test_the_drafts_own_answers_would_be_noticed(countable: Countable, log_folder: Path) -> None:
    """Deliberately wrong: what a service says that accepts every guess."""
    with running_service(log_folder / "draft_alone.log", "--target", str(countable.draft), "--draft", "none") as alone:
        requests = [
            GenerateRequest(prompt=PROMPT, seed=seed, max_tokens=LENGTH, ignore_eos=True)
            for seed in range(NUM_ANSWERS // 2)
        ]
        answers = await ask_all(alone.address, requests, in_flight=8)
    assert least_p(answers, Exact(countable.model, SamplingParams())) < LEAST_P
