"""Which rows the next target step has: drafted nodes worth verifying, and how much prompt beside them.

Owns: that arithmetic; why the rejection rule chooses blindly is in docs/decisions/0007. Must not know: clocks, sockets,
slots, models. Everything comes in as values.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from specpipe.step_costs import StepCosts
from specpipe.tree import Node

MAX_STEP_MS = 500.0  # no step is longer for the sake of prompts: it bounds message gaps and cancellation
MIN_CHUNK = 8  # prompt tokens that a step takes at least while anyone waits
MIN_REACH = 1e-3  # a node less likely than this cannot pay for its row
MIN_BLIND_REACH = 0.03  # the same where the tree may not be looked at: it bounds the nodes of a depth to 33
MAX_BLIND_SLOWDOWN = 2.0  # a step of one session that chooses blindly takes at most this many times its plain time
BLIND_TOKENS = 2.0  # tokens that a round of such a session is taken to give


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A session that will have a decode row in the step."""

    root: Node
    length: int  # committed tokens, which every row of it attends to
    max_depth: int  # deepest node that may be verified (K, or what is left of the answer); 0: none
    is_fixed: bool = False  # sync: all nodes within max_depth are verified, whatever they cost
    is_blind: bool = False  # rejection rule: whether a node is verified may not depend on which token was drawn there


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Rows that are in the step anyhow, and what they attend to."""

    rows: int
    attended: int

    def plus(self, rows: int, attended: int) -> Load:
        return Load(rows=self.rows + rows, attended=self.attended + attended)


def select_nodes(
    candidates: Sequence[Candidate],
    load: Load,
    costs: StepCosts,
    *,
    max_nodes: int,
    max_slowdown: float | None = None,
) -> list[list[Node]]:
    """Choose the nodes to verify, per candidate, parents before children; `load` holds the decode rows already.

    All nodes are sorted by reach and the prefix with the most expected tokens per millisecond is taken, over all
    lengths: step time is a staircase, so the first fall is not the end. By the same estimate the step is never slower,
    per token, than one without drafts. With `max_slowdown` it takes at most that many times its plain time.
    """
    chosen: list[list[Node]] = [[] for _ in candidates]
    expected = float(len(candidates))
    for i, candidate in enumerate(candidates):
        if candidate.is_fixed:
            chosen[i] = _fixed_nodes(candidate, max_nodes)
            max_nodes -= len(chosen[i])
            expected += sum(node.reach for node in chosen[i])
            load = load.plus(len(chosen[i]), candidate.length * len(chosen[i]))
    blind = [i for i, candidate in enumerate(candidates) if candidate.is_blind and not candidate.is_fixed]
    if blind:
        limit, least_reach = _blind_bounds([candidates[i] for i in blind], load, costs, max_slowdown)
    for i in blind:
        chosen[i] = _blind_nodes(candidates[i], least_reach, min(limit, max_nodes))
        max_nodes -= len(chosen[i])
        expected += sum(node.reach for node in chosen[i])
        load = load.plus(len(chosen[i]), candidates[i].length * len(chosen[i]))
    order = _best_first(candidates, max_nodes)
    gains = [(node.reach, candidates[i].length + node.depth) for i, node in order]
    for i, node in order[: _best_length(gains, expected, load, costs, max_slowdown)]:
        chosen[i].append(node)
    return chosen


def chunk_sizes(
    pending: Sequence[tuple[int, int]],
    load: Load,
    costs: StepCosts,
    *,
    max_rows: int,
    max_slowdown: float,
) -> list[int]:
    """Prompt tokens to compute for each waiting session, first come first served.

    `pending` holds (tokens not yet computed, tokens computed) in order of arrival; `load` is the rest of the step.
    The step takes at most `max_slowdown` times that rest, half a second where there is none, and never more; but while
    anyone waits it takes at least a small chunk.
    """
    plain = costs.estimate(load.rows, load.attended)
    limit = min(MAX_STEP_MS, max_slowdown * plain) if load.rows else MAX_STEP_MS
    sizes = [0] * len(pending)
    for i, (num_pending, num_computed) in enumerate(pending):
        most = min(num_pending, max_rows - sum(sizes))
        size = _largest_chunk(most, num_computed, load, costs, limit)
        if i == 0:
            size = max(size, min(most, MIN_CHUNK))
        if size <= 0:
            break
        sizes[i] = size
        load = load.plus(size, _attended(num_computed, size))
    return sizes


def next_budget(costs: StepCosts, num_sessions: int, length: int, *, most: int = 64) -> int:
    """Nodes that one of `num_sessions` would verify in its next step if the drafter were sure of them.

    The number with the most rows per millisecond, within a step twice as long as a plain one.
    """
    plain = costs.estimate(num_sessions, num_sessions * length)
    best, best_rate = 4, 0.0
    for nodes in (4, 6, 8, 12, 16, 24, 32, 48, 64):
        rows = num_sessions * (1 + nodes)
        step = costs.estimate(rows, rows * length)
        if nodes > most or step > 2 * plain > 0:
            break
        if step <= 0 or rows / step > best_rate:
            best, best_rate = nodes, rows / step if step > 0 else 0.0
    return best


def _best_length(
    gains: Sequence[tuple[float, int]], expected: float, load: Load, costs: StepCosts, max_slowdown: float | None
) -> int:
    """How long a prefix of `gains` (reach, attended tokens) gives the most expected tokens per millisecond."""
    overhead = costs.gap_ms
    plain = costs.estimate(load.rows, load.attended)
    limit = plain * max_slowdown if max_slowdown is not None else float("inf")
    best, best_rate = 0, expected / max(plain + overhead, 1e-9)
    attended = load.attended
    for n, (reach, seen) in enumerate(gains, start=1):
        expected += reach
        attended += seen
        step = costs.estimate(load.rows + n, attended)
        if step > limit:
            break
        if (rate := expected / max(step + overhead, 1e-9)) > best_rate:
            best, best_rate = n, rate
    return best


def _best_first(candidates: Sequence[Candidate], limit: int) -> list[tuple[int, Node]]:
    """The `limit` nodes of highest reach over all candidates that may choose, parents first."""
    order: list[tuple[int, Node]] = []
    count = itertools.count()
    heap: list[tuple[float, int, int, Node]] = []

    def push_children(i: int, node: Node) -> None:
        if node.depth < candidates[i].max_depth:
            for child in node.children.values():
                if child.reach >= MIN_REACH:
                    heapq.heappush(heap, (-child.reach, next(count), i, child))

    for i, candidate in enumerate(candidates):
        if not (candidate.is_fixed or candidate.is_blind):
            push_children(i, candidate.root)
    while heap and len(order) < limit:
        _, _, i, node = heapq.heappop(heap)
        order.append((i, node))
        push_children(i, node)
    return order


def _fixed_nodes(candidate: Candidate, max_nodes: int) -> list[Node]:
    """Level by level: the chain that was waited for, and at most as many nodes again that came late."""
    nodes: list[Node] = []
    level = [candidate.root]
    while level:
        level = [child for node in level for child in node.children.values() if child.depth <= candidate.max_depth]
        nodes += level
    return nodes[: max(0, min(max_nodes, 2 * candidate.max_depth))]


def _blind_bounds(
    candidates: Sequence[Candidate], load: Load, costs: StepCosts, max_slowdown: float | None
) -> tuple[int, float]:
    """Nodes that each of these sessions may verify at most, and the least reach of one that pays for its row.

    Decided by costs and load alone, before any tree is looked at.
    """
    count, length = len(candidates), max(candidate.length for candidate in candidates)
    plain = costs.estimate(load.rows, load.attended)
    limit, step = 0, plain
    for nodes in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48):
        longer = costs.estimate(load.rows + count * nodes, load.attended + count * nodes * length)
        if longer > plain * (max_slowdown or MAX_BLIND_SLOWDOWN):
            break
        limit, step = nodes, longer
    row_ms = (step - plain) / max(1, count * limit)
    tokens_per_ms = BLIND_TOKENS * count / max(step + costs.gap_ms, 1e-9)
    return limit, max(MIN_BLIND_REACH, row_ms * tokens_per_ms)


def _blind_nodes(candidate: Candidate, least_reach: float, limit: int) -> list[Node]:
    """Nodes of at least that reach: the chain of sampled children first, then the likeliest others.

    The reach of a node is made of its ancestors and of the distributions that these and it were drawn from, and a
    threshold does not ask what else there is. So whether a sampled child is verified does not depend on which token
    was drawn for it, nor on what grew below it, as it would if the prefix of most tokens per millisecond were taken.
    """
    chain: list[Node] = []
    node = candidate.root.sampled_child
    while node is not None and len(chain) < limit and _is_blindly_worth(node, candidate, least_reach):
        chain.append(node)
        node = node.sampled_child
    worth = []
    level = [candidate.root]
    while level:
        children = [child for node in level for child in node.children.values()]
        level = [child for child in children if _is_blindly_worth(child, candidate, least_reach)]
        worth += level
    in_chain = set(chain)
    others = sorted((node for node in worth if node not in in_chain), key=lambda node: (-node.reach, node.depth))
    return sorted(chain + others[: limit - len(chain)], key=lambda node: node.depth)


def _is_blindly_worth(node: Node, candidate: Candidate, least_reach: float) -> bool:
    return node.depth <= candidate.max_depth and node.reach >= least_reach


def _largest_chunk(most: int, num_computed: int, load: Load, costs: StepCosts, limit: float) -> int:
    """The largest chunk of at most `most` tokens with which the step stays within `limit` milliseconds."""
    low, high = 0, max(0, most)
    while low < high:
        size = (low + high + 1) // 2
        if costs.estimate(load.rows + size, load.attended + _attended(num_computed, size)) <= limit:
            low = size
        else:
            high = size - 1
    return low


def _attended(num_computed: int, size: int) -> int:
    return size * num_computed + size * (size + 1) // 2
