"""Answers equal the target's own, whatever the mode; and say truly how long they are and why they ended."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
from oracle import Oracle, Sampling

from specpipe.answers import ChatMessage
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.types import FinishReason, Mode, Origin, Rule

PROMPTS = (
    "def tokens(line):",
    "A fast draft model guesses ahead;",
    "for index, value in enumerate(",
    "Zwölf Boxkämpfer jagen",
    "中文 한국어 😀",
    "x",
)
MODES = tuple(Mode)


async def ask_all(client: GenerateClient, requests: list[GenerateRequest]) -> list[Answer]:
    return await asyncio.gather(*(client.answer(request, timeout_s=60) for request in requests))


@pytest.mark.parametrize("mode", MODES)
async def test_greedy_answers_equal_generate_on_the_target_alone(
    client: GenerateClient, oracle: Oracle, mode: Mode
) -> None:
    requests = [
        GenerateRequest(prompt=prompt, temperature=0, max_tokens=48, ignore_eos=True, mode=mode) for prompt in PROMPTS
    ]
    answers = await ask_all(client, requests)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = oracle.encode(prompt)
        if answer.token_ids != oracle.greedy(ids, 48):
            assert oracle.check(ids, answer.token_ids, Sampling()) > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.3, seed=11),
        Sampling(temperature=0.7, seed=12, top_k=20),
        Sampling(temperature=1.0, seed=2**63 + 5, top_p=0.8),
        Sampling(temperature=1.5, seed=14, min_p=0.05, top_k=50, top_p=0.95),
    ],
    ids=lambda s: f"t{s.temperature}",
)
async def test_sampled_answers_are_the_oracles_own_samples(
    client: GenerateClient, oracle: Oracle, mode: Mode, sampling: Sampling
) -> None:
    requests = [
        GenerateRequest(
            prompt=prompt,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            max_tokens=24,
            ignore_eos=True,
            mode=mode,
        )
        for prompt in PROMPTS[:3]
    ]
    for request, answer in zip(requests, await ask_all(client, requests), strict=True):
        assert isinstance(request.prompt, str)
        assert len(answer.token_ids) == 24
        assert oracle.check(oracle.encode(request.prompt), answer.token_ids, sampling) == 0


async def test_text_is_the_decoded_ids_and_usage_counts_them(client: GenerateClient, oracle: Oracle) -> None:
    request = GenerateRequest(prompt="中文", temperature=1, seed=3, max_tokens=40, ignore_eos=True)
    answer = await client.answer(request)
    assert answer.started is not None
    assert answer.finished is not None
    assert answer.text == oracle.decode(answer.token_ids)
    assert answer.finished.completion_tokens == len(answer.token_ids) == len(answer.origins) == 40
    assert answer.finished.prompt_tokens == answer.started.prompt_tokens == len(oracle.encode("中文"))
    assert answer.finished.finish_reason is FinishReason.LENGTH


async def test_a_prompt_of_ids_is_the_prompt_of_text(client: GenerateClient, oracle: Oracle) -> None:
    text = GenerateRequest(prompt="def f(", temperature=0, max_tokens=8)
    ids = GenerateRequest(prompt=tuple(oracle.encode("def f(")), temperature=0, max_tokens=8)
    first, second = await ask_all(client, [text, ids])
    assert first.token_ids == second.token_ids


async def test_a_chat_is_rendered_by_the_tokenizers_template(client: GenerateClient, oracle: Oracle) -> None:
    chat = (ChatMessage(role="user", content="hello"),)
    rendered = oracle.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    ids = tuple(oracle.tokenizer(rendered, add_special_tokens=False).input_ids)
    first = await client.answer(GenerateRequest(prompt=chat, temperature=0, max_tokens=8))
    second = await client.answer(GenerateRequest(prompt=ids, temperature=0, max_tokens=8))
    assert first.token_ids == second.token_ids


async def test_a_drawn_seed_is_reported_and_gives_the_answer_again(client: GenerateClient) -> None:
    request = GenerateRequest(prompt="for", temperature=1, max_tokens=12, ignore_eos=True)
    first, other = await ask_all(client, [request, request])
    assert first.started is not None
    assert first.token_ids != other.token_ids
    seeded = GenerateRequest(
        prompt="for", temperature=1, max_tokens=12, ignore_eos=True, seed=first.started.seed, mode=Mode.OFF
    )
    assert (await client.answer(seeded)).token_ids == first.token_ids


@pytest.mark.parametrize("mode", MODES)
async def test_a_stop_token_at_any_place_of_a_block_ends_the_answer_there(client: GenerateClient, mode: Mode) -> None:
    plain = await client.answer(GenerateRequest(prompt="def", temperature=0, max_tokens=24, ignore_eos=True))
    first_seen = [i for i, token in enumerate(plain.token_ids) if token not in plain.token_ids[:i]]
    requests = [
        GenerateRequest(
            prompt="def",
            temperature=0,
            max_tokens=24,
            ignore_eos=True,
            stop_token_ids=(plain.token_ids[i],),
            mode=mode,
        )
        for i in first_seen
    ]
    for index, answer in zip(first_seen, await ask_all(client, requests), strict=True):
        assert answer.token_ids == plain.token_ids[: index + 1]
        assert answer.finished is not None
        assert answer.finished.finish_reason is FinishReason.STOP


async def test_a_stop_string_ends_ids_with_the_token_that_completes_it_and_text_before_it(
    client: GenerateClient, oracle: Oracle
) -> None:
    plain = await client.answer(GenerateRequest(prompt="def", temperature=0, max_tokens=40, ignore_eos=True))
    stop = plain.text[6:9]
    end = plain.text.index(stop)
    request = GenerateRequest(prompt="def", temperature=0, max_tokens=40, ignore_eos=True, stop=(stop,))
    answer = await client.answer(request)
    assert answer.finished is not None
    assert answer.text == plain.text[:end]
    assert answer.finished.finish_reason is FinishReason.STOP
    assert answer.token_ids == plain.token_ids[: len(answer.token_ids)]
    assert stop in oracle.decode(answer.token_ids)
    assert stop not in oracle.decode(answer.token_ids[:-1])
    assert answer.finished.completion_tokens == len(answer.token_ids)


@pytest.mark.parametrize("mode", MODES)
async def test_max_tokens_is_exact_for_every_length_of_a_block(client: GenerateClient, mode: Mode) -> None:
    requests = [
        GenerateRequest(prompt="for", temperature=0, max_tokens=n, ignore_eos=True, mode=mode) for n in range(1, 12)
    ]
    for n, answer in enumerate(await ask_all(client, requests), 1):
        assert len(answer.token_ids) == n
        assert answer.finished is not None
        assert answer.finished.finish_reason is FinishReason.LENGTH


async def test_the_last_position_of_the_context_is_used_and_ends_the_answer(
    client: GenerateClient, oracle: Oracle
) -> None:
    prompt = tuple(oracle.encode("x" * 600)[:500])
    answer = await client.answer(GenerateRequest(prompt=prompt, temperature=0, max_tokens=10**9, ignore_eos=True))
    assert len(prompt) + len(answer.token_ids) == 512
    assert answer.finished is not None
    assert answer.finished.finish_reason is FinishReason.LENGTH
    assert oracle.check(prompt, answer.token_ids, Sampling()) == 0


@pytest.mark.parametrize("mode", MODES)
async def test_statistics_agree_with_the_answer(client: GenerateClient, mode: Mode) -> None:
    answer = await client.answer(
        GenerateRequest(prompt="A fast draft", temperature=0, max_tokens=60, ignore_eos=True, mode=mode)
    )
    assert answer.finished is not None
    stats, origins = answer.finished.speculation, Counter(answer.origins)
    assert stats.mode is mode
    assert stats.rule is Rule.COUPLED
    assert origins[Origin.ACCEPTED] == stats.accepted_tokens <= stats.verified_tokens <= stats.drafted_tokens
    assert stats.mean_acceptance_length is not None
    assert math.isclose(stats.mean_acceptance_length * stats.rounds, 60, abs_tol=1.01)
    if mode is Mode.OFF:
        assert stats.drafted_tokens == 0
        assert stats.rounds in (59, 60)
        assert stats.acceptance_rate is stats.hit_rate is None
    if mode is Mode.SYNC:  # pipelined takes what is there, and these models are so small that it may be little
        assert stats.accepted_tokens > 0
        assert stats.acceptance_rate is not None
        assert 0 < stats.acceptance_rate <= 1
    assert answer.finished.timing.total_ms >= answer.finished.timing.ttft_ms > 0
