"""One session on a draft worker: its committed tokens, their KV slots, and the tree that grows below them.

Owns: what a commit, an expansion or the end of drafting does to tokens, slots and tree. Pure: no clock, no I/O.
Must not know: torch, gRPC, other sessions, when a step runs.

An *expanded* node has a slot (its K and V are computed) and a fan: the ranked candidates its row gave.
The root is expanded exactly when every committed token is computed.

A *lookup* is a node that nobody has ranked yet: what followed the same few tokens earlier in the text. Lookups stand
below leaves and below a root that is still to be computed, so that one step computes a leaf and its likely
continuation together, as the target does with a draft. They are told to nobody until the model has ranked them, and
say nothing of the draft's merit: they only make the tree grow faster where text repeats itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from draft_worker.fans import Candidate, Fan, Fans
from draft_worker.growth import ChainTime, DraftStep, GrowthRules
from draft_worker.lookups import Lookups, is_lookup
from draft_worker.recording import DraftRecorder
from specpipe.calibration import Calibrator
from specpipe.config import DEFAULT_SYNC_K
from specpipe.errors import InvariantError
from specpipe.sampling.coupled import Chooser
from specpipe.sampling.rejection import CONTEXT, Proposer
from specpipe.tree import DraftTree, Node
from specpipe.types import Extension, Mode, Open, Origin, Rule

DRAFTER = "model"
SAMPLING_DRAFTER = (
    "model/sampled"  # under the rejection rule confidences mean something else: they are calibrated apart
)


class DraftSession:
    """State of one session; `key` orders sessions by arrival and names them to the model."""

    def __init__(
        self,
        opened: Open,
        *,
        key: int,
        link: int,
        vocab_size: int,
        max_context: int,
        rules: GrowthRules,
        calibrator: Calibrator,
    ) -> None:
        """Raises InvalidRequestError when the sampling parameters are refused."""
        self.id, self.label = opened.session, opened.label
        self.key = key
        self.link = link
        self.adapter = opened.adapter
        self.tokens = list(opened.tokens)
        self.slots: list[int] = []  # of computed committed tokens: positions 0 .. len(slots) - 1
        self.num_sound = 0  # of those, the first ones known to be free of NaN
        self.num_shared = 0  # of those, the first ones that another session had computed
        self.is_cold = True  # its root was never computed with these slots
        self.is_finished = False  # the target has ended the answer
        self.is_paused = False  # its coordinator is silent
        self.is_parked = False  # had to give its slots to older sessions
        self.next_budget = 0
        self.has_restarted = False  # the last commit left the tree, and there was one
        self.recorder: DraftRecorder | None = None  # if its coordinator wants reports
        self._rules = rules
        self._calibrator = calibrator
        self._vocab_size = vocab_size
        self._chooser = Chooser(opened.sampling, vocab_size)
        is_sampling = opened.speculation.rule is Rule.REJECTION
        self._proposer = Proposer(opened.sampling, vocab_size) if is_sampling else None
        self._drafter = SAMPLING_DRAFTER if is_sampling and opened.sampling.temperature > 0 else DRAFTER
        self._is_off = opened.speculation.mode is Mode.OFF or not self._knows(opened.tokens)
        self._chain_length = _chain_length(opened)
        self._chain_time = ChainTime()
        # A drafted node is of use if the target may verify it: its row must not be the answer's last token or beyond.
        # A node just beyond the draft's own context can be proposed, though not expanded.
        self._max_position = min(opened.stops.max_length - 2, max_context)
        self._fans = Fans(calibrator.estimate, self._drafter)
        self._unsent: dict[Node, int] = {}  # new nodes and the step that ranked them
        has_lookups = not (self.is_sync or is_sampling)
        self._lookups = Lookups(opened.tokens, rules.num_lookups) if has_lookups else None
        self._unreported_ms = 0.0  # this session's share of steps that no extension has told of
        self._answered_base = -1  # base whose last extension (is_exhausted) was sent
        self.tree = self._create_tree()

    # What it is

    @property
    def base(self) -> int:
        return len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Committed tokens that still have to be computed before the tree can grow."""
        return self.base - len(self.slots) if self.can_draft else 0

    @property
    def can_draft(self) -> bool:
        """Whether nodes below this base could be of use and can be computed."""
        return not self.stop_reason

    @property
    def stop_reason(self) -> str:
        """Why it cannot draft; empty while it can."""
        if self.is_finished:
            return "the answer is complete"
        if self._is_off:
            return "its tokens are outside the draft's vocabulary, or its mode is off"
        if self.is_parked:
            return "its slots went to older sessions"
        return "" if self.base <= self._max_position else "the end of the answer or of the draft's context is near"

    @property
    def is_active(self) -> bool:
        """Whether it takes part in steps."""
        return self.can_draft and not self.is_paused

    @property
    def is_sync(self) -> bool:
        return self._chain_length is not None

    def held_slots(self) -> list[int]:
        """Every slot this session holds, committed ones first."""
        return self.slots + [node.slot for node in self.tree.nodes() if node.slot is not None]

    # What there is to expand

    def leaves(self) -> Iterator[Node]:
        """Nodes worth expanding now, parents first. Each gets at least one child if it is expanded, after its parents,
        before the tree changes. While committed tokens are pending, these are lookups below the last of them."""
        if not self.is_active or self.max_expansions < 1:
            return
        end = self._chain_end()
        if self._chain_length is not None:
            if not self.num_pending and end.depth < self._chain_length and self._can_expand(end):
                yield end
        elif self.tree.num_nodes < self._wanted_nodes():
            for node in self.tree.nodes():
                is_worth_it = node.reach >= self._rules.min_reach or (node is end and end.depth < self._rules.min_chain)
                if is_worth_it and self._can_expand(node):
                    yield node

    @property
    def max_expansions(self) -> int:
        """Nodes that may be expanded in one step so that each can have a child."""
        return self._rules.max_nodes - self.tree.num_nodes

    # What happens to it

    def expand(self, results: Sequence[tuple[Node, npt.NDArray[np.float32]]], step: DraftStep) -> None:
        """Rank the candidates below nodes by their rows' logits [vocab] and add those worth it to the tree.

        Each node is the root or has a slot. Raises SpecpipeError when no candidate can be ranked.
        """
        count = 1 if self.is_sync else self._rules.fan
        for node, logits in results:
            fan = Fan(self._rank(node, logits, count), step.number)
            self._fans.put(node, fan)
            self._confirm_lookups(node, fan)
            self._add_next_of(node)
        self._widen()
        self._look_up()

    def spent(self, step: DraftStep) -> None:
        """Account a step that had rows of this session."""
        if self.is_sync:
            self._chain_time.add(step)
        else:
            self._unreported_ms += step.share_ms

    def commit(self, tokens: Sequence[int], origins: Sequence[Origin] = ()) -> list[int]:
        """Append final tokens (`origins`: one each, if known); returns the slots of nodes that are on no path now.

        Accepted nodes' slots become slots of committed tokens. Nodes below the last one live on when it was drafted.
        """
        self._observe(tokens, origins)
        has_drafted = any(not is_lookup(child) for child in self.tree.root.children.values())
        advance = self.tree.advance(tokens)
        self.has_restarted = has_drafted and not advance.follows
        self.tokens.extend(tokens)
        self.slots.extend(node.slot for node in advance.path if node.slot is not None)
        self._chain_time = ChainTime()
        self._is_off = self._is_off or not self._knows(tokens)
        self._keep_alive(advance.path)
        if self._lookups is not None:
            self._lookups.commit(tokens)
        self._widen()
        self._look_up()
        return [node.slot for node in advance.dropped if node.slot is not None]

    def reset(self) -> list[int]:
        """Forget all that was computed (tokens stay); returns every slot held."""
        slots = self.held_slots()
        self.slots = []
        self._fans.clear()
        self._unsent.clear()
        self.tree = self._create_tree()
        return slots

    def resend(self) -> None:
        """Everything below the base is to be sent again: the receiver may have lost messages."""
        self._unsent = {node: node.draft_step for node in self.tree.nodes() if not is_lookup(node)}
        self._answered_base = -1

    def take_extension(self, step: DraftStep) -> Extension | None:
        """What the target does not know yet, if it is time to say it; `step` is the last one with rows of this session.

        In sync mode that is the whole chain, once per base. A session that cannot draft says so once per base.
        """
        if not self.can_draft:
            return self._last_extension(step, []) if self._answered_base != self.base else None
        if self.is_sync:
            return self._take_chain(step)
        unsent, self._unsent = self._unsent, {}
        if not unsent:
            return None
        share_ms, self._unreported_ms = self._unreported_ms, 0.0
        return self.tree.extension_of(
            unsent,
            session=self.id,
            drafter=self._drafter,
            draft_step=max(unsent.values()),
            draft_step_ms=step.step_ms,
            draft_share_ms=share_ms,
        )

    def check(self) -> None:
        """Raise InvariantError unless tokens, slots, tree and fans agree."""
        self.tree.check()
        _require(self.tree.base == self.base, f"tree at {self.tree.base}, {self.base} committed tokens")
        _require(len(self.slots) <= self.base, f"{len(self.slots)} slots for {self.base} committed tokens")
        nodes = list(self.tree.nodes())
        is_computed = len(self.slots) == self.base
        _require(is_computed or all(map(is_lookup, nodes)), "a tree below a committed token that is not computed")
        _require(set(self._unsent) <= set(nodes), "an unsent node left the tree")
        for node in nodes:
            is_expanded = node.slot is not None
            _require(is_expanded == (node in self._fans), f"node at depth {node.depth}: slot and fan disagree")
            is_sound = is_expanded or all(map(is_lookup, node.children.values()))
            _require(is_sound, f"node at depth {node.depth} has ranked children but no slot")
            _require(not (is_lookup(node) and is_expanded), f"lookup at depth {node.depth} is expanded")
        _require(set(self._fans) <= {self.tree.root, *nodes}, "a fan of a node that left the tree")

    # Helpers

    def _create_tree(self) -> DraftTree:
        rules = self._rules
        return DraftTree(
            base=self.base,
            max_nodes=rules.max_nodes,
            max_depth=rules.max_depth,
            estimate=self._calibrator.estimate,
        )

    def _knows(self, tokens: Sequence[int]) -> bool:
        return all(token < self._vocab_size for token in tokens)

    def _wanted_nodes(self) -> int:
        rules = self._rules
        wanted = int(self.next_budget * rules.wanted_nodes_per_budget)
        return min(max(wanted, rules.min_wanted_nodes), rules.max_nodes)

    def _can_expand(self, node: Node) -> bool:
        """Whether `node` is not expanded and a child of it is within the tree, the answer and the draft's context."""
        is_within = node.depth < self._rules.max_depth and self.base + node.depth <= self._max_position
        return node.slot is None and is_within

    def _chain_end(self) -> Node:
        """The first node on the first-ranked path that is not expanded; the path's last node if all are."""
        node = self.tree.root
        while node.children and (node.slot is not None or node.depth == 0):
            node = next(iter(node.children.values()))
        return node

    def _rank(self, node: Node, logits: npt.NDArray[np.float32], count: int) -> Sequence[Candidate]:
        """Candidates below `node`, the first one sampled under the rejection rule."""
        position = self.base + node.depth
        if self._proposer is None:
            return self._chooser.rank(logits, position, count)
        text = [*self.tokens[-CONTEXT:], *(above.token for above in node.path())]
        node.proposal, candidates = self._proposer.propose(logits, position, count, text=text)
        return candidates

    def _add_next_of(self, node: Node) -> None:
        """Turn the best waiting candidate of `node` into a node, if there is room."""
        following = self._fans.next_of(node)
        if following is not None and self.max_expansions > 0:
            (token, confidence), step = following
            self._add_child(node, token, confidence, step)
        self._fans.enqueue(node)

    def _add_child(self, node: Node, token: int, confidence: float, step: int) -> None:
        child = self.tree.add_child(node, token, confidence, drafter=self._drafter, draft_step=step)
        assert child is not None, "no room for a child"
        self._unsent[child] = step

    def _confirm_lookups(self, node: Node, fan: Fan) -> None:
        """Lookups below a node that was just ranked become what the model says of them: in the company of those that
        it ranks before, or after all that it ranks."""
        lookups = dict(node.children)
        if not lookups:
            return
        last = max((rank for rank, (token, _) in enumerate(fan.candidates) if token in lookups), default=-1)
        ranked = fan.candidates[: last + 1]
        if self.tree.num_nodes + len(ranked) < self._rules.max_nodes:
            for token, confidence in ranked:
                if token not in lookups:
                    self._add_child(node, token, confidence, fan.step)
        confidences = dict(fan.candidates)
        least = fan.candidates[-1][1] / 2
        for token, child in lookups.items():
            confidence = confidences.get(token, least)
            self.tree.restate(child, confidence, drafter=self._drafter, draft_step=fan.step)
            self._unsent[child] = fan.step

    def _look_up(self) -> None:
        """Put what followed earlier in the text below the likeliest leaf, or below a root that is yet to be ranked."""
        if self._lookups is None or not self.can_draft:
            return
        node: Node | None = self.tree.root
        if not self.num_pending:
            leaves = (node for node in self.tree.nodes() if node.slot is None and not node.children)
            node = max(leaves, key=lambda node: node.reach, default=None)
        if node is None or is_lookup(node) or node.children:
            return
        self._lookups.put_below(node, self.tree)

    def _widen(self) -> None:
        """Add waiting candidates, best first, while they compare with the leaves that would be expanded next."""
        best_leaf = max((node.reach for node in self.tree.nodes() if node.slot is None), default=0.0)
        floor = max(self._rules.min_reach, self._rules.min_share * best_leaf)
        while self.tree.num_nodes < self._rules.max_nodes:
            reach = self._fans.best_reach
            if reach == 0.0 or (reach < floor and self.tree.num_nodes >= self._rules.num_free_nodes):
                return
            self._add_next_of(self._fans.pop())

    def _observe(self, tokens: Sequence[int], origins: Sequence[Origin]) -> None:
        """Tell the calibrator which children of the walked nodes were the target's choices.

        Under the rejection rule a choice says something of the draft only where the target tested it.
        """
        node = self.tree.root
        for token, origin in itertools.zip_longest(tokens, origins):
            was_tested = self._drafter == DRAFTER or origin in (Origin.ACCEPTED, Origin.RECOVERED)
            for child in node.children.values() if was_tested else ():
                if is_lookup(child):
                    continue
                is_choice = child.token == token
                self._calibrator.observe(child.rank, child.depth, child.confidence, self._drafter, is_choice)
            if token not in node.children:
                return
            node = node.children[token]

    def _keep_alive(self, path: Sequence[Node]) -> None:
        """Drop fans and unsent marks of nodes that left the tree; the last accepted node's fan is the new root's."""
        alive = dict.fromkeys(self.tree.nodes())
        former = path[-1] if path and len(self.slots) == self.base else None
        self._fans.rebase(alive, self.tree.root, former)
        self._unsent = {node: step for node, step in self._unsent.items() if node in alive}

    def _take_chain(self, step: DraftStep) -> Extension | None:
        if self.num_pending or self._answered_base == self.base or next(self.leaves(), None) is not None:
            return None
        if self.is_paused:
            return None
        chain = sorted(self.tree.nodes(), key=lambda node: node.depth)[: self._chain_length]
        return self._last_extension(step, chain)

    def _last_extension(self, step: DraftStep, nodes: Sequence[Node]) -> Extension:
        self._answered_base = self.base
        self._unsent.clear()
        time = self._chain_time
        return self.tree.extension_of(
            nodes,
            session=self.id,
            is_exhausted=True,
            drafter=self._drafter,
            draft_step=step.number,
            draft_step_ms=time.step_ms / max(time.num_steps, 1),
            draft_share_ms=time.share_ms,
        )


def _chain_length(opened: Open) -> int | None:
    """K in sync mode, None in others."""
    if opened.speculation.mode is not Mode.SYNC:
        return None
    return opened.speculation.num_speculative_tokens or DEFAULT_SYNC_K


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)
