"""The public conversation as values: what a prompt may be, and the events of an answer.

Owns: what client and coordinator both say. Must not know: protobuf, workers, clocks.
`specpipe.client` and `coordinator.codec` turn these into protobuf and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specpipe.types import FinishReason, Mode, Origin, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    request_id: str
    model: str
    prompt_tokens: int
    seed: int  # as used
    rule: Rule | None = None  # in force; None: a coordinator that does not tell it


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    token_ids: tuple[int, ...]
    text: str  # what the answer's text grew by; held back while it might be part of a stop string or a character
    origins: tuple[Origin, ...]  # one per token id
    round: int  # the last round covered
    text_lengths: tuple[int, ...] = ()  # how many characters of `text` each token id made certain

    def merged_with(self, later: Chunk) -> Chunk:
        """One chunk that says what both say."""
        return Chunk(
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            origins=self.origins + later.origins,
            round=later.round,
            text_lengths=self.text_lengths + later.text_lengths,
        )

    def pieces(self) -> Iterator[tuple[str, Origin]]:
        """The text, cut by the token that made it certain."""
        start = 0
        for length, origin in zip(self.text_lengths, self.origins, strict=True):
            yield self.text[start : start + length], origin
            start += length


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    ttft_ms: float
    tpot_ms: float | None  # None below two tokens
    total_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationStats:
    """docs/statistics.md defines each; the names are those of `generate --json`."""

    mode: Mode
    rule: Rule
    rounds: int
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int
    mean_acceptance_length: float | None
    acceptance_rate: float | None
    hit_rate: float | None
    lookup_rate: float | None
    draft_ms: float
    exposed_draft_ms: float
    hidden_draft_ms: float
    wasted_draft_ms: float
    target_step_ms: float | None
    draft_step_ms: float | None
    step_gap_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    timing: Timing
    speculation: SpeculationStats
    cached_prompt_tokens: int | None = None  # of the prompt's, those that were computed before; None: not known


AnswerEvent = Started | Chunk | Finished
