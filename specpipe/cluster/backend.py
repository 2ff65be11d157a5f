"""What a cluster engine does for us: it places groups of bundles and starts a group's process there.

Owns: the two protocols. Must not know: an engine. `on_ray` is the one of a real cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from specpipe.cluster.health import Health
from specpipe.cluster.keeper import Ended, Started
from specpipe.cluster.plan import GroupPlan
from specpipe.errors import WorkerUnavailableError


class GroupLostError(WorkerUnavailableError):
    """An actor or a node of a group is gone: what is left of the group is of no use."""


class Group(Protocol):
    """A group that has been placed. Every call raises GroupLostError once a part of the group is lost."""

    @property
    def node(self) -> str:
        """Host at which the first bundle's node is reached."""
        ...

    async def start(self, port: int | None) -> Started:
        """Start the group's process unless it runs, and wait until it serves. Raises as `ChildProcess.start`.

        `port` replaces the one that it would take.
        """
        ...

    async def wait(self) -> Ended:
        """Returns when the process has ended, by us if it hung. A group that has lost anything else raises at once."""
        ...

    async def health(self, known: Health) -> Health:
        """Of the process, as soon as it is not `known`."""
        ...

    async def stop(self, grace_s: float) -> None:
        """End the process in order."""
        ...

    async def list_workers(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """See `Keeper.list_workers`."""
        ...

    async def lines(self) -> tuple[str, ...]:
        """The last that the process has logged."""
        ...


class Backend(Protocol):
    async def place(self, name: str, plan: GroupPlan) -> Group:
        """Returns once all bundles are had, however long that takes; the group of that name if there is one already.

        Raises GroupLostError.
        """
        ...

    async def release(self, name: str) -> None:
        """Give back whatever there is of the group, placed or not; what runs there is killed."""
        ...

    async def names(self) -> list[str]:
        """Of the groups that there are: those of a service whose controller was lost among them."""
        ...
