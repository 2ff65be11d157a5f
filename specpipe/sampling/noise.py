"""Gumbel noise that is a function of (seed, choice, position, purpose, token id) and the same on every device.

Owns: the exact definition and its evaluation for few tokens at a time. Must not know: logits, requests.

    key = first 8 bytes, little-endian, of blake2b over four little-endian unsigned 64-bit numbers:
          seed, choice, position, purpose
    h   = finalise(key + token x 0x9E3779B97F4A7C15)     modulo 2^64; the finaliser is splitmix64's
    u   = (top 53 bits of h + 0.5) / 2^53                 in float64, at most 1 - 2^-53
    g   = -log(-log1p(-u))                                in float64, rounded once to float32

g is large where u is small: since -log1p(-u) >= u, g lies in -3.61 .. 37.5. `position` is the index, in the whole
sequence, of the token being chosen. Golden vectors: tests/unit/golden/noise.json.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
_Hashes = npt.NDArray[np.uint64]

_TOKEN_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_LARGEST_U = 1.0 - 2.0**-53
_BLOCK = 32768  # tokens hashed at once: the working set stays in the core's cache
_NUM_LOUD = 512  # tokens of a position whose noise is kept at hand
_SMALL_VOCAB = 8192  # up to here all noise of a position is computed once and kept: cheaper than searching it again
_MASK = (1 << 64) - 1


class Purpose(enum.IntEnum):
    """What a position's noise is drawn for. Purposes never share noise."""

    CHOICE = 0  # the coupled rule: the target's choice, and the draft's ranking
    DRAFT_SAMPLE = 1  # the rejection rule's three
    TEST = 2
    RESIDUAL = 3


def position_key(seed: int, choice: int, position: int, purpose: Purpose = Purpose.CHOICE) -> int:
    """The 64-bit key of one position's noise."""
    text = struct.pack("<4Q", seed & _MASK, choice, position, purpose)
    return int.from_bytes(hashlib.blake2b(text).digest()[:8], "little")


def uniform(seed: int, choice: int, position: int, purpose: Purpose, context: Sequence[int] = ()) -> float:
    """One number in (0, 1): (top 53 bits of the key + 0.5) / 2^53, at most 1 - 2^-53.

    The key hashes `context` (token ids) after the four numbers: nodes at one position have numbers of their own.
    """
    text = struct.pack(f"<{4 + len(context)}Q", seed & _MASK, choice, position, purpose, *context)
    key = int.from_bytes(hashlib.blake2b(text).digest()[:8], "little")
    return min(((key >> 11) + 0.5) * 2.0**-53, _LARGEST_U)


def gumbel(key: int, token_ids: npt.ArrayLike) -> Floats:
    """g of each token id. Returns float32 of the same shape."""
    ids = np.asarray(token_ids).astype(np.uint64)
    hashes = ids * _TOKEN_FACTOR + np.uint64(key)
    _finalise(hashes, np.empty_like(hashes))
    return _gumbel_of(hashes)


@dataclass(frozen=True, slots=True)
class Loud:
    """The tokens of one position with the largest noise. Every other token's noise is below `bound`."""

    ids: Ids  # rising
    noise: Floats
    bound: np.float32


class PositionNoise:
    """The noise of one position over a vocabulary, evaluated for as few tokens as its users need."""

    def __init__(self, key: int, vocab_size: int) -> None:
        self.key = key
        self.vocab_size = vocab_size
        self._loud: Loud | None = None

    def of(self, token_ids: Ids) -> Floats:
        return gumbel(self.key, token_ids)

    @property
    def loud(self) -> Loud:
        """Some hundreds of tokens (all of a small vocabulary). Computed once: it hashes the whole vocabulary."""
        if self._loud is None:
            self._loud = self._find_loud()
        return self._loud

    def _find_loud(self) -> Loud:
        if self.vocab_size <= _SMALL_VOCAB:
            ids = np.arange(self.vocab_size)
            return Loud(ids, self.of(ids), np.float32(-np.inf))
        limit, bound = loud_limit(self.vocab_size)
        ids = np.concatenate([start + np.flatnonzero(hashes < limit) for start, hashes in self._hash_all()])
        return Loud(ids, self.of(ids), bound)

    def _hash_all(self) -> Iterator[tuple[int, _Hashes]]:
        """(first id, hashes of the block that starts there); each block is overwritten by the next."""
        products = _token_products(self.vocab_size)
        buffer = np.empty(min(_BLOCK, self.vocab_size), np.uint64)
        scratch = np.empty_like(buffer)
        for start in range(0, self.vocab_size, _BLOCK):
            block = products[start : start + _BLOCK]
            hashes = buffer[: len(block)]
            np.add(block, np.uint64(self.key), out=hashes)
            _finalise(hashes, scratch[: len(block)])
            yield start, hashes


@functools.cache
def loud_limit(vocab_size: int) -> tuple[np.uint64, np.float32]:
    """Hashes below the first number are loud; the noise of all others is below the second."""
    limit = (_MASK // vocab_size * _NUM_LOUD) >> 11 << 11  # a whole step of u
    bound = float(_gumbel_of(np.array([limit], np.uint64))[0])
    return np.uint64(limit), np.float32(bound + 1e-5)  # more than the rounding of log


def _finalise(hashes: _Hashes, scratch: _Hashes) -> None:
    """splitmix64's finaliser, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        np.right_shift(hashes, np.uint64(shift), out=scratch)
        np.bitwise_xor(hashes, scratch, out=hashes)
        if factor != 1:
            np.multiply(hashes, np.uint64(factor), out=hashes)


def _gumbel_of(hashes: _Hashes) -> Floats:
    u = ((hashes >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    np.minimum(u, _LARGEST_U, out=u)
    noise: Floats = (-np.log(-np.log1p(-u))).astype(np.float32)
    return noise


@functools.lru_cache(maxsize=4)
def _token_products(vocab_size: int) -> _Hashes:
    products = np.arange(vocab_size, dtype=np.uint64) * _TOKEN_FACTOR
    products.flags.writeable = False
    return products
