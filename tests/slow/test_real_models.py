"""Real models, where they are (CONTRIBUTING.md): one answer in every mode, and the one that transformers gives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import findings
import pytest
import torch
from oracle import Oracle
from running import RunningService, running_service
from slow_scale import scaled
from tally import Tally, ask_all
from transformers import AutoModelForCausalLM, AutoTokenizer

from specpipe.client import Answer, GenerateRequest
from specpipe.types import Mode

pytestmark = [pytest.mark.slow, pytest.mark.models]

MODELS = Path(os.environ.get("SPECPIPE_MODELS", Path.home() / ".cache" / "specpipe" / "models"))
TARGET, DRAFT, SMALL = MODELS / "qwen-target", MODELS / "qwen-draft", MODELS / "smollm2"
MAX_TOKENS = scaled(32, least=8)
PROMPTS = ("def quicksort(values):\n", "The three laws of thermodynamics say that")
# A bf16 number has 8 bits: logits of 16 to 32 are multiples of 0.125. Two sums of the same terms may part by a few.
BF16_MARGIN = 0.5


@pytest.fixture(scope="module")
def real_pair(log_folder: Path) -> Iterator[RunningService]:
    if not TARGET.is_dir() or not DRAFT.is_dir():
        pytest.skip(f"no model pair in {MODELS}")
    flags = ("--target", str(TARGET), "--draft", str(DRAFT), "--dtype", "bfloat16", "--max-context", "512")
    with running_service(log_folder / "real_pair.log", *flags) as running:
        yield running


async def test_modes_agree_on_the_real_pair_in_bf16(real_pair: RunningService) -> None:
    answers: dict[Mode, list[Answer]] = {}
    for mode in Mode:
        requests = [
            GenerateRequest(prompt=prompt, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, mode=mode)
            for prompt in PROMPTS
        ]
        answers[mode] = await ask_all(real_pair.address, requests, in_flight=1)
    partings = [
        (prompt, off.token_ids, other.token_ids)
        for mode in (Mode.SYNC, Mode.PIPELINED)
        for prompt, off, other in zip(PROMPTS, answers[Mode.OFF], answers[mode], strict=True)
        if off.token_ids != other.token_ids
    ]
    gaps = gaps_of(partings) if partings else []
    for_each = {
        mode.value: [answer.finished.speculation.acceptance_rate for answer in of_mode if answer.finished]
        for mode, of_mode in answers.items()
    }
    findings.record(f"{MAX_TOKENS} tokens of {len(PROMPTS)} prompts, partings by {gaps}; acceptance {for_each}")
    assert all(len(answer.token_ids) == MAX_TOKENS for of_mode in answers.values() for answer in of_mode)
    assert all(gap < BF16_MARGIN for gap in gaps)
    assert sum(answer.finished.speculation.accepted_tokens for answer in answers[Mode.SYNC] if answer.finished) > 0


def gaps_of(partings: list[tuple[str, list[int], list[int]]]) -> list[float]:
    """Between the stock model's bf16 logits of the two tokens at which two answers part."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).eval()
    gaps = []
    for prompt, one, other in partings:
        index = next(i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        with torch.no_grad():
            logits = model(torch.tensor([[*tokenizer(prompt).input_ids, *one[:index]]]), logits_to_keep=1).logits[0, -1]
        gaps.append(abs(float(logits[one[index]]) - float(logits[other[index]])))
    return gaps


async def test_smollm2_says_what_transformers_says_in_fp32(log_folder: Path) -> None:
    if not SMALL.is_dir():
        pytest.skip(f"no smollm2 in {MODELS}")
    flags = ("--target", str(SMALL), "--draft", "ngram", "--dtype", "float32", "--max-context", "512")
    prompt = "A recipe for bread: flour, water, salt, yeast. First mix flour"
    request = GenerateRequest(prompt=prompt, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with running_service(log_folder / "smollm2.log", *flags) as running:
        answers = await ask_all(running.address, [request], in_flight=1)
    oracle = Oracle(SMALL)
    tally = Tally(oracle=oracle)
    ids = oracle.encode(prompt)
    tally.compare(ids, oracle.greedy(ids, MAX_TOKENS), answers[0])
    tally.conclude("")
