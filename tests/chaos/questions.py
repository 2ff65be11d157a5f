"""Requests under which faults strike, and what became of each.

Owns: questions drawn from a seed, how many are asked at once, what each client saw. Must not know: faults, processes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from faults import Phase
from oracle import Sampling
from running import READY_TIMEOUT_S
from waiting import wait_until

from specpipe.answers import AnswerEvent, Chunk, Finished, Started
from specpipe.client import Answer, GenerateClient, GenerateRequest
from specpipe.errors import SpecpipeError
from specpipe.types import Mode

PROMPTS = ("def tokens(line):", "A fast draft", "for index", "中文", "x")
SAMPLINGS = (Sampling(), Sampling(), Sampling(temperature=0.8, seed=31), Sampling(temperature=0.9, top_k=20, seed=7))
LENGTHS = (24, 48, 112)
WORDS = ("def", "tokens", "line", "return", "part", "fast", "draft", "model", "guesses", "value", "print", "index")
NUM_WORDS = 200  # of a long prompt: some 700 tokens, six steps or so
GIVE_UP_S = 180.0  # a request that is not over then is lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: str
    sampling: Sampling
    max_tokens: int
    mode: Mode
    is_long: bool = False  # its prompt was never seen before
    leaves_after: int | None = None  # tokens after which the client leaves
    first_place: int = 0  # which coordinator is asked first
    asks_elsewhere: bool = True  # should that one be lost

    @property
    def request(self) -> GenerateRequest:
        return GenerateRequest(
            prompt=self.prompt,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            seed=self.sampling.seed,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            mode=self.mode,
        )


def draw_questions(seed: int, count: int) -> Iterator[Question]:
    rng = random.Random(seed)
    for number in range(count):
        is_long = number % 6 == 3
        words = " ".join(rng.choices(WORDS, k=NUM_WORDS))
        max_tokens = rng.choice(LENGTHS)
        yield Question(
            prompt=f"{words} {number}" if is_long else rng.choice(PROMPTS),
            sampling=rng.choice(SAMPLINGS),
            max_tokens=24 if is_long else max_tokens,
            mode=rng.choice((Mode.PIPELINED, Mode.PIPELINED, Mode.SYNC, Mode.OFF)),
            is_long=is_long,
            leaves_after=rng.randrange(0, 20) if rng.random() < 0.08 else None,
            first_place=rng.randrange(2),
            asks_elsewhere=rng.random() < 0.75,
        )


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of one question, as its client saw it."""

    question: Question
    answer: Answer = field(default_factory=Answer)
    num_starts: int = 0
    num_ends: int = 0
    error: SpecpipeError | None = None
    has_left: bool = False
    asked_s: float = field(default_factory=time.monotonic)
    over_s: float | None = None  # None: not yet
    arrivals_s: list[float] = field(default_factory=list)  # of chunks

    @property
    def is_over(self) -> bool:
        return self.over_s is not None

    @property
    def longest_pause_s(self) -> float:
        """Between two chunks, before the first, or from the last to the end."""
        times = [self.asked_s, *self.arrivals_s, *([] if self.over_s is None else [self.over_s])]
        return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)

    def __str__(self) -> str:
        one, got = self.question, len(self.answer.token_ids)
        return f"{one.prompt[:20]!r} {one.sampling} {one.mode.value}, {got} of {one.max_tokens} tokens: {self.error}"


class Load:
    """Asks the questions, so many at once at most, as far as they have been let go. `async with Load(...) as load`."""

    def __init__(self, addresses: Sequence[str], questions: Iterator[Question], *, max_running: int = 8) -> None:
        self.outcomes: list[Outcome] = []
        self._questions = questions
        self._addresses = tuple(addresses)
        self._places = asyncio.Semaphore(max_running)
        self._tasks: set[asyncio.Task[None]] = set()
        self._allowed = asyncio.Semaphore(0)
        self._num_allowed = 0
        self._asking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Load:
        self._asking = asyncio.create_task(self._ask_all())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._asking is not None
        for task in (self._asking, *self._tasks):
            task.cancel()
        await asyncio.gather(self._asking, *self._tasks, return_exceptions=True)

    def let_go(self, count: int) -> None:
        """So many questions more may be asked."""
        self._num_allowed += count
        for _ in range(count):
            self._allowed.release()

    @property
    def running(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.is_over]

    async def reaches(self, phase: Phase) -> bool:
        """Wait until it goes on, or until all that may be asked have ended (False: it did not come about)."""
        await wait_until(lambda: self._is_in(phase) or self._is_done, timeout_s=GIVE_UP_S)
        return self._is_in(phase)

    async def end(self) -> None:
        """All that may be asked have ended."""
        await wait_until(lambda: self._is_done, timeout_s=GIVE_UP_S + READY_TIMEOUT_S)

    @property
    def _is_done(self) -> bool:
        return len(self.outcomes) == self._num_allowed and not self.running

    def _is_in(self, phase: Phase) -> bool:
        if phase is Phase.IDLE:
            return self._is_done
        if phase is Phase.PREFILL:
            return any(one.question.is_long and not one.arrivals_s for one in self.running)
        return any(len(one.arrivals_s) > 2 for one in self.running)

    async def _ask_all(self) -> None:
        for question in self._questions:
            await self._allowed.acquire()
            await self._places.acquire()
            outcome = Outcome(question=question)
            self.outcomes.append(outcome)
            task = asyncio.create_task(self._ask(outcome))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, outcome: Outcome) -> None:
        try:
            await ask(outcome, self._addresses)
        finally:
            self._places.release()


async def ask(outcome: Outcome, addresses: Sequence[str]) -> None:
    """With a connection of its own, as separate clients have."""
    question = outcome.question
    first = addresses[question.first_place]
    others = [address for address in addresses if address != first]
    async with GenerateClient([first, *others] if question.asks_elsewhere else [first]) as client:
        try:
            async with aclosing(client.generate(question.request, timeout_s=GIVE_UP_S)) as events:
                async for event in events:
                    _note(outcome, event)
                    if question.leaves_after is not None and len(outcome.answer.token_ids) >= question.leaves_after:
                        outcome.has_left = True
                        return
        except SpecpipeError as error:
            outcome.error = error
        finally:
            outcome.over_s = time.monotonic()


def _note(outcome: Outcome, event: AnswerEvent) -> None:
    outcome.answer.add(event)
    outcome.num_starts += isinstance(event, Started)
    outcome.num_ends += isinstance(event, Finished)
    if isinstance(event, Chunk):
        outcome.arrivals_s.append(time.monotonic())
