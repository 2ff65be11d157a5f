"""What the coordinator is asked and what it answers, as values.

Owns: a request with every default resolved, and the events of its answer. Must not know: protobuf, workers, clocks.
`coordinator.service` turns protobuf into the first and the second into protobuf.
"""

from __future__ import annotations

from dataclasses import dataclass

from specpipe.types import FinishReason, Mode, Origin, Rule, SamplingParams, SpeculationParams, StopRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a client asked, unchecked. None and "" take the documented default."""

    request_id: str = ""
    model: str = ""
    prompt: Prompt | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    mode: Mode | None = None
    rule: Rule | None = None
    num_speculative_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A valid request. Times are milliseconds on the coordinator's own clock."""

    request_id: str
    model: str  # name under which the answer is given
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stops: StopRules
    speculation: SpeculationParams
    stop_strings: tuple[str, ...] = ()
    received_ms: float = 0.0
    deadline_ms: float | None = None  # None: no deadline
    trace_context: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    request_id: str
    model: str
    prompt_tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    token_ids: tuple[int, ...]
    text: str  # certain text only; empty while it is held back
    origins: tuple[Origin, ...]  # one per token id
    round: int  # the last round covered
    text_lengths: tuple[int, ...]  # how many characters of `text` each token id made certain

    def merged_with(self, later: Chunk) -> Chunk:
        """One chunk that says what both say."""
        return Chunk(
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            origins=self.origins + later.origins,
            round=later.round,
            text_lengths=self.text_lengths + later.text_lengths,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    ttft_ms: float
    tpot_ms: float | None  # None below two tokens
    total_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationReport:
    """docs/statistics.md defines each field."""

    mode: Mode
    rule: Rule
    rounds: int
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int
    mean_acceptance_length: float | None
    acceptance_rate: float | None
    hit_rate: float | None
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
    speculation: SpeculationReport


AnswerEvent = Started | Chunk | Finished
