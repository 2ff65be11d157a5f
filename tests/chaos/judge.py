"""Whether each request ended as it must: with the target's own answer, or with a clear error.

Owns: that verdict. Must not know: faults, processes. Every distinct answer is compared with the target alone once
(tests/oracle.py, which shares no code with specpipe).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from oracle import Oracle
from questions import Outcome, Question

from specpipe.errors import ErrorCode
from specpipe.types import FinishReason

CLEAR = (ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED)
"""How a request may fail for a fault of the service: docs/chaos.md. Both say that the same may be asked again.

Whether there was a fault that could make it fail is another question: see `reach`."""
MAX_PAUSE_S = 80.0
"""The longest that a client has patience: it asks both coordinators four times, and each may look for a target worker
for 8.5 s before it says that there is none."""


class Judge:
    def __init__(self, oracle: Oracle) -> None:
        self.counts: Counter[str] = Counter()
        self.num_ties = 0
        self._oracle = oracle
        self._right: dict[tuple[str, object], list[tuple[int, ...]]] = {}  # by prompt and sampling: answers found right

    def check(self, outcomes: Sequence[Outcome]) -> list[str]:
        """What is wrong, in sentences; none: all is well."""
        return [f"{problem}: {outcome}" for outcome in outcomes for problem in self._problems(outcome)]

    def _problems(self, outcome: Outcome) -> list[str]:
        how = self._how(outcome)
        self.counts[how] += 1
        tokens, most = tuple(outcome.answer.token_ids), outcome.question.max_tokens
        rules = {
            "lost": outcome.is_over,
            "begun twice": outcome.num_starts <= 1,
            "ended twice": outcome.num_ends <= 1,
            "an unclear error": outcome.error is None or (outcome.error.code in CLEAR and str(outcome.error) != ""),
            "an error after the end": outcome.error is None or outcome.num_ends == 0,
            "cut silently": how != "answered" or (outcome.num_ends == 1 and len(tokens) == most and _says_so(outcome)),
            "too long": len(tokens) <= most,
            f"a pause of {outcome.longest_pause_s:.0f} s": outcome.longest_pause_s <= MAX_PAUSE_S,
        }
        wrong = [problem for problem, holds in rules.items() if not holds]
        difference = self._difference(outcome.question, tokens) if tokens else ""
        return wrong + ([difference] if difference else []) + self._text_problems(outcome, how)

    def _how(self, outcome: Outcome) -> str:
        if outcome.error is not None:
            elsewhere = " at both coordinators" if outcome.question.asks_elsewhere else ""
            return f"failed as {outcome.error.code.name}{elsewhere}"
        return "left" if outcome.has_left else "answered"

    def _difference(self, question: Question, tokens: tuple[int, ...]) -> str:
        """From what the target says; empty: none."""
        known = self._right.setdefault((question.prompt, question.sampling), [])
        if any(right[: len(tokens)] == tokens for right in known):
            return ""
        try:
            self.num_ties += self._oracle.check(self._oracle.encode(question.prompt), tokens, question.sampling)
        except AssertionError as error:
            return f"a wrong answer ({error})"
        known.append(tokens)
        return ""

    def _text_problems(self, outcome: Outcome, how: str) -> list[str]:
        whole, text = self._oracle.decode(outcome.answer.token_ids), outcome.answer.text
        if how == "answered":
            return [] if text == whole else ["text that is not its tokens'"]
        return [] if whole.startswith(text.rstrip("�")) else ["text that is not its tokens'"]


def _says_so(outcome: Outcome) -> bool:
    finished = outcome.answer.finished
    return (
        finished is not None
        and finished.finish_reason is FinishReason.LENGTH
        and finished.completion_tokens == outcome.question.max_tokens
    )
