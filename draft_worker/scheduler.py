"""Which rows the next draft step computes, over all sessions of the worker.

Owns: the order of work and the layout of a step. Pure: no clock, no I/O; slots are given to it.
Must not know: torch, gRPC, how a tree is kept.

Committed tokens come before leaves, because nothing can be drafted below a token that is not computed. Sessions a few
tokens behind (the usual case after a miss) catch up first; long prefills go in chunks, first come, first served, and
short ones while anybody drafts. Leaves are taken best-first by reach over all sessions: the same rule gives long chains
where the draft is sure and wide fans where it is not. As many are taken as give the most reach a millisecond: on a
device where 12 rows cost what one costs, all that are worth a node; where each costs, the few that matter, because a
tree grows one level a step and steps must be short.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draft_worker.session import DraftSession
from specpipe.engine.interface import SessionRows
from specpipe.step_costs import StepCosts
from specpipe.telemetry.observer import IdleCause
from specpipe.tree import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """How large a step is. The defaults are measured by benchmarks/draft_growth.py."""

    max_rows: int = 256  # rows of one step
    num_leaves: int = 24  # leaves expanded in one step, at most
    num_leaves_per_session: int = 2  # at least this many for each drafting session
    catch_up_rows: int = 16  # a session at most this far behind does not queue for prefill
    shared_prefill_rows: int = 64  # prefill rows of a step in which somebody drafts
    reserved_slots_per_session: int = 4  # kept from trees for tokens that will be committed


@dataclass(slots=True)
class SessionWork:
    """One session's part in a step."""

    session: DraftSession
    num_committed: int = 0  # committed tokens to compute, from the first that is not
    reaches_root: bool = False  # the last committed token is among them: its row ranks the children of the root
    nodes: list[Node] = field(default_factory=list)  # to expand

    @property
    def num_rows(self) -> int:
        return self.num_committed + len(self.nodes)


def plan_step(
    sessions: Iterable[DraftSession], rules: StepRules, *, num_free_slots: int, costs: StepCosts | None = None
) -> list[SessionWork]:
    """Work for one step; every row needs one free slot. Empty: nothing to do, or no slots to do it with.

    Without `costs`, rows cost nothing.
    """
    active = [session for session in sessions if session.is_active]
    plan = _Plan(room=min(rules.max_rows, num_free_slots))
    behind = sorted((s for s in active if s.num_pending), key=lambda s: s.key)
    short = [s for s in behind if s.num_pending <= rules.catch_up_rows]
    for session in short:
        plan.compute(session, plan.room)
    num_reserved = sum(s.num_pending for s in behind)
    leaf_slots = num_free_slots - num_reserved - rules.reserved_slots_per_session * len(active)
    growing = [session for session in active if plan.reaches_root(session)]
    leaves = _best_leaves(growing, min(_num_leaves(active, rules), plan.room, leaf_slots))
    for session, node in leaves[: _best_length(leaves, plan, costs)] if costs else leaves:
        plan.expand(session, node)
    prefill_room = min(plan.room, rules.shared_prefill_rows) if plan.works else plan.room
    for session in behind:
        if session.num_pending > rules.catch_up_rows:
            prefill_room -= plan.compute(session, prefill_room)
    return list(plan.works.values())


def is_starved(sessions: Iterable[DraftSession], *, num_free_slots: int) -> bool:
    """Whether committed tokens wait for slots that nobody will give back by himself."""
    return num_free_slots == 0 and any(session.is_active and session.num_pending for session in sessions)


def newest_holder(sessions: Iterable[DraftSession]) -> DraftSession | None:
    """The session that gives up its slots when they run out: so the oldest always goes on."""
    holders = [session for session in sessions if session.slots]
    return max(holders, key=lambda session: session.key, default=None)


def idle_cause(sessions: Iterable[DraftSession]) -> IdleCause:
    """Why there is no step to run."""
    wanted = [session for session in sessions if session.can_draft or session.is_parked]
    if not wanted:
        return "no sessions"
    if all(session.is_paused for session in wanted):
        return "paused"
    return "slots" if any(session.is_parked or session.num_pending for session in wanted) else "exhausted"


def layout_rows(work: SessionWork, new_slots: Sequence[int]) -> SessionRows:
    """Rows of one session: committed tokens with `new_slots`, then its nodes, whose slots are set."""
    session = work.session
    num_computed = len(session.slots)
    committed = session.tokens[num_computed : num_computed + work.num_committed]
    tree = _TreeLayout(session.base)
    tree_rows = [tree.index_of(node) for node in work.nodes]
    wants = [False] * work.num_committed + [True] * len(work.nodes)
    if work.reaches_root:
        wants[work.num_committed - 1] = True
    return SessionRows(
        session=session.key,
        context_slots=[*session.slots, *new_slots],
        num_computed=num_computed,
        tokens=[*committed, *(node.token for node in work.nodes)],
        num_committed_rows=work.num_committed,
        tree_slots=tree.slots,
        tree_rows=tree_rows,
        tree_positions=tree.positions,
        tree_visible=[tree.visible[index] for index in tree_rows],
        wants_logits=wants,
    )


class _Plan:
    """Work so far and the rows that are left."""

    def __init__(self, room: int) -> None:
        self.works: dict[int, SessionWork] = {}
        self.room = room

    def compute(self, session: DraftSession, limit: int) -> int:
        """Add up to `limit` committed rows; returns how many."""
        count = min(session.num_pending, limit)
        if count > 0:
            work = self._work_of(session)
            work.num_committed = count
            work.reaches_root = count == session.num_pending
            self.room -= count
        return max(count, 0)

    def reaches_root(self, session: DraftSession) -> bool:
        """Whether all its committed tokens are computed when this step ends."""
        work = self.works.get(session.key)
        return not session.num_pending or (work is not None and work.reaches_root)

    def expand(self, session: DraftSession, node: Node) -> None:
        self._work_of(session).nodes.append(node)
        self.room -= 1

    def _work_of(self, session: DraftSession) -> SessionWork:
        return self.works.setdefault(session.key, SessionWork(session))


class _TreeLayout:
    """The nodes that a session's tree rows see: rows themselves and their ancestors, each once."""

    def __init__(self, base: int) -> None:
        self.slots: list[int] = []
        self.positions: list[int] = []
        self.visible: list[int] = []  # per node: bits of its ancestors and itself
        self._base = base
        self._indices: dict[Node, int] = {}

    def index_of(self, node: Node) -> int:
        if (known := self._indices.get(node)) is not None:
            return known
        seen = 0
        if node.parent is not None and node.parent.depth > 0:
            seen = self.visible[self.index_of(node.parent)]
        assert node.slot is not None, "a row without a slot"
        index = len(self.slots)
        self._indices[node] = index
        self.slots.append(node.slot)
        self.positions.append(self._base + node.depth - 1)
        self.visible.append(seen | 1 << index)
        return index


def _num_leaves(active: Sequence[DraftSession], rules: StepRules) -> int:
    num_drafting = sum(1 for session in active if not session.num_pending)
    return max(rules.num_leaves, rules.num_leaves_per_session * num_drafting)


def _best_leaves(active: Iterable[DraftSession], limit: int) -> list[tuple[DraftSession, Node]]:
    """Leaves of highest reach over all sessions, each session within what its tree can take."""
    if limit <= 0:
        return []
    candidates = [
        (session, node)
        for session in active
        for node in heapq.nlargest(min(limit, session.max_expansions), session.leaves(), key=_order)
    ]
    return heapq.nlargest(limit, candidates, key=lambda candidate: _order(candidate[1]))


def _best_length(leaves: Sequence[tuple[DraftSession, Node]], plan: _Plan, costs: StepCosts) -> int:
    """How many of the best leaves give the most reach a millisecond, with what the plan holds. A root counts 1."""
    rows = sum(work.num_committed for work in plan.works.values())
    gain = float(sum(work.reaches_root for work in plan.works.values()))
    best, best_rate = 0, gain / max(costs.estimate(rows), 1e-9) if rows else 0.0
    for count, (_, node) in enumerate(leaves, start=1):
        gain += node.reach
        if (rate := gain / max(costs.estimate(rows + count), 1e-9)) > best_rate:
            best, best_rate = count, rate
    return best


def _order(node: Node) -> tuple[float, int]:
    """Best last; a node never comes after what hangs below it."""
    return node.reach, -node.depth
