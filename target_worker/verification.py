"""Walking a verified tree: which tokens a step commits, and where the answer ends.

Owns: the walk (docs/decisions/0002) and the token rules that end an answer, as pure functions. Must not know: slots,
messages, clocks. The target's choice comes in as a function, so that noise and logits stay elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from specpipe.tree import Node
from specpipe.types import FinishReason, Origin, StopRules


@dataclass(slots=True)
class Walk:
    """What one round decided."""

    tokens: list[int] = field(default_factory=list)  # to commit, in order; at least one
    origins: list[Origin] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)  # committed nodes, in order: their K and V are right as they stand
    walked: list[tuple[Node, int]] = field(default_factory=list)  # each node walked (root first), and the choice at it
    finish_reason: FinishReason | None = None


def walk(
    root: Node, rows: Container[Node], choose: Callable[[Node], int], *, base: int, stops: StopRules, has_rows: bool
) -> Walk:
    """Follow the target's own choices from `root` as long as they are verified nodes.

    `rows` holds the nodes that were rows of the step; `choose(node)` is the target's choice after that node and is
    called for walked nodes only. The walk ends at the first choice that was no row, or that ends the answer.
    """
    result = Walk()
    node: Node | None = root
    while node is not None:
        choice = choose(node)
        result.walked.append((node, choice))
        child = node.children.get(choice)
        following = child if child is not None and child in rows else None
        result.tokens.append(choice)
        result.origins.append(_origin(node, following, rows, has_rows=has_rows))
        if following is not None:
            result.path.append(following)
        result.finish_reason = finish_reason_of(choice, base + len(result.tokens), stops)
        node = following if result.finish_reason is None else None
    return result


def cut(tokens: Sequence[int], stops: StopRules, *, base: int = 0) -> tuple[tuple[int, ...], FinishReason | None]:
    """Keep the tokens that follow `base` committed ones up to the first that ends the answer, itself included."""
    for i, token in enumerate(tokens):
        if (reason := finish_reason_of(token, base + i + 1, stops)) is not None:
            return tuple(tokens[: i + 1]), reason
    return tuple(tokens), None


def finish_reason_of(token: int, length: int, stops: StopRules) -> FinishReason | None:
    """Whether a sequence that has `length` tokens now, `token` last, is finished. On one token stop beats length."""
    is_stop = token in stops.stop_token_ids or (not stops.ignore_eos and token in stops.eos_token_ids)
    if is_stop and length >= stops.min_length:
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= stops.max_length else None


def first_child(node: Node) -> Node | None:
    """The drafter's first guess after `node`."""
    return next(iter(node.children.values()), None)


def has_verified_child(node: Node, rows: Container[Node]) -> bool:
    return any(child in rows for child in node.children.values())


def _origin(node: Node, following: Node | None, rows: Container[Node], *, has_rows: bool) -> Origin:
    if following is not None:
        return Origin.ACCEPTED
    if not has_rows:
        return Origin.PLAIN
    return Origin.RECOVERED if has_verified_child(node, rows) else Origin.BONUS
