"""What a target worker holds at one moment, for metrics.

Owns: how its sessions and slots are counted. Must not know: messages, steps. Called on any thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from specpipe.engine.slots import SlotPool
from specpipe.telemetry.observer import WorkerLoad
from target_worker.session import Phase, Session


def load_of(sessions: Sequence[Session], paused_links: Collection[int], pool: SlotPool) -> WorkerLoad:
    states = Counter(_state(session, paused_links) for session in sessions)
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


def _state(session: Session, paused_links: Collection[int]) -> str:
    if session.phase is Phase.FINISHED:
        return "finished"
    if session.link in paused_links:
        return "paused"
    return "queued" if session.phase is Phase.QUEUED else "running"
