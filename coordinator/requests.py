"""What the coordinator is asked, as values.

Owns: a question as it came, and a request with every default resolved. Must not know: protobuf, workers, clocks.
`coordinator.codec` makes the first from protobuf, `coordinator.validation` the second from the first. What the
coordinator answers is in `specpipe.answers`.
"""

from __future__ import annotations

from dataclasses import dataclass

from specpipe.answers import ChatMessage, Prompt
from specpipe.types import Mode, Rule, SamplingParams, SpeculationParams, StopRules


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
    trace: bool = False  # keep what is done for it

    @property
    def is_chat(self) -> bool:
        return any(isinstance(part, ChatMessage) for part in self.prompt or ())


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
    trace_context: str = ""  # W3C traceparent of its `generate`; empty: not traced
    wants_reports: bool = False  # workers tell what they do for it
    vocab_size: int = 0  # of the target; 0: unknown
