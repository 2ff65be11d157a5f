"""What the next target step does for whom: rows, prefill chunks, the nodes worth verifying and their slots.

Owns: the order in which a step is put together. Must not know: clocks, messages, waits, what a step computes. How many
nodes and how large a chunk is `target_worker.scheduler`'s to say.
"""

from __future__ import annotations

from specpipe.config import TargetWorkerConfig
from specpipe.step_costs import StepCosts
from target_worker.room import Room
from target_worker.scheduler import MIN_CHUNK, chunk_sizes, select_nodes
from target_worker.session import Phase, Session
from target_worker.step import SessionStep, total_load


class Planner:
    def __init__(self, config: TargetWorkerConfig, costs: StepCosts, room: Room) -> None:
        self._config = config
        self._costs = costs
        self._room = room

    def plan(self, ready: list[Session]) -> list[SessionStep]:
        """What the next step does for whom; every node named holds a slot."""
        max_rows = self._config.engine.max_batch_tokens
        prefilling = [session for session in ready if session.num_pending > 1]
        decode_rows = max_rows - min(MIN_CHUNK, max_rows // 2) if prefilling else max_rows
        steps = self._plan_decoding([session for session in ready if session.num_pending == 1], decode_rows)
        prefilling = [session for session in prefilling if session.phase is Phase.RUNNING]
        self._choose_nodes(steps, steps, decode_rows)
        load = total_load(steps)
        sizes = chunk_sizes(
            [(session.num_pending, session.num_computed) for session in prefilling],
            load,
            self._costs,
            max_rows=max_rows - load.rows,
            max_slowdown=self._config.max_prefill_slowdown,
        )
        chunks = [SessionStep(session, size) for session, size in zip(prefilling, sizes, strict=True) if size > 0]
        self._choose_nodes([chunk for chunk in chunks if chunk.decodes], [*steps, *chunks], max_rows)
        return steps + chunks

    def _plan_decoding(self, sessions: list[Session], max_rows: int) -> list[SessionStep]:
        """One decode row each, those that ran longest ago first where there are more sessions than rows."""
        chosen = sorted(sessions, key=lambda session: (session.last_step, session.serial))[: max(1, max_rows)]
        for session in sorted(chosen, key=lambda session: session.serial):
            if session.phase is Phase.RUNNING:
                self._room.grow(session)
        return [SessionStep(session, 1) for session in chosen if session.phase is Phase.RUNNING]

    def _choose_nodes(self, steps: list[SessionStep], all_steps: list[SessionStep], max_rows: int) -> None:
        """Add the nodes worth verifying to `steps`, beside all that is planned, and lend them slots."""
        if not steps:
            return
        for step in steps:
            step.session.draft_ngram()
        load = total_load(all_steps)
        chosen = select_nodes(
            [step.candidate() for step in steps],
            load,
            self._costs,
            max_nodes=max(0, min(max_rows - load.rows, self._room.num_free)),
            max_slowdown=self._config.max_shared_slowdown if len(all_steps) > 1 else None,
        )
        for step, nodes in zip(steps, chosen, strict=True):
            self._room.lend(nodes)
            step.nodes = nodes
