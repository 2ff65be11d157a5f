"""Defaults and limits of what a request may say. The refusals are in tests/contract/test_coordinator_generate.py."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from coordinator.requests import Question
from coordinator.validation import ServiceFacts, check_question, create_request
from specpipe.answers import ChatMessage
from specpipe.errors import InvalidRequestError, ModelNotFoundError
from specpipe.types import Mode, ModelInfo, Rule, SpeculationParams

MODEL = ModelInfo(
    name="folder", fingerprint="f", tokenizer_fingerprint="t", vocab_size=100, max_context=64, eos_token_ids=(1, 2)
)
FACTS = ServiceFacts(model=MODEL, model_name="served", least_tokens=lambda num_bytes: num_bytes // 4)


def resolved(prompt: tuple[int, ...] = (5, 6), facts: ServiceFacts = FACTS, **options: Any) -> Any:
    question = Question(prompt=prompt, **options)
    check_question(question, facts)
    return create_request(question, prompt, facts)


def test_defaults_are_the_documented_ones_and_never_a_folders() -> None:
    request = resolved()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert request.stops.eos_token_ids == (1, 2)
    assert not request.stops.ignore_eos
    assert request.stops.max_length == 64, "256 tokens, cut at the context"
    assert (request.speculation.mode, request.speculation.rule) == (Mode.PIPELINED, Rule.COUPLED)
    assert request.speculation.num_speculative_tokens is None
    assert request.request_id
    assert request.model == "served"


def test_seeds_are_drawn_from_the_whole_range() -> None:
    seeds = {resolved().sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert max(seeds) > 2**60
    assert resolved(seed=0).sampling.seed == 0


def test_a_request_id_stands_for_a_seed_and_for_the_same_one_in_every_version() -> None:
    assert resolved(request_id="order-66").sampling.seed == 2_407_596_852_553_532_395
    assert resolved(request_id="tür").sampling.seed == 8_288_170_407_577_559_461
    assert resolved(request_id="order-66", seed=5).sampling.seed == 5


@pytest.mark.parametrize(
    ("mode", "asked", "service", "expected"),
    [
        (Mode.SYNC, None, None, 4),
        (Mode.PIPELINED, None, None, None),
        (Mode.SYNC, None, 7, 7),
        (Mode.SYNC, 2, 7, 2),
        (Mode.PIPELINED, None, 7, 7),
    ],
)
def test_k_comes_from_the_request_then_the_service_then_the_mode(
    mode: Mode, asked: int | None, service: int | None, expected: int | None
) -> None:
    facts = replace(FACTS, mode=mode, num_speculative_tokens=service)
    assert resolved(facts=facts, num_speculative_tokens=asked).speculation.num_speculative_tokens == expected


@pytest.mark.parametrize(("mode", "expected"), [(Mode.OFF, "none"), (Mode.SYNC, "ngram"), (None, "ngram")])
def test_off_needs_no_drafter(mode: Mode | None, expected: str) -> None:
    assert resolved(facts=replace(FACTS, drafter="ngram"), mode=mode).speculation.drafter == expected


@pytest.mark.parametrize("asked", [None, *Mode])
def test_where_nothing_drafts_the_mode_in_force_is_off(asked: Mode | None) -> None:
    assert resolved(facts=replace(FACTS, drafter="none"), mode=asked).speculation == SpeculationParams(
        mode=Mode.OFF, drafter="none"
    )


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "max_length"), [(60, None, 64), (63, 5, 64), (10, 5, 15), (10, 10**18, 64)]
)
def test_max_length_is_absolute_and_within_the_context(
    num_prompt: int, max_tokens: int | None, max_length: int
) -> None:
    assert resolved((5,) * num_prompt, max_tokens=max_tokens).stops.max_length == max_length


@pytest.mark.parametrize("num_prompt", [64, 65, 1000])
def test_a_prompt_that_fills_the_context_is_refused(num_prompt: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{num_prompt} tokens"):
        resolved((5,) * num_prompt)


def test_text_is_refused_by_its_bytes_where_they_decide() -> None:
    check_question(Question(prompt="x" * 255), FACTS)
    with pytest.raises(InvalidRequestError, match="256 bytes are at least 64 tokens"):
        check_question(Question(prompt="x" * 256), FACTS)


def test_text_has_a_limit_where_bytes_do_not_decide() -> None:
    facts = ServiceFacts(model=MODEL, model_name="served")
    check_question(Question(prompt="x" * 65_536), facts)
    check_question(
        Question(prompt=(ChatMessage(role="user", content="x" * 65_535), ChatMessage(role="user", content="x"))), facts
    )
    for prompt in (
        "x" * 65_537,
        "é" * 32_769,
        (ChatMessage(role="user", content="x" * 65_536), ChatMessage(role="user", content="x")),
    ):
        with pytest.raises(InvalidRequestError, match=r"has 6553[78] bytes, and the limit is 65536: 1024 for each"):
            check_question(Question(prompt=prompt), facts)


def test_a_very_long_prompt_does_not_hold_the_event_loop() -> None:
    """All that is done with its ids between two awaits, on this thread's own clock."""
    many = replace(FACTS.model, max_context=200_000)
    facts = replace(FACTS, model=many)
    question = Question(prompt=tuple([5] * 100_000))

    def cost_s() -> float:
        started = time.thread_time()
        check_question(question, facts)
        create_request(question, list(question.prompt or ()), facts)
        return time.thread_time() - started

    assert min(cost_s() for _ in range(3)) < 0.05


def test_a_tokenizers_ids_beyond_the_model_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"\[1\]: 100 is not a token id \(0 to 99\)"):
        create_request(Question(prompt="text"), (5, 100), FACTS)


@pytest.mark.parametrize("name", ["", "served", "folder"])
def test_a_model_may_be_named_as_served_or_as_it_is(name: str) -> None:
    check_question(Question(prompt="text", model=name), FACTS)
    with pytest.raises(ModelNotFoundError):
        check_question(Question(prompt="text", model=name + "x"), FACTS)


def test_stops_are_kept_once_each() -> None:
    request = resolved(stop=("a", "b", "a"), stop_token_ids=(3, 3, 4))
    assert request.stop_strings == ("a", "b")
    assert request.stops.stop_token_ids == (3, 4)
