"""One session on the target worker: its tokens, its copy of the draft tree, its books.

Owns: `Session` and the rules by which an Open is taken. Must not know: the slot pool, other sessions, clocks, models.
Nothing that a drafter says raises out of here or changes a committed token; it is grafted, or counted and dropped.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpipe.calibration import Calibrator
from specpipe.config import DEFAULT_SYNC_K
from specpipe.errors import CapacityError, InvalidRequestError
from specpipe.ngram import NgramDrafter
from specpipe.sampling.coupled import Chooser
from specpipe.sampling.rejection import Judge, certain_draws
from specpipe.tree import DraftTree, GraftOutcome, Node
from specpipe.types import (
    Commit,
    Extension,
    FinishReason,
    Mode,
    ModelInfo,
    Open,
    Origin,
    RoundStats,
    Rule,
    StopRules,
)
from target_worker.recording import RoundRecorder
from target_worker.verification import Walk, first_child, has_verified_child, walk
from target_worker.waiting import DraftWatch

NGRAM_NODES = 32  # nodes proposed at once in pipelined mode


class Phase(enum.Enum):
    QUEUED = "queued"  # holds no slots; waits for room, for the first time or after it was preempted
    RUNNING = "running"  # holds slots for all its tokens but, at most, the last
    FINISHED = "finished"  # holds no slots; keeps its tokens until Close


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a session may not exceed."""

    info: ModelInfo
    num_slots: int
    max_nodes: int


class NeverFitsError(CapacityError):
    """The worker's slots could not hold this session even alone."""

    is_retryable = False


class Session:
    """Created from an Open that `check_open` took. `serial` orders sessions by arrival and names them in a batch."""

    def __init__(
        self, opened: Open, *, link: int, serial: int, limits: Limits, calibrator: Calibrator, now: float
    ) -> None:
        self.opened = opened
        self.link = link
        self.serial = serial
        self.phase = Phase.QUEUED
        self.tokens = list(opened.tokens)
        self.slots: list[int] = []  # of positions 0 ..; all tokens but the last have one while running
        self.num_computed = 0  # positions whose K and V are in their slots
        self.num_shared = 0  # of those, the first ones that another session had computed
        self.round = 0
        self.last_step = 0  # number of the last step with rows of this session
        self.finish_reason: FinishReason | None = None
        self.stops = _bounded(opened.stops, limits.info.max_context)
        self.deadline = math.inf if opened.remaining_ms is None else now + opened.remaining_ms / 1e3
        self.ready_since = now
        self.decided_s: float | None = None  # when its tokens became final; None: an extension has come since
        self.recorder = RoundRecorder(opened.session, now) if opened.wants_reports else None
        self.is_cold = True  # its rows were never seen to be free of NaN
        self.stats = RoundStats()
        self.watch = DraftWatch(opened.speculation.mode)
        self.tree = DraftTree(
            base=len(self.tokens),
            max_nodes=limits.max_nodes,
            estimate=calibrator.estimate,
            vocab_size=limits.info.vocab_size,
        )
        self._calibrator = calibrator
        self._chooser = Chooser(opened.sampling, limits.info.vocab_size)
        is_rejection = opened.speculation.rule is Rule.REJECTION
        self._judge = Judge(opened.sampling, limits.info.vocab_size) if is_rejection else None
        self._origins: list[Origin] = []  # of the tokens committed here
        self._ngram = self._open_ngram()
        self._is_ngram_fresh = False
        self.last_guesses = (0, 0)  # of the last round: guesses put to the test, lookups included, and right ones

    @property
    def session(self) -> int:
        return self.opened.session

    @property
    def mode(self) -> Mode:
        """The mode that is in force: off where nothing drafts."""
        return Mode.OFF if self.opened.speculation.drafter == "none" else self.opened.speculation.mode

    @property
    def num_pending(self) -> int:
        """Committed tokens not yet computed; one while it decodes."""
        return len(self.tokens) - self.num_computed

    @property
    def max_depth(self) -> int:
        """Deepest node worth verifying now: K, and what is left of the answer."""
        if self.mode is Mode.OFF:
            return 0
        left = self.stops.max_length - len(self.tokens) - 1
        wanted = self.opened.speculation.num_speculative_tokens
        if wanted is None:
            wanted = DEFAULT_SYNC_K if self.mode is Mode.SYNC else left
        return max(0, min(wanted, left))

    @property
    def is_drawn(self) -> bool:
        """Whether drafted tokens are draws, so that what is verified may not depend on which they are."""
        return self._judge is not None and self.opened.sampling.temperature > 0.0

    @property
    def has_draft(self) -> bool:
        """Whether the round may begin: sync wants its whole chain, pipelined any node of its drafter's."""
        if self.max_depth == 0 or self.mode is Mode.OFF or self.opened.speculation.drafter == "ngram":
            return True
        if self.mode is Mode.SYNC:
            return self.round == 0 or self._chain_depth() >= self.max_depth
        return any(map(self._is_own, self.tree.root.children.values()))

    @property
    def expected_accepted(self) -> float:
        """Drafted tokens that a round of all that is known now would add, as estimated."""
        return sum(node.reach for node in self.tree.nodes() if node.depth <= self.max_depth)

    def become_ready(self, now: float) -> None:
        """Until now it was not to be run."""
        self.ready_since = now
        if self.recorder is not None:
            self.recorder.become_ready(now)

    def graft(self, extension: Extension) -> GraftOutcome | None:
        """Take a hint. One that is malformed, ahead, or off the committed path is counted as stale and dropped.
        None: the session has no use for any."""
        if self.phase is Phase.FINISHED or self.mode is Mode.OFF:
            return None
        try:
            outcome = self._graft(extension)
        except InvalidRequestError:
            self.stats += RoundStats(num_stale=1)
            return GraftOutcome.STALE
        self.watch.on_extension(extension, outcome)
        return outcome

    def draft_ngram(self) -> None:
        """Let the session's own lookup propose, once a base. Under the rejection rule, where the first draw at a node
        stays and a lookup's is a poor one, only if nothing else is there."""
        if self._ngram is None or self._is_ngram_fresh or self.max_depth == 0:
            return
        is_fallback = self._judge is not None and self.opened.speculation.drafter != "ngram"
        if is_fallback and self.tree.root.children:
            return
        self._is_ngram_fresh = True
        limit = self.max_depth if self.mode is Mode.SYNC else NGRAM_NODES
        parents, tokens, confidences = self._ngram.grow(limit)
        proposals = certain_draws(parents, tokens) if self._judge is not None else ()
        self._graft(
            Extension(
                session=self.session,
                base=len(self.tokens),
                parents=tuple(parents),
                tokens=tuple(tokens),
                confidences=tuple(confidences),
                drafter="ngram",
                proposals=proposals,
            )
        )

    def verify(self, rows: Mapping[Node, int], logits: npt.NDArray[np.float32], root_row: int) -> Walk:
        """Walk the tree over the step's logits [num_wanted, vocab]; `rows` maps verified nodes to theirs.

        Raises SpecpipeError if a walked row holds NaN or allows nothing; nothing has changed then.
        """
        base = len(self.tokens)

        def choose(node: Node) -> int:
            row, position = logits[rows.get(node, root_row)], base + node.depth
            if self._judge is None:
                return self._chooser.choose(row, position)
            return self._judge.choose(row, position, node.proposal if node.sampled_child in rows else None)

        return walk(self.tree.root, rows, choose, base=base, stops=self.stops, has_rows=bool(rows))

    def commit(self, result: Walk, rows: Mapping[Node, int], *, step_ms: float, gap_ms: float) -> Commit:
        """Make a walk's tokens final and return what to say about it. Slots of nodes off the path are the caller's."""
        self.round += 1
        self._count_round(result, rows, step_ms, gap_ms)
        self._calibrate(result, rows)
        for node in rows:
            node.is_verified = True
        steps = {node.draft_step for node in rows if node.draft_step > 0}
        base = len(self.tokens)
        self.slots.extend(node.slot for node in result.path if node.slot is not None)
        self.num_computed = base + len(result.path)
        self.tokens.extend(result.tokens)
        self._origins.extend(result.origins)
        self.finish_reason = result.finish_reason
        self.is_cold = False
        self.tree.advance(result.tokens)
        self.watch.on_commit()
        self._is_ngram_fresh = False
        if self._ngram is not None:
            self._ngram.commit(result.tokens)
        stats, self.stats = self.stats, RoundStats()
        return Commit(
            session=self.session,
            round=self.round,
            base=base,
            tokens=tuple(result.tokens),
            origins=tuple(result.origins),
            finish_reason=result.finish_reason,
            verified_draft_steps=tuple(sorted(steps)),
            stats=stats,
        )

    def resync(self, have: int) -> Commit:
        """All tokens from `have` on. Raises InvalidRequestError if the asker has more than there are."""
        if not 0 <= have <= len(self.tokens):
            raise InvalidRequestError(f"session {self.session}: {have} tokens claimed, {len(self.tokens)} committed")
        opened = len(self.opened.tokens)
        origins = [Origin.PLAIN] * max(0, opened - have) + self._origins[max(0, have - opened) :]
        return Commit(
            session=self.session,
            round=0,
            base=have,
            tokens=tuple(self.tokens[have:]),
            origins=tuple(origins),
            finish_reason=self.finish_reason,
        )

    def _graft(self, extension: Extension) -> GraftOutcome:
        graft = self.tree.graft(extension, self.tokens)
        self.stats += RoundStats(
            num_drafted=len(graft.added),
            num_late=int(graft.outcome is GraftOutcome.LATE),
            num_stale=int(graft.outcome in (GraftOutcome.STALE, GraftOutcome.AHEAD)),
        )
        return graft.outcome

    def _open_ngram(self) -> NgramDrafter | None:
        is_fallback = self.mode is Mode.PIPELINED
        if self.mode is Mode.OFF or not (self.opened.speculation.drafter == "ngram" or is_fallback):
            return None
        drafter = NgramDrafter()
        drafter.open(self.tokens)
        return drafter

    def _chain_depth(self) -> int:
        node, depth = first_child(self.tree.root), 0
        while node is not None:
            node, depth = first_child(node), depth + 1
        return depth

    def _count_round(self, result: Walk, rows: Mapping[Node, int], step_ms: float, gap_ms: float) -> None:
        guessed = [(node, choice) for node, choice in result.walked if self._is_guessed(node, rows)]
        self.last_guesses = (len(guessed), sum(_is_first(node, choice) for node, choice in guessed))
        judged = [(own, choice) for node, choice in guessed if (own := self._own_guess(node)) is not None]
        is_counted = self.round > 1 and self.max_depth > 0
        is_hit = bool(self.tree.root.children)
        is_own = any(map(self._is_own, self.tree.root.children.values()))
        self.stats += RoundStats(
            num_rounds=1,
            num_verified=len(rows),
            num_accepted=len(result.path),
            num_judged=len(judged),
            num_first_ranked=sum(own.token == choice for own, choice in judged),
            num_hits=int(is_counted and is_hit),
            num_misses=int(is_counted and not is_hit),
            num_lookup_hits=int(is_counted and is_hit and not is_own),
            num_cached=min(self.num_shared, self.opened.num_prompt_tokens) if self.round == 1 else 0,
            step_ms=step_ms,
            num_steps=1,
            gap_ms=gap_ms,
            num_gaps=1,
        )

    def _is_guessed(self, node: Node, rows: Mapping[Node, int]) -> bool:
        """Whether the choice at a walked node says if the first guess was right, whoever made it."""
        return node.sampled_child in rows if self.is_drawn else has_verified_child(node, rows)

    def _own_guess(self, node: Node) -> Node | None:
        """What the session's own drafter ranked first after `node`; None if it said nothing there. That a lookup is
        surer of something else, or of the same, says nothing of it."""
        own = [child for child in node.children.values() if self._is_own(child)]
        return min(own, key=_own_order, default=None)

    def _is_own(self, node: Node) -> bool:
        """Whether the session's drafter guessed it: a lookup beside a draft model saves time, and is no merit of it."""
        return node.draft_step > 0 or node.drafter != "ngram" or self.opened.speculation.drafter == "ngram"

    def _calibrate(self, result: Walk, rows: Mapping[Node, int]) -> None:
        """Every child of a walked node that was known when the step began, verified or not; but a draw only where it
        was tested."""
        for node, choice in result.walked:
            if self.is_drawn and not self._is_guessed(node, rows):
                continue
            for child in node.children.values():
                self._calibrator.observe(
                    child.rank, child.depth, child.confidence, child.drafter, child.token == choice
                )


def check_open(opened: Open, limits: Limits) -> None:
    """Raise InvalidRequestError or NeverFitsError unless a session can be made of this Open."""
    _check_tokens(opened, limits.info)
    _check_sampling(opened)
    if opened.speculation.drafter not in ("", "model", "ngram", "none"):
        raise InvalidRequestError(f"drafter must be model, ngram or none, got {opened.speculation.drafter!r}")
    wanted = opened.speculation.num_speculative_tokens
    if wanted is not None and wanted < 1:
        raise InvalidRequestError(f"num_speculative_tokens must be at least 1, got {wanted}")
    if opened.adapter:
        raise InvalidRequestError(f"adapter {opened.adapter!r} is not available: this worker serves none")
    most = min(opened.stops.max_length, limits.info.max_context) - 1
    if most > limits.num_slots - 1:
        raise NeverFitsError(
            f"the answer may need {most} KV slots and this worker has {limits.num_slots - 1}: lower max_tokens"
        )


def _check_tokens(opened: Open, info: ModelInfo) -> None:
    length = len(opened.tokens)
    if not 1 <= opened.num_prompt_tokens <= length:
        raise InvalidRequestError(f"num_prompt_tokens must be in 1..{length}, got {opened.num_prompt_tokens}")
    if length >= info.max_context:
        raise InvalidRequestError(f"{length} tokens leave no room in a context of {info.max_context}")
    if opened.stops.max_length <= length:
        raise InvalidRequestError(f"max_length is {opened.stops.max_length}, but there are {length} tokens already")
    for name, ids in (("tokens", opened.tokens), ("stop_token_ids", opened.stops.stop_token_ids)):
        if (wrong := _outside(ids, info.vocab_size)) is not None:
            raise InvalidRequestError(f"{name}: id {wrong} is outside the vocabulary of {info.vocab_size}")


def _check_sampling(opened: Open) -> None:
    sampling = opened.sampling
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequestError(f"temperature must be finite and at least 0, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequestError(f"top_p must be in (0, 1], got {sampling.top_p}")
    if sampling.top_k < 0:
        raise InvalidRequestError(f"top_k must be at least 0, got {sampling.top_k}")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidRequestError(f"min_p must be in [0, 1], got {sampling.min_p}")
    if opened.remaining_ms is not None and math.isnan(opened.remaining_ms):
        raise InvalidRequestError("remaining_ms must be a number")


def _outside(ids: Sequence[int], vocab_size: int) -> int | None:
    return next((token for token in ids if not 0 <= token < vocab_size), None)


def _is_first(node: Node, choice: int) -> bool:
    child = first_child(node)
    return child is not None and child.token == choice


def _own_order(node: Node) -> tuple[bool, float, int]:
    """`Node.order`, by what a draft step said where one did."""
    confidence = node.confidence if node.drafted_confidence is None else node.drafted_confidence
    return not node.is_sampled, -confidence, node.token


def _bounded(stops: StopRules, max_context: int) -> StopRules:
    return StopRules(
        eos_token_ids=stops.eos_token_ids,
        stop_token_ids=stops.stop_token_ids,
        ignore_eos=stops.ignore_eos,
        min_length=stops.min_length,
        max_length=min(stops.max_length, max_context),
    )
