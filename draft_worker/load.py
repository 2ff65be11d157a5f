"""What a draft worker holds at one moment, for metrics.

Owns: how its sessions and slots are counted. Must not know: messages, steps. Called on any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from draft_worker.session import DraftSession
from specpipe.engine.slots import SlotPool
from specpipe.telemetry.observer import WorkerLoad


def load_of(sessions: Sequence[DraftSession], pool: SlotPool) -> WorkerLoad:
    states = Counter(map(_state, sessions))
    num_free, num_cached = pool.num_free, pool.num_cached
    return WorkerLoad(
        num_running=states["running"],
        num_queued=states["queued"],
        num_paused=states["paused"],
        num_finished=states["finished"],
        num_tree_nodes=sum(session.tree.num_nodes for session in sessions),
        num_used_slots=pool.num_held,
        num_cached_slots=num_cached,
        num_free_slots=max(0, num_free - num_cached),
        num_evicted_slots=pool.sharing.num_evicted_slots,
    )


def _state(session: DraftSession) -> str:
    if session.is_finished:
        return "finished"
    if session.is_paused:
        return "paused"
    return "queued" if session.is_parked else "running"
