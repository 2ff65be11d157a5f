"""Turns a drafter's confidence into the rate at which such nodes turn out to be the target's choice.

Owns: counts by drafter, rank, confidence and depth, learned from what verification says, forgotten slowly. Must not
know: trees, sessions, clocks. One calibrator serves all sessions of a worker.
"""

from __future__ import annotations

import math
from collections import defaultdict

_PRIOR = 32.0  # observations that the drafter's own confidence weighs against what is seen
_MEMORY = 4000.0  # observations after which a cell has forgotten two thirds of what it saw before
_RANK_GROUPS = (0, 1, 2, 3, 4, 4, 4, 4)  # ranks beyond: 5
_LARGEST = 0.9999  # nothing is certain: a tree must not grow one chain for ever
_SMALLEST = 1e-9
_MAX_DRAFTERS = 16
_OTHERS = ""


class _Cell:
    """How often something came true against how often it was foretold."""

    __slots__ = ("came_true", "count", "factor", "foretold")

    def __init__(self) -> None:
        self.count = 0.0
        self.foretold = 0.0
        self.came_true = 0.0
        self.factor = 1.0  # by which foretold probabilities of this kind are to be multiplied

    def observe(self, probability: float, is_true: bool) -> None:
        keep = 1.0 - 1.0 / _MEMORY
        self.count = self.count * keep + 1.0
        self.foretold = self.foretold * keep + probability
        self.came_true = self.came_true * keep + is_true
        prior = _PRIOR * self.foretold / self.count
        self.factor = (self.came_true + prior) / (self.foretold + prior)


class Calibrator:
    """Starts as identity. Confidences of one kind (drafter, rank, how sure) share a factor, and depths another."""

    def __init__(self) -> None:
        self._kinds: defaultdict[tuple[str, int, int], _Cell] = defaultdict(_Cell)
        self._depths: defaultdict[tuple[str, int], _Cell] = defaultdict(_Cell)
        self._drafters: set[str] = set()

    def estimate(self, rank: int, depth: int, confidence: float, drafter: str) -> float:
        """Probability, in 0..1, that such a node is the target's choice if its parent is committed."""
        drafter = drafter if drafter in self._drafters else _OTHERS
        kind = self._kinds.get(_kind(rank, confidence, drafter))
        below = self._depths.get((drafter, depth.bit_length()))
        if kind is None and below is None:
            return min(1.0, max(0.0, confidence))
        by_kind = _bounded(confidence * (kind.factor if kind is not None else 1.0))
        return _bounded(by_kind * (below.factor if below is not None else 1.0))

    def observe(self, rank: int, depth: int, confidence: float, drafter: str, is_choice: bool) -> None:
        """Learn from a child of a walked node: whether it was the target's choice there."""
        if drafter not in self._drafters:
            drafter = self._admit(drafter)
        kind = self._kinds[_kind(rank, confidence, drafter)]
        probability = _bounded(confidence)
        self._depths[drafter, depth.bit_length()].observe(_bounded(probability * kind.factor), is_choice)
        kind.observe(probability, is_choice)

    def _admit(self, drafter: str) -> str:
        """A drafter's name comes from far away; those beyond a number share what is learned."""
        name = drafter if len(self._drafters) < _MAX_DRAFTERS else _OTHERS
        self._drafters.add(name)
        return name


def _kind(rank: int, confidence: float, drafter: str) -> tuple[str, int, int]:
    group = _RANK_GROUPS[rank] if rank < len(_RANK_GROUPS) else 5
    sure = min(0.999, max(1e-5, confidence))
    return drafter, group, round(math.log(sure / (1.0 - sure)))


def _bounded(probability: float) -> float:
    return min(_LARGEST, max(_SMALLEST, probability))
