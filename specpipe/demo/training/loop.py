"""The training loop both models share: a schedule by processor time, checkpoints, a log.

What a step learns from is the caller's: a function from (step, progress) to micro-batches and one from a micro-batch
to a loss.
"""

import io
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specpipe.demo.training.optimizer import Optimizer
from specpipe.demo.training.paths import append_record, replace_file, work_path

_log = logging.getLogger(__name__)

_LOG_EVERY_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When training ends, and how fast it learns until then."""

    minutes: float  # the budget of processor time, over all resumed runs together: pauses and busy neighbours cost none
    warmup: float = 0.02  # share of the budget in which the rate rises from 0
    cooldown: float = 0.5  # share of the budget, at its end, in which it falls to 0
    checkpoint_minutes: float = 4.0  # time between two checkpoints

    def rate(self, progress: float) -> float:
        """The learning rate at `progress` (0 to 1) as a share of the peak: a trapezoid."""
        rising = progress / self.warmup if self.warmup else 1.0
        falling = (1.0 - progress) / self.cooldown if self.cooldown else 1.0
        return max(0.02, min(1.0, rising, falling))


class Task(Protocol):
    """What is learned."""

    def micro_batches(self, step: int, progress: float, /) -> Sequence[Any]:
        """The parts of the batch of this step; their losses are averaged."""

    def loss(self, micro_batch: Any) -> torch.Tensor:
        """The mean loss of one part. [] float32"""

    def evaluate(self) -> dict[str, float]:
        """Figures on held-out text, for the log."""


class Trainer:
    """Trains `model` on a task until the budget is spent; resumes from the checkpoint `name` if there is one."""

    def __init__(self, name: str, model: torch.nn.Module, optimizer: Optimizer, schedule: Schedule) -> None:
        self._name = name
        self._model = model
        self._optimizer = optimizer
        self._schedule = schedule
        self._step = 0
        self._spent_s = 0.0
        self._resume()

    def run(self, task: Task) -> None:
        """Train to the end of the budget, with a checkpoint every few minutes and at the end."""
        self._model.train()
        last_s = saved_s = time.process_time()
        losses: list[float] = []
        while (progress := self._spent_s / (60 * self._schedule.minutes)) < 1:
            losses.append(self._train_step(task, progress))
            now_s = time.process_time()
            self._spent_s += now_s - last_s
            last_s = now_s
            if self._step % _LOG_EVERY_STEPS == 0:
                self._record({"loss": sum(losses) / len(losses), "rate": self._schedule.rate(progress)})
                losses.clear()
            if now_s - saved_s > 60 * self._schedule.checkpoint_minutes:
                saved_s = now_s
                self._checkpoint(task)
        self._checkpoint(task)

    def _train_step(self, task: Task, progress: float) -> float:
        parts = task.micro_batches(self._step, progress)
        total = 0.0
        for part in parts:
            loss = task.loss(part) / len(parts)
            loss.backward()
            total += loss.item()
        self._optimizer.step(self._schedule.rate(progress))
        self._step += 1
        return total

    def _checkpoint(self, task: Task) -> None:
        self._model.eval()
        with torch.no_grad():
            self._record(task.evaluate())
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self._step,
            "spent_s": self._spent_s,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        replace_file(work_path(f"{self._name}.pt"), buffer.getvalue())
        self._model.train()

    def _resume(self) -> None:
        path = work_path(f"{self._name}.pt")
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step, self._spent_s = state["step"], state["spent_s"]
        _log.info("resumed %s at step %d after %.0f s", self._name, self._step, self._spent_s)

    def _record(self, figures: dict[str, float]) -> None:
        record = {"step": self._step, "minutes": round(self._spent_s / 60, 2)}
        record |= {name: round(value, 4) for name, value in figures.items()}
        append_record(f"{self._name}.jsonl", record)
        _log.info("%s %s", self._name, record)
