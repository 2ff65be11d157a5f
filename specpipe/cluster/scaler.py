"""The loop that changes the number of workers: measures, decides (`autoscale`), has it done (`service`).

Owns: the clock of the decisions, and the record of what was changed and why. Must not know: how it is decided or done.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from specpipe.cluster.autoscale import AutoscaleConfig, Decision, Load, Memory, decide_drafts, decide_targets
from specpipe.cluster.load import Reading, fetch_pages, load_of
from specpipe.launcher.plan import COORDINATOR, DRAFT_WORKER, TARGET_WORKER

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

    def metrics(self) -> Mapping[str, Sequence[str]]:
        """HOST:PORT of every /metrics of a process that runs, by role."""
        ...

    def scale(self, role: str, count: int) -> None: ...


class Scaler:
    def __init__(self, config: AutoscaleConfig, scaled: Scaled) -> None:
        self.changes: collections.deque[CountChange] = collections.deque(maxlen=MAX_CHANGES_KEPT)
        self._config = config
        self._scaled = scaled
        self._memories = {role: Memory() for role in self._decisions()}
        self._unread: set[str] = set()  # addresses of /metrics, at the last look

    async def run(self) -> None:
        """For ever; at once over when nothing is to be scaled. An error ends one look, and is logged when it is new."""
        before, failed = Reading(), None
        while self._memories:
            await asyncio.sleep(self._config.every_s)
            try:
                before, failed = await self._step(before), None
            except Exception as error:  # a fault of ours or of the engine: it must not end all looks
                if type(error) is not failed:
                    logger.exception("autoscaling: an unexpected error; it goes on")
                before, failed = Reading(), type(error)

    def look(self, load: Load | None, now_s: float) -> None:
        """Have done what one load decides; None: it is not known."""
        for role, decide in self._decisions().items():
            count = self._scaled.count(role)
            decision = decide(self._memories[role], load, count, now_s)
            self._memories[role] = decision.memory
            if decision.count != count:
                self._scaled.scale(role, decision.count)
                self._note(role, count, decision)

    async def _step(self, before: Reading) -> Reading:
        """Measure and decide. Returns what was measured."""
        now = await self._read()
        self._note_unread(now)
        self.look(load_of(before, now, num_drafts=self._scaled.count(DRAFT_WORKER)), now.at_s)
        return now

    async def _read(self) -> Reading:
        """Target workers have nothing to say that is asked for here, nor have draft workers whose number stays."""
        asked = self._scaled.metrics()
        draft_addresses = asked.get(DRAFT_WORKER, ()) if DRAFT_WORKER in self._memories else ()
        coordinators, drafts = await asyncio.gather(
            fetch_pages(asked.get(COORDINATOR, ())), fetch_pages(draft_addresses)
        )
        return Reading(at_s=time.monotonic(), coordinators=coordinators, drafts=drafts)

    def _note_unread(self, now: Reading) -> None:
        """Log once when metrics cannot be read, and once when they can again."""
        for address, reason in now.unread.items():
            if address not in self._unread:
                logger.warning("the metrics at %s cannot be read, and nothing is scaled by them: %s", address, reason)
        for address in sorted(self._unread & (now.coordinators.keys() | now.drafts.keys())):
            if address not in now.unread:
                logger.warning("the metrics at %s can be read again", address)
        self._unread = set(now.unread)

    def _note(self, role: str, count: int, decision: Decision) -> None:
        logger.warning("%ss: %d -> %d (%s)", role, count, decision.count, decision.reason)
        change = CountChange(at=time.time(), role=role, before=count, after=decision.count, reason=decision.reason)
        self.changes.append(change)

    def _decisions(self) -> dict[str, Callable[[Memory, Load | None, int, float], Decision]]:
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
