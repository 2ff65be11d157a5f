"""Whether each process's health says what is true, and how late it says so.

Owns: what is true, by what the harness itself has done, and for how long that has been so; what health said meanwhile.
Must not know: requests. Time is counted in the watch's own ticks, so that a machine that stands still blames nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import grpc
import grpc.aio
from fleet import RANK, Fleet
from grpc_health.v1 import health_pb2, health_pb2_grpc
from members import Member

TICK_S = 0.5
MAX_TICK_S = 1.0  # what is beyond, the watch itself was kept from looking
ANSWER_WITHIN_S = 2.0
TRUE_WITHIN_S = 5.0
NAMES = {
    "coordinator": "specpipe.rpc.v1.GenerateService",
    "draft-worker": "specpipe.rpc.v1.DraftService",
    "target-worker": "specpipe.rpc.v1.TargetService",
}


async def is_serving(member: Member) -> bool:
    """What its health says; no answer is a no."""
    request = health_pb2.HealthCheckRequest(service=NAMES[member.role])
    async with grpc.aio.insecure_channel(member.address) as channel:
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=ANSWER_WITHIN_S)
        except grpc.aio.AioRpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass(slots=True)
class _Belief:
    """About one process."""

    truth: bool | None = None
    wrong_s: float = 0.0  # how long health has said otherwise, without a break


class HealthWatch:
    """`async with HealthWatch(fleet, suffering) as watch`: `suffering` tells which victims' faults last now."""

    def __init__(self, fleet: Fleet, suffering: Callable[[], Mapping[str, object]]) -> None:
        self.problems: list[str] = []
        self.longest_s = 0.0  # that any health was wrong
        self.num_changes = 0  # of truths
        self._fleet = fleet
        self._suffering = suffering
        self._beliefs = {name: _Belief() for name in fleet.members}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> HealthWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        before_s = time.monotonic()
        while True:
            said = await asyncio.gather(*(is_serving(member) for member in self._fleet.members.values()))
            now_s = time.monotonic()
            passed_s, before_s = min(now_s - before_s, MAX_TICK_S), now_s
            for member, serves in zip(self._fleet.members.values(), said, strict=True):
                self._compare(member, serves, passed_s)
            await asyncio.sleep(TICK_S)

    def _compare(self, member: Member, serves: bool, passed_s: float) -> None:
        belief, truth = self._beliefs[member.name], self._truth(member)
        if truth is not belief.truth:
            self.num_changes += 1
            belief.truth, belief.wrong_s = truth, 0.0
            return
        if truth is None or serves is truth:
            belief.wrong_s = 0.0
            return
        belief.wrong_s += passed_s
        self.longest_s = max(self.longest_s, belief.wrong_s)
        if belief.wrong_s - passed_s < TRUE_WITHIN_S + TICK_S <= belief.wrong_s:
            word = "serving" if serves else "not serving"
            self.problems.append(
                f"{member.name} still says {word} after {belief.wrong_s:.1f} s in which that was not true"
            )

    def _truth(self, member: Member) -> bool | None:
        """Whether it can do its work; None: that cannot be told."""
        if not member.is_usable or member.role != "coordinator":
            return self._works(member)
        targets = [self._reached(member, target) for target in self._fleet.of("target-worker")]
        return True if True in targets else None if None in targets else False

    def _reached(self, coordinator: Member, target: Member) -> bool | None:
        works = self._works(target)
        return None if works and f"{coordinator.name}>{target.name}" in self._suffering() else works

    def _works(self, member: Member) -> bool | None:
        if member.name == "target-group" and RANK in self._suffering():
            return None  # it finds out by itself that a rank is gone, and ends
        return member.is_usable
