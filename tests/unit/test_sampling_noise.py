"""The noise is the documented function: golden vectors, a second implementation, and the loud tokens' bound."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe.sampling.noise import PositionNoise, Purpose, _gumbel_of, gumbel, position_key

GOLDEN = json.loads((Path(__file__).parent / "golden" / "noise.json").read_text())
SEEDS = st.integers(0, 2**64 - 1)


def key_again(seed: int, choice: int, position: int, purpose: int) -> int:
    text = b"".join(number.to_bytes(8, "little") for number in (seed, choice, position, purpose))
    return int.from_bytes(hashlib.blake2b(text).digest()[:8], "little")


def noise_again(key: int, token: int) -> np.float32:
    """The definition in plain integers and the C library's logarithms."""
    h = (key + token * 0x9E3779B97F4A7C15) % 2**64
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) % 2**64
    h ^= h >> 31
    u = min(((h >> 11) + 0.5) / 2**53, 1 - 2**-53)
    return np.float32(-math.log(-math.log1p(-u)))


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda v: f"{v['seed']}-{v['choice']}-{v['position']}-{v['purpose']}")
def test_golden_vectors(vector: dict[str, int | list[int] | list[float]]) -> None:
    names = ("seed", "choice", "position", "purpose")
    key = position_key(*(vector[name] for name in names))  # type: ignore[arg-type]
    assert key == vector["key"]
    np.testing.assert_array_equal(gumbel(key, vector["tokens"]), np.array(vector["noise"], np.float32))


@given(SEEDS, st.integers(0, 2**32 - 1), st.integers(0, 2**31), st.sampled_from(Purpose), st.integers(0, 300_000))
@settings(max_examples=300, deadline=None)
def test_noise_equals_the_definition_written_again(
    seed: int, choice: int, position: int, purpose: Purpose, token: int
) -> None:
    key = position_key(seed, choice, position, purpose)
    assert key == key_again(seed, choice, position, purpose)
    assert gumbel(key, [token])[0] == noise_again(key, token)


@pytest.mark.parametrize("other", [{"seed": 2}, {"choice": 1}, {"position": 6}, {"purpose": Purpose.TEST}])
def test_every_part_of_the_key_counts(other: dict[str, int]) -> None:
    base = {"seed": 1, "choice": 0, "position": 5, "purpose": Purpose.CHOICE}
    assert position_key(**base) != position_key(**(base | other))  # type: ignore[arg-type]


def test_noise_is_finite_for_every_hash() -> None:
    hashes = np.array([0, 1, 2**11, 2**63, 2**64 - 1, 2**64 - 2**11, 2**64 - 2**12], np.uint64)
    noise = _gumbel_of(hashes)
    assert np.isfinite(noise).all()
    assert -3.61 < noise.min() < noise.max() < 37.5


@pytest.mark.parametrize("vocab_size", [1, 16, 512, 513, 4096, 50_257, 151_936])
def test_loud_tokens_are_all_those_above_the_bound(vocab_size: int) -> None:
    for position in range(3):
        key = position_key(9, 0, position)
        loud = PositionNoise(key, vocab_size).loud
        everything = gumbel(key, np.arange(vocab_size))
        np.testing.assert_array_equal(loud.noise, everything[loud.ids])
        assert (np.diff(loud.ids) > 0).all()
        quiet = np.delete(everything, loud.ids)
        assert (quiet < loud.bound).all()
        assert len(quiet) == 0 or len(loud.ids) == pytest.approx(512, rel=0.2)


def test_moments_are_gumbel() -> None:
    noise = np.concatenate([gumbel(position_key(3, 0, p), np.arange(20_000)) for p in range(20)]).astype(np.float64)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
