"""The loop that changes the number of workers: measures, decides (`autoscale`), has it done (`service`).

Owns: the clock of the decisions, and the record of what was changed and why. Must not know: how it is decided or done.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from specpipe.cluster.autoscale import AutoscaleConfig, Decision, Load, Memory, decide_drafts, decide_targets
from specpipe.cluster.load import Page, fetch_pages, load_between
from specpipe.launcher.plan import DRAFT_WORKER, TARGET_WORKER

MAX_CHANGES_KEPT: Final = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountChange:
    at: float  # seconds since 1970
    role: str
    before: int
    after: int
    reason: str


class Scaled(Protocol):
    """What is scaled."""

    def count(self, role: str) -> int:
        """Workers that there are, those that begin included and those that leave not."""
        ...

    def metrics(self) -> list[str]:
        """HOST:PORT of every /metrics."""
        ...

    def scale(self, role: str, count: int) -> None: ...


class Scaler:
    def __init__(self, config: AutoscaleConfig, scaled: Scaled) -> None:
        self.changes: collections.deque[CountChange] = collections.deque(maxlen=MAX_CHANGES_KEPT)
        self._config = config
        self._scaled = scaled
        self._memories = {role: Memory() for role in self._decisions()}

    async def run(self) -> None:
        """For ever; at once over when nothing is to be scaled."""
        before: Mapping[str, Page] = {}
        before_s = time.monotonic()
        while self._memories:
            await asyncio.sleep(self._config.every_s)
            now = await fetch_pages(self._scaled.metrics())
            now_s = time.monotonic()
            num_drafts = self._scaled.count(DRAFT_WORKER)
            self.look(load_between(before, now, passed_s=now_s - before_s, num_drafts=num_drafts), now_s)
            before, before_s = now, now_s

    def look(self, load: Load, now_s: float) -> None:
        """Have done what one load decides."""
        for role, decide in self._decisions().items():
            count = self._scaled.count(role)
            decision = decide(self._memories[role], load, count, now_s)
            self._memories[role] = decision.memory
            if decision.count != count:
                self._note(role, count, decision)
                self._scaled.scale(role, decision.count)

    def _note(self, role: str, count: int, decision: Decision) -> None:
        logger.warning("%ss: %d -> %d (%s)", role, count, decision.count, decision.reason)
        change = CountChange(at=time.time(), role=role, before=count, after=decision.count, reason=decision.reason)
        self.changes.append(change)

    def _decisions(self) -> dict[str, Callable[[Memory, Load, int, float], Decision]]:
        """By role, of the kinds that are scaled."""
        config, found = self._config, {}
        drafts, targets = config.draft_workers, config.target_workers
        if drafts is not None:
            found[DRAFT_WORKER] = lambda memory, load, count, now_s: decide_drafts(
                drafts, config, memory, load, count=count, now_s=now_s
            )
        if targets is not None:
            found[TARGET_WORKER] = lambda memory, load, count, now_s: decide_targets(
                targets, config, memory, load, count=count, now_s=now_s
            )
        return found
