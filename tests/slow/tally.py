"""Asking many questions at once, and counting answers against what the target alone says, by the margin rule."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import findings
from oracle import MARGIN, Oracle, Sampling

from specpipe.client import Answer, GenerateClient, GenerateRequest

ANSWER_TIMEOUT_S = 900.0
TOKENS_A_TIE = 2000  # at most one tie among so many

Verdict = tuple[tuple[int, ...], tuple[int, ...], Sampling]
"""(prompt, answer, how it was sampled)"""


async def ask_all(address: str, requests: Sequence[GenerateRequest], *, in_flight: int) -> list[Answer]:
    """Answers in the order of requests, `in_flight` at a time."""
    gate = asyncio.Semaphore(in_flight)

    async def ask(client: GenerateClient, request: GenerateRequest) -> Answer:
        async with gate:
            return await client.answer(request, timeout_s=ANSWER_TIMEOUT_S)

    async with GenerateClient(address) as client:
        return await asyncio.gather(*(ask(client, request) for request in requests))


@dataclass(kw_only=True)
class Tally:
    """Counts of one comparison. A tie: two tokens within the margin, of which the other was taken."""

    oracle: Oracle
    known: dict[Verdict, int] = field(default_factory=dict)  # ties of answers checked before; tallies may share it
    num_answers: int = 0
    num_tokens: int = 0
    num_ties: int = 0
    mismatches: list[str] = field(default_factory=list)

    def compare(self, prompt: Sequence[int], expected: Sequence[int], answer: Answer) -> None:
        """A greedy answer and what `generate` said."""
        self._count(answer, len(expected))
        if answer.token_ids == list(expected) or len(answer.token_ids) != len(expected):
            return
        gap = self.oracle.gap(prompt, expected, answer.token_ids)
        if gap >= MARGIN:
            self.mismatches.append(f"prompt {list(prompt)}: {answer.token_ids} for {list(expected)}, gap {gap}")
        else:  # from there on the text is another: judged token by token
            self.num_ties += max(1, self._ties(prompt, answer.token_ids, Sampling()))

    def check(self, prompt: Sequence[int], length: int, answer: Answer, sampling: Sampling) -> None:
        """Every token is the oracle's own choice."""
        self._count(answer, length)
        self.num_ties += self._ties(prompt, answer.token_ids, sampling)

    def conclude(self, name: str) -> None:
        """Record the counts. Raises AssertionError for a mismatch, or for more ties than rounding explains."""
        findings.record(
            f"{name}: {self.num_answers} answers, {self.num_tokens} tokens, {len(self.mismatches)} mismatches,"
            f" {self.num_ties} ties"
        )
        assert not self.mismatches, "\n".join(self.mismatches[:5])
        assert self.num_ties <= math.ceil(self.num_tokens / TOKENS_A_TIE)

    def _count(self, answer: Answer, length: int) -> None:
        self.num_answers += 1
        self.num_tokens += len(answer.token_ids)
        if answer.finished is None or not len(answer.token_ids) == answer.finished.completion_tokens == length:
            self.mismatches.append(f"{len(answer.token_ids)} tokens instead of {length}: {answer.finished}")

    def _ties(self, prompt: Sequence[int], token_ids: Sequence[int], sampling: Sampling) -> int:
        key = (tuple(prompt), tuple(token_ids), sampling)
        if key not in self.known:
            try:
                self.known[key] = self.oracle.check(prompt, token_ids, sampling)
            except AssertionError as error:
                self.mismatches.append(f"prompt {list(prompt)}, {sampling}: {error}")
                return 0
        return self.known[key]
