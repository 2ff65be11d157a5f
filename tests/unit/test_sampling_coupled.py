"""The coupled choice: the pruned search equals the rule written out, and draft and target choose alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe.errors import ErrorCode
from specpipe.sampling import Chooser, SamplingError, allowed_ids, gumbel, position_key
from specpipe.types import SamplingParams

Logits = npt.NDArray[np.float32]

VOCABULARIES = [1, 2, 7, 64, 513, 4096, 9000, 12000]  # above 8,192 most noise is never computed
SHAPES = ["normal", "flat", "equal", "peaked", "coarse", "banned", "spike", "cliff", "huge"]


def row(shape: str, size: int, rng: np.random.Generator) -> Logits:
    values = rng.normal(0, 3, size)
    if shape == "flat":
        values *= 1e-4
    elif shape == "equal":
        values = np.full(size, rng.normal())
    elif shape == "peaked":
        values = -(np.abs(values) ** 3)
    elif shape == "coarse":
        values = np.round(values)
    elif shape == "banned":
        values[rng.random(size) < 0.9] = -np.inf
        values[rng.integers(size)] = 0.0
    elif shape == "spike":
        values[rng.integers(size)] = 40.0
    elif shape == "cliff":
        values = np.where(rng.random(size) < 0.5, 0.0, -8.0)
    elif shape == "huge":
        values *= 1e4
    return values.astype(np.float32)


def scores_of(logits: Logits, params: SamplingParams, position: int, vocab_size: int) -> Logits:
    """The rule, written out: the noise of every token, no pruning."""
    logits = logits[:vocab_size]
    noise = gumbel(position_key(params.seed, params.choice, position), np.arange(vocab_size))
    scores = logits + np.float32(params.temperature) * noise
    allowed = np.zeros(vocab_size, bool)
    allowed[allowed_ids(logits, params)] = True
    return np.where(allowed, scores, -np.inf).astype(np.float32)


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        temperature=draw(st.sampled_from([1e-3, 0.3, 0.7, 1.0, 1.5, 8.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 5, 2500])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.3, 0.95])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 3)),
    )


@given(params(), st.sampled_from(VOCABULARIES), st.sampled_from(SHAPES), st.integers(0, 10_000))
@settings(max_examples=400, deadline=None)
def test_choice_equals_the_rule_written_out(params: SamplingParams, vocab_size: int, shape: str, number: int) -> None:
    logits = row(shape, vocab_size + number % 3, np.random.default_rng(number))  # padding beyond the tokenizer's ids
    logits[vocab_size:] = 1e6
    if not np.isfinite(logits[:vocab_size]).any():
        return
    chooser = Chooser(params, vocab_size)
    scores = scores_of(logits, params, number, vocab_size)
    assert chooser.choose(logits, number) == np.argmax(scores)  # argmax: the smallest id of the largest
    assert chooser.choose(logits, number) == np.argmax(scores)  # the second time from kept noise


@given(params(), st.sampled_from(VOCABULARIES), st.sampled_from(SHAPES), st.integers(0, 10_000), st.integers(1, 12))
@settings(max_examples=400, deadline=None)
def test_ranking_equals_the_rule_written_out(
    params: SamplingParams, vocab_size: int, shape: str, number: int, count: int
) -> None:
    logits = row(shape, vocab_size, np.random.default_rng(number))
    chooser = Chooser(params, vocab_size)
    ranked = chooser.rank(logits, number, count)
    scores = scores_of(logits, params, number, vocab_size)
    best = np.lexsort((np.arange(vocab_size), -scores))[:count]
    best = best[scores[best] > -np.inf]
    assert [token for token, _ in ranked[: len(best)]] == best.tolist()
    assert ranked[0][0] == chooser.choose(logits, number)
    assert len(ranked) == min(count, int(np.isfinite(logits).sum()))  # filled from below the cut
    assert len({token for token, _ in ranked}) == len(ranked)
    confidences = [confidence for _, confidence in ranked]
    assert confidences == sorted(confidences, reverse=True)
    assert all(0.0 <= confidence <= 1.0 for confidence in confidences)
    assert sum(confidences) < 1.01


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_large_vocabulary_equals_the_rule_written_out(temperature: float, spread: float) -> None:
    params = SamplingParams(temperature=temperature, seed=5)
    chooser = Chooser(params, 151_936)
    rng = np.random.default_rng(3)
    for position in range(6):
        logits = rng.normal(0, spread, 151_936).astype(np.float32)
        scores = scores_of(logits, params, position, 151_936)
        assert chooser.choose(logits, position) == np.argmax(scores)
        ranked = chooser.rank(logits, position, 8)
        assert [token for token, _ in ranked] == np.argsort(-scores, kind="stable")[:8].tolist()
        exact = np.exp(scores - scores.max(), dtype=np.float64)
        shares = exact[[token for token, _ in ranked]] / exact.sum()
        np.testing.assert_allclose([share for _, share in ranked], shares, rtol=0.1 if temperature <= 1 else 0.4)


@pytest.mark.parametrize("vocab_size", [5, 5000])
def test_at_temperature_0_seed_and_cuts_play_no_part(vocab_size: int) -> None:
    logits = np.round(np.random.default_rng(0).normal(0, 2, vocab_size)).astype(np.float32)
    for seed in range(5):
        chooser = Chooser(SamplingParams(temperature=0.0, seed=seed, top_k=3, top_p=0.1), vocab_size)
        assert chooser.choose(logits, seed) == np.argmax(logits)
        ranked = chooser.rank(logits, seed, 4)
        assert [token for token, _ in ranked] == np.argsort(-logits, kind="stable")[:4].tolist()
        shares = np.exp(logits - logits.max(), dtype=np.float64)
        np.testing.assert_allclose([c for _, c in ranked], np.sort(shares / shares.sum())[::-1][:4], rtol=1e-5)


def test_ties_go_to_the_smallest_id() -> None:
    logits = np.array([1.0, 3.0, 3.0, 3.0], np.float32)
    assert Chooser(SamplingParams(temperature=0.0), 4).choose(logits, 0) == 1
    huge = np.array([1.0, 2.0**30, 2.0**30], np.float32)  # the noise is lost in rounding: scores are equal
    assert Chooser(SamplingParams(temperature=1.0), 3).choose(huge, 0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cuts", [{}, {"top_k": 2, "top_p": 0.9, "min_p": 0.1}])
@pytest.mark.parametrize(
    ("logits", "message"),
    [
        ([0.0, np.nan, 1.0], "NaN"),
        ([np.nan] * 3, "NaN"),
        ([0.0, np.inf, 1.0], "inf"),
        ([-np.inf] * 3, "nothing"),
        ([-np.inf, -np.inf, -np.inf, 1.0], "nothing"),
        ([1.0, 2.0], "vocabulary"),
    ],
)
def test_rows_without_a_choice_fail(
    logits: list[float], message: str, temperature: float, cuts: dict[str, float]
) -> None:
    chooser = Chooser(SamplingParams(temperature=temperature, **cuts), 3)  # type: ignore[arg-type]
    for call in (lambda row: chooser.choose(row, 1), lambda row: chooser.rank(row, 1, 2)):
        with pytest.raises(SamplingError, match=message) as failure:
            call(np.array(logits, np.float32))
        assert failure.value.code is ErrorCode.INTERNAL


def test_seed_choice_and_position_change_the_answer_and_nothing_else_does() -> None:
    logits = np.zeros(5000, np.float32)

    def answer(seed: int = 1, choice: int = 0, position: int = 9) -> int:
        return Chooser(SamplingParams(seed=seed, choice=choice), 5000).choose(logits, position)

    assert answer() == answer()
    assert len({answer(), answer(seed=2), answer(choice=1), answer(position=10)}) == 4


def test_noise_of_many_positions_is_forgotten_and_found_again() -> None:
    chooser = Chooser(SamplingParams(seed=4), 2000)
    logits = np.zeros(2000, np.float32)
    first = [chooser.choose(logits, position) for position in range(300)]
    assert len(chooser._positions) <= 64
    assert [chooser.choose(logits, position) for position in range(300)] == first


def test_fills_from_below_the_cut_are_what_the_target_may_allow() -> None:
    logits = np.array([9.0, 8.9, 8.0, -30.0, 2.0], np.float32)
    ranked = Chooser(SamplingParams(top_k=2, seed=3), 5).rank(logits, 7, 5)
    assert {token for token, _ in ranked[:2]} == {0, 1}
    assert [token for token, _ in ranked[2:]] == [2, 4, 3]


@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.9}, {"top_k": 3000}, {"top_k": 5}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e6, 1e30, 1e37, 3.4e38])
@pytest.mark.parametrize("vocab_size", [4096, 9000])
def test_any_finite_temperature_gives_an_allowed_choice_that_a_draft_finds(
    vocab_size: int, temperature: float, cuts: dict[str, float]
) -> None:
    """Noise times the largest of them is beyond float32; and what one request asks may not end a worker."""
    logits = row("normal", vocab_size, np.random.default_rng(5))
    params = SamplingParams(temperature=float(np.float32(temperature)), seed=2**64 - 1, **cuts)  # type: ignore[arg-type]
    chooser = Chooser(params, vocab_size)
    choice = chooser.choose(logits, 17)
    assert choice in allowed_ids(logits, params)
    ranked = chooser.rank(logits, 17, 5)
    assert ranked[0][0] == choice
    assert all(0.0 <= confidence <= 1.0 for _, confidence in ranked)


def test_an_endless_temperature_is_uniform() -> None:
    logits = row("peaked", 16, np.random.default_rng(5))
    chooser = Chooser(SamplingParams(temperature=3.4e38, seed=1), 16)
    counts = np.bincount([chooser.choose(logits, position) for position in range(1600)], minlength=16)
    assert counts.min() > 60
