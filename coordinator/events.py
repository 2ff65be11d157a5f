"""What a request's state machine hears and what it says.

Owns: events, instructions, and how an event is told in an error report. Must not know: what they lead to.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from specpipe.answers import AnswerEvent
from specpipe.errors import SpecpipeError
from specpipe.types import Closed, Commit, Extension, Failed, SessionMessage


class Kind(enum.Enum):
    """Of workers."""

    DRAFT = "draft"
    TARGET = "target"


class Cause(enum.Enum):
    """Why drafting moves from one worker to another although the first is still connected."""

    DRAINS = "drains"
    LEAVES = "leaves"
    SILENT = "silent"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Placement:
    """One session on one worker."""

    worker: int
    session: int


# Events


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request's turn has come."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Answers Seek: this worker takes it, under a session id that was never used."""

    kind: Kind
    worker: int
    session: int


@dataclass(frozen=True, slots=True)
class Unplaced:
    """Answers Seek: no worker of this kind can take it now. The machine asks again at a later Tick."""

    kind: Kind
    is_full: bool = False  # there are workers, and nothing is wrong with them but that others' sessions fill them


@dataclass(frozen=True, slots=True)
class Joined:
    """A draft worker was connected: whatever others have refused, this one may be asked."""


@dataclass(frozen=True, slots=True)
class Moving:
    """This draft worker is to take over, under a session id that was never used. Only where `may_move_draft`."""

    worker: int
    session: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a worker, about a session of this request now or once."""

    kind: Kind
    message: SessionMessage


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream to a worker ended, and with it the session there."""

    kind: Kind
    session: int
    reason: str
    stalled_ms: float = 0.0  # how long the worker had got nothing done by then
    was_draining: bool = False  # the worker had said that it would end


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""

    unready_ms: float | None = None  # for how long no target worker has been one that gets requests; None: there is one


@dataclass(frozen=True, slots=True)
class Ended:
    """The request is to end with this error: the client left, the service stops."""

    error: SpecpipeError


Event = Admitted | Placed | Unplaced | Joined | Moving | Received | Lost | Tick | Ended


# Instructions


@dataclass(frozen=True, slots=True)
class Seek:
    """Find a worker. Answered by Placed or Unplaced."""

    kind: Kind


@dataclass(frozen=True, slots=True)
class Send:
    worker: int
    message: SessionMessage


@dataclass(frozen=True, slots=True)
class Emit:
    """Something for the client. Finished is the last. A chunk comes with the commit, as far as it is delivered."""

    event: AnswerEvent
    commit: Commit | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Fail:
    """The last word to the client instead of Finished."""

    error: SpecpipeError


Instruction = Seek | Send | Emit | Fail


def told(event: Event) -> str:
    """An event in a few words."""
    if not isinstance(event, Received):
        return str(event)
    message = event.message
    match message:
        case Commit():
            ends = "" if message.finish_reason is None else f" {message.finish_reason.value}"
            what = f"commit {message.base}+{len(message.tokens)}{ends}"
        case Extension():
            what = f"extension at {message.base} of draft step {message.draft_step}"
        case _:
            what = str(message)
    return f"{event.kind.value}: {what}"


def cause_told(cause: Cause) -> str:
    """Why drafting moves, as a sentence about the worker that it leaves."""
    return {
        Cause.DRAINS: "it ends when its sessions have",
        Cause.LEAVES: "its name does not stand for it any more",
        Cause.SILENT: "it says nothing, or hangs in a step",
        Cause.LOAD: "it has much more to do than another one",
    }[cause]


def draft_has_moved(event: Event) -> bool:
    """Whether a draft session that this event replaced by another one was left, and not lost."""
    return isinstance(event, Moving) or (isinstance(event, Received) and isinstance(event.message, Extension))


def loss_told(event: Event, moving: Moving | None = None) -> str:
    """Why the session that the event ended is gone. `moving`: how drafting last began to move."""
    if moving is not None and draft_has_moved(event):
        return cause_told(moving.cause)
    match event:
        case Lost(reason=reason):
            return reason
        case Received(message=Failed(message=message)):
            return message
        case Received(message=Closed()):
            return "it closed the session"
        case _:
            return "it was refused"
