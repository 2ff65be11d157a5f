"""One worker or coordinator, through all its starts and ends.

Owns: the order place, start, wait, back-off; what is told of it. A group that has lost an actor or a node is given back
whole and placed anew, and so is one whose process was told to end: its node leaves (`leaving`). One whose process has
ended otherwise starts again where it is.
Must not know: Ray, the other replicas.
"""

from __future__ import annotations

import asyncio
import collections
import enum
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from specpipe.cluster.backend import Backend, Group, GroupLostError
from specpipe.cluster.config import RestartsConfig
from specpipe.cluster.health import Health
from specpipe.cluster.keeper import Ended, Started, one_line
from specpipe.cluster.plan import GroupPlan
from specpipe.errors import SpecpipeError, WorkerUnavailableError
from specpipe.launcher.plan import COORDINATOR
from specpipe.launcher.restarts import RestartDelays

MAX_ENDS_KEPT: Final = 5
RELEASE_PATIENCE_S: Final = 10.0  # for what a group is asked at its end, beyond the grace
LINES_TIMEOUT_S: Final = 10.0  # for an actor to say what was logged last

logger = logging.getLogger(__name__)


class ReplicaState(enum.Enum):
    PLACING = "waits to be placed"
    STARTING = "starting"
    READY = "ready"
    WAITING = "waits to start again"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why and when it stopped serving, or did not begin to."""

    at: float  # seconds since 1970
    reason: str
    lines: tuple[str, ...]  # the last that it logged


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    name: str
    role: str
    state: ReplicaState
    node: str  # host; empty: not placed
    process: Started | None  # None: it does not run
    health: Health  # of the process
    num_restarts: int
    ends: tuple[End, ...]  # the latest last

    @property
    def is_serving(self) -> bool:
        return self.state is ReplicaState.READY and self.health is Health.SERVING


class Replica:
    """Runs for ever in `run`. `first` is done when it has served once, or with the error of the first try."""

    def __init__(
        self,
        name: str,
        plan: GroupPlan,
        backend: Backend,
        restarts: RestartsConfig,
        *,
        prepare: Callable[[Group], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        """`prepare` is awaited before each start; `on_change` is called when it begins or ceases to serve."""
        self.name = name
        self.role = plan.role
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.state = ReplicaState.PLACING
        self.group: Group | None = None
        self.process: Started | None = None
        self.health = Health.SERVING
        self._plan = plan
        self._backend = backend
        self._delays = RestartDelays(
            first_s=restarts.first_delay_s, max_s=restarts.max_delay_s, stable_after_s=restarts.stable_after_s
        )
        self._prepare = prepare
        self._on_change = on_change
        self._ends: collections.deque[End] = collections.deque(maxlen=MAX_ENDS_KEPT)
        self._num_restarts = 0
        self._port: int | None = None  # kept over restarts by what clients know by its address

    @property
    def status(self) -> ReplicaStatus:
        return ReplicaStatus(
            name=self.name,
            role=self.role,
            state=self.state,
            node=self.group.node if self.group else "",
            process=self.process,
            health=self.health,
            num_restarts=self._num_restarts,
            ends=tuple(self._ends),
        )

    async def run(self) -> None:
        """Serve, and serve again after every end. Returns never."""
        while True:
            lived_s = await self._live()
            delay_s = self._delays.after(lived_s)
            logger.warning("%s: %s; it starts again in %.0f s", self.name, self._ends[-1].reason, delay_s)
            self.state = ReplicaState.WAITING
            await asyncio.sleep(delay_s)
            self._num_restarts += 1

    async def leave(self, grace_s: float) -> None:
        """End the process in order and give everything back. `run` has been cancelled before."""
        self.state = ReplicaState.LEAVING
        self.process = None
        self.fail_first(WorkerUnavailableError(f"{self.name} was told to end before it served"))
        self._on_change()
        try:
            if self.group is not None:
                async with asyncio.timeout(grace_s + RELEASE_PATIENCE_S):
                    await self.group.stop(grace_s)
        except (SpecpipeError, TimeoutError) as error:
            logger.warning("%s did not end in order: %s", self.name, one_line(error))
        finally:
            self.group = None
            await self._backend.release(self.name)

    def fail_first(self, error: Exception) -> None:
        """Its first try has ended so, unless it has ended before."""
        if not self.first.done():
            self.first.set_exception(error)
            self.first.exception()  # it is heard of by whoever waits, and else by the log

    async def lines(self) -> tuple[str, ...]:
        """The last that it has logged; what it said before it ended, if it does not run."""
        if self.group is not None and self.process is not None:
            try:
                async with asyncio.timeout(LINES_TIMEOUT_S):
                    return await self.group.lines()
            except SpecpipeError as error:
                return (one_line(error),)
            except TimeoutError:
                return (f"its actor has not answered in {LINES_TIMEOUT_S:.0f} s",)
        return self._ends[-1].lines if self._ends else ()

    async def _live(self) -> float:
        """From one start to its end, whatever that is. Returns for how many seconds it has served."""
        started = None
        try:
            group = await self._place()
            self.state = ReplicaState.STARTING
            await self._prepare(group)
            self.process = await group.start(self._port)
            started = time.monotonic()
            self._note_ready()
            ended = await self._end_of(group)
        except SpecpipeError as error:
            ended = await self._note_failure(error)
        self.process = None
        self._ends.append(End(at=time.time(), reason=ended.reason, lines=ended.lines))
        self._on_change()
        if ended.is_in_order:
            await self._give_back()
        return time.monotonic() - started if started is not None else 0.0

    async def _end_of(self, group: Group) -> Ended:
        """Its process's, whose health is followed until then."""
        following = asyncio.create_task(self._follow_health(group), name=f"{self.name}: health")
        try:
            return await group.wait()
        finally:
            following.cancel()

    async def _follow_health(self, group: Group) -> None:
        self.health = Health.SERVING
        try:
            while True:
                self.health = await group.health(self.health)
                logger.info("%s %s", self.name, self.health.value)
        except SpecpipeError as error:  # whoever waits for its end hears of it too
            logger.debug("%s: its health is not known: %s", self.name, one_line(error))
        except Exception:  # a fault of ours or of the engine, which nobody else would hear of
            logger.exception("%s: its health cannot be followed any more", self.name)

    async def _place(self) -> Group:
        if self.group is None:
            self.state = ReplicaState.PLACING
            self.group = await self._backend.place(self.name, self._plan)
        return self.group

    def _note_ready(self) -> None:
        assert self.process is not None
        self.state = ReplicaState.READY
        if self.role == COORDINATOR:
            self._port = int(self.process.address.rpartition(":")[2])
        if not self.first.done():
            self.first.set_result(None)
        logger.info("%s serves at %s", self.name, self.process.address)
        self._on_change()

    async def _note_failure(self, error: SpecpipeError) -> Ended:
        """A group that has lost a part restarts as one, in a place of its own choice."""
        self.fail_first(error)
        if self.group is None or isinstance(error, GroupLostError):
            await self._give_back()
        return Ended(reason=one_line(error))

    async def _give_back(self) -> None:
        """The next start is in another place, or in the same one if there is no better."""
        self.group = None
        await self._backend.release(self.name)
