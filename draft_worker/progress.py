"""What a draft worker's heartbeat tells.

Owns: `Progress`, which is replaced whole, so that another thread reads one moment. Must not know: clocks, sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

from specpipe.types import Heartbeat


@dataclass(frozen=True, slots=True)
class Progress:
    step: int = 0
    busy_since_s: float | None = None  # beginning of what `run_once` is at; None: it is not running
    num_sessions: int = 0
    num_free_slots: int = 0

    def heartbeat(self, now_s: float) -> Heartbeat:
        running_ms = 0.0 if self.busy_since_s is None else (now_s - self.busy_since_s) * 1e3
        return Heartbeat(
            step=self.step,
            step_running_ms=max(running_ms, 0.0),
            num_sessions=self.num_sessions,
            num_free_slots=self.num_free_slots,
        )
