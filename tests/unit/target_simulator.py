"""A target loop in virtual time: a model without weights, scripted drafters, a network that does what a test says.

Nothing here sleeps. The clock moves when the model runs, when the loop waits, and when nothing but mail is left.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from report_books import RoundBook

from specpipe.config import EngineConfig, TargetWorkerConfig
from specpipe.engine.interface import StepBatch
from specpipe.sampling.coupled import Chooser
from specpipe.step_costs import StepCosts
from specpipe.testing import TableModel
from specpipe.types import (
    Close,
    Closed,
    Commit,
    Extension,
    Failed,
    FinishReason,
    Mode,
    Open,
    Origin,
    RoundStats,
    SamplingParams,
    SessionMessage,
    SpeculationParams,
    StopRules,
)
from target_worker.verification import cut
from target_worker.worker import TargetLoop

LINK = 1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TimedModel:
    """A StepModel whose forward takes virtual time: `base_ms` for up to `flat_rows` rows, then in proportion."""

    def __init__(self, table: TableModel, clock: Clock, *, base_ms: float = 10.0, flat_rows: int = 16) -> None:
        self.table = table
        self.info = table.info
        self.num_slots = table.num_slots
        self.rank_ms: Sequence[float] = ()
        self.rows_of_steps: list[int] = []
        self.sessions_of_steps: list[list[int]] = []
        self._clock = clock
        self._base_ms = base_ms
        self._flat_rows = flat_rows

    def step_ms(self, rows: int) -> float:
        return self._base_ms * max(1.0, rows / self._flat_rows)

    def forward(self, batch: StepBatch) -> npt.NDArray[np.float32]:
        logits = self.table.forward(batch)
        self.rows_of_steps.append(batch.num_rows)
        self.sessions_of_steps.append([rows.session for rows in batch.sessions])
        self._clock.now += self.step_ms(batch.num_rows) / 1e3
        return logits

    def clear_slots(self, slots: Sequence[int]) -> None:
        self.table.clear_slots(slots)


def create_open(
    session: int,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    max_tokens: int = 16,
    mode: Mode = Mode.PIPELINED,
    k: int | None = None,
    temperature: float = 0.0,
    seed: int = 7,
    drafter: str = "model",
    eos: tuple[int, ...] = (),
    stop_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    min_tokens: int = 0,
    remaining_ms: float | None = None,
    num_prompt_tokens: int | None = None,
    wants_reports: bool = False,
    **sampling: float,
) -> Open:
    num_prompt = len(prompt) if num_prompt_tokens is None else num_prompt_tokens
    return Open(
        session=session,
        request_id=f"request-{session}",
        tokens=tuple(prompt),
        num_prompt_tokens=num_prompt,
        sampling=SamplingParams(temperature=temperature, seed=seed, **sampling),  # type: ignore[arg-type]
        stops=StopRules(
            eos_token_ids=eos,
            stop_token_ids=stop_ids,
            ignore_eos=ignore_eos,
            min_length=num_prompt + min_tokens,
            max_length=num_prompt + max_tokens,
        ),
        speculation=SpeculationParams(mode=mode, num_speculative_tokens=k, drafter=drafter),
        remaining_ms=remaining_ms,
        wants_reports=wants_reports,
    )


def plain_run(table: TableModel, opened: Open) -> tuple[list[int], FinishReason]:
    """The oracle: one token at a time from whole prefixes, without any worker."""
    chooser = Chooser(opened.sampling, table.info.vocab_size)
    tokens, new = list(opened.tokens), []
    stops = opened.stops
    limit = min(stops.max_length, table.info.max_context)
    while True:
        token = chooser.choose(table.logits_of(tokens), len(tokens))
        kept, reason = cut([token], stops, base=len(tokens))
        tokens.append(token)
        new += kept
        if reason is None and len(tokens) >= limit:
            reason = FinishReason.LENGTH
        if reason is not None:
            return new, reason


@dataclass
class Answer:
    """What a client of the loop saw of one session."""

    opened: Open
    tokens: list[int]
    origins: list[Origin] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    stats: RoundStats = field(default_factory=RoundStats)
    finish_reason: FinishReason | None = None
    failed: Failed | None = None
    closed: Closed | None = None

    def __post_init__(self) -> None:
        self.book = RoundBook(self.opened)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[len(self.opened.tokens) :]

    def take(self, message: SessionMessage) -> None:
        assert self.closed is None, f"{message} after Closed"
        self.book.take(message)
        if isinstance(message, Commit):
            assert message.base == len(self.tokens)
            assert len(message.origins) == len(message.tokens) >= 1
            assert self.finish_reason is None
            assert message.round == len(self.commits) + 1
            self.tokens += message.tokens
            self.origins += message.origins
            self.commits.append(message)
            self.stats += message.stats
            self.finish_reason = message.finish_reason
        elif isinstance(message, Failed):
            self.failed = message
        elif isinstance(message, Closed):
            self.closed = message


Drafter = Callable[[Sequence[int], Open], list[Extension]]
"""(committed tokens, open) -> extensions that a draft worker sends after it learnt of them."""


class Simulator:
    """One loop, its clients, and mail in flight. `delay_ms()` is drawn for each draft message: None loses it."""

    def __init__(
        self,
        table: TableModel,
        *,
        drafter: Drafter | None = None,
        delay_ms: Callable[[], float | None] = lambda: 2.0,
        copies: Callable[[], int] = lambda: 1,
        max_batch_tokens: int = 64,
        max_sessions: int = 64,
        has_prefix_cache: bool = True,
        base_ms: float = 10.0,
        flat_rows: int = 16,
        auto_close: bool = True,
    ) -> None:
        self.clock = Clock()
        self.model = TimedModel(table, self.clock, base_ms=base_ms, flat_rows=flat_rows)
        self.answers: dict[int, Answer] = {}
        self.orphans: list[SessionMessage] = []
        config = TargetWorkerConfig(
            engine=EngineConfig(
                model="table",
                max_batch_tokens=max_batch_tokens,
                max_sessions=max_sessions,
                has_prefix_cache=has_prefix_cache,
            )
        )
        costs = StepCosts(max_batch_tokens)
        for rows in (1, 2, 4, 8, 16, 24, 32, 48, 64):
            if rows <= max_batch_tokens:
                costs.observe(rows, 0, self.model.step_ms(rows))
        self.loop = TargetLoop(self.model, config, self._receive, self.clock, costs)
        self._drafter = drafter
        self._delay_ms = delay_ms
        self._copies = copies
        self._auto_close = auto_close
        self._numbers = itertools.count()
        self._mail: list[tuple[float, int, Callable[[], None]]] = []

    def open(self, opened: Open, *, link: int = LINK) -> Answer:
        answer = self.answers[opened.session] = Answer(opened, list(opened.tokens))
        self.loop.receive(link, opened)
        self.loop.check()
        self._draft_after(answer)
        return answer

    def post(self, message: SessionMessage, *, after_ms: float = 0.0, link: int = LINK) -> None:
        self.at(after_ms, lambda: self.loop.receive(link, message))

    def at(self, after_ms: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._mail, (self.clock.now + after_ms / 1e3, next(self._numbers), action))

    def run(self, *, max_steps: int = 100_000) -> None:
        """Until nothing is left to do and no mail is on its way."""
        for _ in range(max_steps):
            self._deliver()
            wait_s = self.loop.run_once()
            self.loop.check()
            if wait_s == 0.0:
                continue
            due = self._mail[0][0] if self._mail else None
            until = None if wait_s is None else self.clock.now + wait_s
            moments = [moment for moment in (due, until) if moment is not None]
            if not moments:
                return
            self.clock.now = max(self.clock.now, min(moments))
        raise AssertionError("the loop does not come to an end")

    def _deliver(self) -> None:
        while self._mail and self._mail[0][0] <= self.clock.now:
            _, _, action = heapq.heappop(self._mail)
            action()
            self.loop.check()

    def _receive(self, link: int, message: SessionMessage) -> None:
        answer = self.answers.get(message.session)
        if answer is None:
            self.orphans.append(message)
            return
        answer.take(message)
        if isinstance(message, Commit):
            if message.finish_reason is None:
                self._draft_after(answer)
            elif self._auto_close:
                self.post(Close(session=message.session), link=link)

    def _draft_after(self, answer: Answer) -> None:
        if self._drafter is None:
            return
        for extension in self._drafter(list(answer.tokens), answer.opened):
            for _ in range(self._copies()):
                if (delay := self._delay_ms()) is not None:
                    self.post(extension, after_ms=delay)


def chain(
    session: int,
    base: int,
    tokens: Sequence[int],
    *,
    confidence: float = 0.9,
    is_exhausted: bool = False,
    **more: float,
) -> Extension:
    """One path below `base`."""
    return Extension(
        session=session,
        base=base,
        parents=tuple(range(len(tokens))),
        tokens=tuple(tokens),
        confidences=(confidence,) * len(tokens),
        is_exhausted=is_exhausted,
        draft_step=int(more.get("draft_step", 1)),
        draft_step_ms=more.get("draft_step_ms", 2.0),
    )


def self_drafter(table: TableModel, length: int, *, is_exhausted: bool = True) -> Drafter:
    """Draft weights = target weights: it drafts what the target will say."""

    def draft(tokens: Sequence[int], opened: Open) -> list[Extension]:
        chooser = Chooser(opened.sampling, table.info.vocab_size)
        known = list(tokens)
        for _ in range(length):
            known.append(chooser.choose(table.logits_of(known), len(known)))
        return [chain(opened.session, len(tokens), known[len(tokens) :], is_exhausted=is_exhausted)]

    return draft


def wrong_drafter(table: TableModel, length: int, *, is_exhausted: bool = True) -> Drafter:
    """It drafts what the target will never say."""

    def draft(tokens: Sequence[int], opened: Open) -> list[Extension]:
        chooser = Chooser(opened.sampling, table.info.vocab_size)
        right = chooser.choose(table.logits_of(tokens), len(tokens))
        wrong = [(right + 1) % table.info.vocab_size] * length
        return [chain(opened.session, len(tokens), wrong, confidence=0.5, is_exhausted=is_exhausted)]

    return draft
