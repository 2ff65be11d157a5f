"""The states of a request and the ways between them. See `coordinator.state` for what they mean."""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    QUEUED = "queued"
    OPENING = "opening"
    STREAMING = "streaming"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in (Phase.FINISHED, Phase.FAILED, Phase.CANCELLED)


TRANSITIONS = frozenset(
    {
        (Phase.QUEUED, Phase.OPENING),
        (Phase.QUEUED, Phase.FAILED),
        (Phase.QUEUED, Phase.CANCELLED),
        (Phase.OPENING, Phase.STREAMING),
        (Phase.OPENING, Phase.FINISHED),
        (Phase.OPENING, Phase.FAILED),
        (Phase.OPENING, Phase.CANCELLED),
        (Phase.STREAMING, Phase.OPENING),
        (Phase.STREAMING, Phase.FINISHED),
        (Phase.STREAMING, Phase.FAILED),
        (Phase.STREAMING, Phase.CANCELLED),
    }
)
