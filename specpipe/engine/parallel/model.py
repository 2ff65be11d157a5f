"""The model as rank 0 offers it: every step is announced, run by all ranks, and its logits come back here.

Owns: the order of announcing and running. Must not know: how ranks are started or watched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specpipe.engine.interface import StepBatch
from specpipe.engine.parallel.announce import Encoder, encode_slots
from specpipe.engine.parallel.channel import Kind
from specpipe.engine.runner import ModelRunner


class Audience(Protocol):
    """The other ranks."""

    def send(self, kind: Kind, number: int, payload: bytes) -> None:
        """Tell all of them. Raises WorkerUnavailableError if one is gone."""
        ...


class Stopwatch(Protocol):
    """Knows how long each rank works on a step; see Collective."""

    def begin_step(self) -> None: ...

    def end_step(self) -> list[float]: ...


class ParallelModel:
    """Implements specpipe.engine.interface.StepModel over a group of ranks. Called from one thread only."""

    def __init__(self, runner: ModelRunner, audience: Audience, stopwatch: Stopwatch | None = None) -> None:
        """Without a `stopwatch`, what each rank worked is not measured."""
        self.rank_ms: Sequence[float] = ()
        self.info = runner.info
        self.num_slots = runner.num_slots
        self._runner = runner
        self._audience = audience
        self._stopwatch = stopwatch
        self._encoder = Encoder()
        self._step = 0

    def forward(self, batch: StepBatch) -> npt.NDArray[np.float32]:
        """See StepModel.forward. A batch that is refused is not announced.

        Raises WorkerUnavailableError if a rank is gone or does not answer: the group is then of no more use.
        """
        if self._stopwatch is not None:
            self._stopwatch.begin_step()
        arrays = self._runner.prepare(batch)
        self._step += 1
        self._audience.send(Kind.STEP, self._step, self._encoder.encode(batch))
        logits = self._runner.run(arrays)
        if self._stopwatch is not None:
            self.rank_ms = self._stopwatch.end_step()
        return logits

    def clear_slots(self, slots: Sequence[int]) -> None:
        """See StepModel.clear_slots."""
        if slots:
            self._audience.send(Kind.CLEAR, self._step, encode_slots(slots))
            self._runner.clear_slots(slots)
