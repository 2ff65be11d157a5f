"""How patient the coordinator is.

Owns: those numbers. Must not know: what happens when patience ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.events import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """In seconds.

    A worker's heartbeats come each second and from its event loop, so a long step does not silence it. A client whose
    target worker freezes, with no other to go on with, hears of it within max_target_wait_s of the worker's last sign
    of life, and that must be less than 10.
    """

    tick_s: float = 0.05  # how often machines hear that time has passed
    max_pause_s: float = (
        0.5  # a tick may be so late on a busy machine; what is beyond, the coordinator itself was stopped
    )
    suspect_after_s: float = 3.0  # a worker that says nothing this long gets no new sessions, and is not drafted on
    suspect_draft_step_s: float = 5.0  # the same for a draft worker whose step runs this long
    max_draft_silence_s: float = 5.0  # a draft worker that says nothing this long is taken for lost
    max_target_silence_s: float = 5.0  # the same for a target worker
    max_draft_step_s: float = 15.0  # a draft worker whose step runs this long is taken for lost
    max_target_step_s: float = 60.0  # the same for a target worker
    max_target_wait_s: float = 8.5  # a request that no target worker works on for this long fails
    level_every_s: float = 0.25  # how often a draft session may move to another worker for balance
    max_reader_stall_s: float = 60.0  # a client that takes nothing this long is cancelled
    resolve_every_s: float = 5.0  # how often it is asked what a name stands for
    max_first_try_s: float = 15.0  # how long `wait_ready` waits for the first attempt to reach each worker

    def max_step_s(self, kind: Kind) -> float:
        return self.max_target_step_s if kind is Kind.TARGET else self.max_draft_step_s

    def max_silence_s(self, kind: Kind) -> float:
        return self.max_target_silence_s if kind is Kind.TARGET else self.max_draft_silence_s

    def suspect_step_s(self, kind: Kind) -> float:
        """A target worker is believed until its step is given up: to move its sessions costs answers a pause."""
        return self.max_target_step_s if kind is Kind.TARGET else self.suspect_draft_step_s
