"""Faults carried out on a fleet, and undone when their time is over.

Owns: which signal goes to which process, what is undone when, that not everything is out at once, what suffered when.
Must not know: what becomes of the requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import psutil
from faults import HARMLESS, OF_PROCESSES, Fault, Kind
from fleet import RANK, Fleet
from members import Member
from reach import Span
from running import READY_TIMEOUT_S
from waiting import wait_until

MAX_OUT = 2  # processes that do not work, or links that suffer, before the next fault waits

SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.TERM: signal.SIGTERM, Kind.FREEZE: signal.SIGSTOP}


class Striker:
    """`async with Striker(fleet) as striker`: after the block every fault has been undone."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._suffering: dict[str, asyncio.Task[None]] = {}  # by victim: what undoes its fault
        self._suffered: defaultdict[str, list[Span]] = defaultdict(list)
        self._num_blows = Counter({name: member.num_starts for name, member in fleet.members.items()})

    async def __aenter__(self) -> Striker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*self._suffering.values(), return_exceptions=True)

    def suffering(self) -> Mapping[str, object]:
        """Victims whose faults last."""
        return self._suffering

    def suffered(self) -> Mapping[str, Sequence[Span]]:
        """From when to when a link, or a member beyond what it has noted itself, was out of reach. After the block."""
        return self._suffered

    def unprompted(self) -> list[str]:
        """Members, in sentences, that were started more often than faults can explain: they ended by themselves."""
        starts = {name: member.num_starts for name, member in self._fleet.members.items()}
        return [
            f"{name} ended by itself: {count} starts, where faults explain {self._num_blows[name]} at most"
            for name, count in starts.items()
            if count > self._num_blows[name]
        ]

    async def wait_for_turn(self, fault: Fault) -> None:
        """Until its victim is well, and few others are not."""
        await wait_until(lambda: self._may_strike(fault), timeout_s=4 * READY_TIMEOUT_S)

    async def strike(self, fault: Fault) -> None:
        begun_s = time.monotonic()
        if fault.kind in OF_PROCESSES:
            self._num_blows[self._owner(fault).name] += 1
            self._signal(fault)
        else:
            await self._fleet.network.begin(fault.kind, fault.victim, fault.ways)
        if fault.lasts_s:
            self._suffering[fault.victim] = asyncio.create_task(self._undo_later(fault, begun_s))
        else:
            self._note(fault, begun_s)

    def _may_strike(self, fault: Fault) -> bool:
        out = [name for name, member in self._fleet.members.items() if not member.is_usable]
        suffering = set(self._suffering) | set(out)
        is_well = fault.victim not in suffering and self._owner(fault).is_usable
        return is_well and len(suffering) < MAX_OUT and (fault.victim != RANK or self._rank() is not None)

    def _owner(self, fault: Fault) -> Member:
        """The member that suffers; of a link, the one that listens."""
        name = "target-group" if fault.victim == RANK else fault.victim.rpartition(">")[2]
        return self._fleet.members[name]

    def _rank(self) -> int | None:
        return self._fleet.members["target-group"].rank_pid()

    def _signal(self, fault: Fault) -> None:
        number = SIGNALS[fault.kind]
        if fault.victim == RANK:
            pid = self._rank()
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            return
        member = self._owner(fault)
        if fault.kind is Kind.FREEZE:
            member.note(is_frozen=True)
        else:
            member.note(is_ready=False)
        member.signal(number)

    def _note(self, fault: Fault, begun_s: float) -> None:
        """It is over. What befalls a rank befalls its group; what leaves a member slowly does so on all its links."""
        is_members = fault.kind in OF_PROCESSES or fault.kind is Kind.RATE
        name = self._owner(fault).name if is_members else fault.victim
        if fault.kind not in HARMLESS:
            self._suffered[name].append((begun_s, time.monotonic()))

    async def _undo_later(self, fault: Fault, begun_s: float) -> None:
        rank = self._rank() if fault.victim == RANK else None
        frozen = psutil.Process(rank) if rank is not None else None  # it will not resume another with the same pid
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            if fault.kind is not Kind.FREEZE:
                await self._fleet.network.end(fault.victim)
            elif fault.victim != RANK:
                self._thaw(self._owner(fault))
            elif frozen is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    frozen.resume()
            self._suffering.pop(fault.victim, None)
            self._note(fault, begun_s)

    def _thaw(self, member: Member) -> None:
        member.signal(signal.SIGCONT)
        if member.is_frozen:
            member.note(is_frozen=False)
